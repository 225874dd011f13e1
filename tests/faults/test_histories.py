"""The checker of recorded histories finds each violation of a guarantee, and nothing in a correct history."""

from __future__ import annotations

from functools import partial

import attrs
import pytest
from histories import CHECKS, Call, Exit, History, Limit, Loaded, Node, Plan, Row, Run, most_within, violations

work = partial(Run, task="work", process="p", how="returned")
done = partial(Row, task="work", status="succeeded")


def found(history):
    """Return the names of the checks that have found a violation."""
    return {name for name, sentences in violations(history).items() if sentences}


def two(first, second, **more):
    """Return a history of two runs, of one job or of the two that they name."""
    jobs = {run.job for run in (first, second)}
    return History(runs=[first, second], rows=[done(job=job, attempt=2) for job in jobs], **more)


def kept():
    """Return a history of each kind that keeps all guarantees."""
    return History(
        runs=[
            work(job="a", key="k", began=0, ended=1, how="killed"),
            work(job="a", key="k", began=6, ended=7),
            work(job="b", key="k", began=7, ended=8),
            work(job="c", began=8.5, ended=9),
            work(job="f", began=1, ended=2, how="gave up"),
            work(job="book", task="book", began=1, ended=2, how="killed"),
            work(job="few 1", task="few", began=1, ended=2),
            work(job="few 2", task="few", began=2, ended=3),
        ],
        rows=[
            done(job="a", idempotency_key="request a", attempt=2, ended=7),
            done(job="b", ended=8),
            done(job="c", ended=9),
            done(job="d", status="canceled", attempt=0, ended=2),
            done(job="e", status="canceled", attempt=0),
            done(job="f", status="failed"),
            done(job="book", task="book"),
            done(job="few 1"),
            done(job="few 2"),
            done(job="load", runs_shown=False),
        ],
        added=[("request a", "a"), (None, "b")],
        canceled=[("d", 2.5)],
        graph={"b": Node(), "c": Node(after=("a", "b")), "e": Node(after=("f",)), "f": Node()},
        limits=[Limit("partner", 2, 1.0, [(0, 1), (0.5, 1), (1, 1)])],
        most_running={"few": 1},
        plans=[Plan(name="s", begin=10, end=18, period_s=2, jobs=[10, 12], left_out=[(14, 16)])],
        booked=["book"],
        calls=[
            Call(counter="c", by=1, asked=0, answered=1, answer=1),
            Call(counter="c", by=2, asked=2, answered=5, answer=6, tells=True),
            Call(counter="c", by=3, asked=2, answered=3, answer=4),
        ],
        events={"c": [1, 3, 2]},
        mirrors={"c": [2]},
        loads={
            "keyless": (
                [
                    Loaded(job="load", status="succeeded", segments=((10, 11), (20,))),
                    Loaded(job="part", status="failed", segments=((30,), (40, 41))),
                ],
                [10, 11, 20, 30],
            )
        },
    )


def changed(**fields):
    return attrs.evolve(kept(), **fields)


def with_row(job, **fields):
    """Return the same with a changed row."""
    return changed(rows=[attrs.evolve(row, **fields) if row.job == job else row for row in kept().rows])


def with_job(**fields):
    """Return the same with a row of the job x."""
    return changed(rows=[*kept().rows, done(job="x", **fields)])


def with_run(**fields):
    """Return the same with another run."""
    return changed(runs=[*kept().runs, work(**fields)])


def with_call(**fields):
    """Return the same with a changed call of 2."""
    return changed(calls=[attrs.evolve(call, **fields) if call.by == 2 else call for call in kept().calls])


def with_plan(jobs, end=14, **fields):
    """Return the same with a changed schedule: its times are 10 and 12."""
    return changed(plans=[Plan(name="s", begin=10, end=end, period_s=2, jobs=jobs, **fields)])


def with_records(*numbers):
    """Return the same with a changed table of the load."""
    return changed(loads={"keyless": (kept().loads["keyless"][0], [*numbers])})


def test_a_history_that_keeps_all_guarantees_has_no_violation():
    assert found(kept()) == set()


LOST, UNENDED, OVERLAPS, LATE, ATTEMPTS, BOOKED, LIMITS, PLANS, GRAPHS, LOADS, CALLS, ORDER, MESSAGES, EXITS = CHECKS
KILLED = work(job="x", began=0, ended=1, how="killed")
BROKEN = {
    "acknowledged without a row": (LOST, changed(added=[(None, "x")])),
    "a key with another job": (LOST, changed(added=[("request a", "b")])),
    "a success without a run": (LOST, with_job()),
    "a success whose run was killed": (LOST, History(runs=[KILLED], rows=[done(job="x")])),
    "a run without a row": (LOST, with_run(job="x", began=0, ended=1)),
    "queued at the end": (UNENDED, with_job(status="queued")),
    "two runs of a job": (OVERLAPS, two(work(job="a", began=0, ended=2), work(job="a", began=1, ended=3))),
    "two jobs of a key": (
        OVERLAPS,
        two(work(job="a", key="k", began=0, ended=2), work(job="b", key="k", began=1, ended=3)),
    ),
    "two runs within a long one": (OVERLAPS, with_run(job="x", key="k", began=-1, ended=20)),
    "begun after the end of the job": (LATE, with_run(job="b", key="k", began=11, ended=12)),
    "begun after a confirmed cancel": (LATE, with_run(job="d", began=2.6, ended=2.7)),
    "canceled, then succeeded": (LATE, with_row("d", status="succeeded", runs_shown=False)),
    "more runs than attempts": (ATTEMPTS, with_row("a", attempt=1)),
    "more attempts than allowed": (ATTEMPTS, with_row("a", max_attempts=1)),
    "failed with attempts left": (ATTEMPTS, with_job(status="failed", attempt=2)),
    "a transaction without a row": (BOOKED, changed(booked=[])),
    "a transaction with two rows": (BOOKED, changed(booked=["book", "book"])),
    "a row of a job that failed": (BOOKED, with_row("book", status="failed", attempt=5)),
    "too many in a span": (LIMITS, changed(limits=[Limit("partner", 2, 1.0, [(0, 1), (0.5, 1), (0.99, 1)])])),
    "too many at once": (LIMITS, with_run(job="few 1", task="few", began=2.5, ended=3)),
    "a time without a job": (PLANS, with_plan([10])),
    "a time with two jobs": (PLANS, with_plan([10, 10, 12])),
    "a time with a job and a reason": (PLANS, with_plan([10, 12], left_out=[(10, 10)])),
    "a time that was not planned": (PLANS, with_plan([10, 11, 12])),
    "begun before one that it runs after": (GRAPHS, changed(graph={"b": Node(), "a": Node(after=("b",))})),
    "run though one before it failed": (GRAPHS, changed(graph={"c": Node(after=("f",))})),
    "canceled though all before it succeeded": (GRAPHS, changed(graph={"e": Node(after=("a",))})),
    "canceled though it runs anyway": (GRAPHS, changed(graph={"e": Node(after=("f",), runs_anyway=True)})),
    "a record twice": (LOADS, with_records(10, 10, 11, 20, 30)),
    "a record that is missing": (LOADS, with_records(10, 20, 30)),
    "half a segment of a load that failed": (LOADS, with_records(10, 11, 20, 40)),
    "a record of nowhere": (LOADS, with_records(10, 11, 20, 99)),
    "a call without an answer": (CALLS, with_call(answer=None)),
    "a wrong answer": (CALLS, with_call(answer=3)),
    "a call that is done twice": (CALLS, changed(events={"c": [1, 3, 2, 3]})),
    "an answered call that is not done": (CALLS, changed(events={"c": [1, 3]})),
    "a call that nobody made": (ORDER, changed(events={"c": [1, 3, 2, 9]})),
    "calls out of order": (ORDER, changed(events={"c": [3, 1, 2]})),
    "a message that is missing": (MESSAGES, changed(mirrors={})),
    "a message twice": (MESSAGES, changed(mirrors={"c": [2, 2]})),
    "an exit": (EXITS, changed(exits=[Exit(process="p", at=9, text="ended by itself")])),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_guarantee_is_found(name):
    check, history = BROKEN[name]
    assert check in found(history)


def suspended(*, deadline, ended, begins=6.0, silence=(1.0, 9.0)):
    """Return a run whose process is suspended from second 1 to 9, and another run that begins meanwhile."""
    first = work(job="a", process="p", began=0, ended=ended, deadlines=((0, 3.0), (0.9, deadline)))
    second = work(job="a", process="q", began=begins, ended=begins + 1)
    return two(first, second, silences={"p": [silence]})


def test_a_suspended_run_holds_its_job_until_its_deadline_only():
    assert found(suspended(deadline=5.5, ended=9.1)) == set()
    assert found(suspended(deadline=6.5, ended=9.1)) == {OVERLAPS}


def test_a_run_whose_process_is_not_suspended_at_its_deadline_holds_until_its_end():
    assert found(suspended(deadline=5.5, ended=9.1, silence=(1.0, 5.0))) == {OVERLAPS}
    assert found(suspended(deadline=9.5, ended=9.6)) == {OVERLAPS}


def test_a_suspended_run_that_goes_on_beyond_the_grace_holds_until_its_end():
    assert found(suspended(deadline=5.5, ended=30)) == {OVERLAPS}


def test_a_handler_that_begins_after_its_process_was_suspended_has_nothing():
    late = work(job="a", process="p", began=9.1, ended=9.2, deadlines=((9.1, 5.5),))
    other = work(job="a", process="q", began=6.0, ended=9.5)
    assert found(two(late, other, silences={"p": [(1.0, 9.0)]})) == set()
    assert found(two(late, other)) == {OVERLAPS}


def test_only_a_foreign_service_may_take_a_key_when_its_lock_session_ends():
    ours = work(job="a", key="k", began=0, ended=3)
    other = work(job="b", key="k", began=2, ended=4)
    assert found(two(ours, other, outages=[1.0])) == {OVERLAPS}
    foreign = attrs.evolve(other, is_foreign=True)
    assert found(two(ours, foreign, outages=[1.0])) == set()
    assert found(two(ours, foreign, outages=[2.5])) == {OVERLAPS}
    # The session has ended between the claim and the begin of the run.
    assert found(two(ours, foreign, outages=[-0.9])) == set()
    assert found(two(ours, foreign, outages=[-1.1])) == {OVERLAPS}


def test_a_foreign_service_that_may_take_a_key_frees_it_for_no_other():
    runs = [
        work(job="a", key="k", began=0, ended=10),
        work(job="b", key="k", began=2, ended=3, is_foreign=True),
        work(job="c", key="k", began=4, ended=5),
    ]
    assert found(History(runs=runs, rows=[done(job=job) for job in "abc"], outages=[1.0])) == {OVERLAPS}


def test_only_a_process_without_time_may_end_because_of_a_handler_that_goes_on():
    end = Exit(process="p", at=10, text="a handler goes on", lease_was_gone=True)
    assert found(History(exits=[end])) == {EXITS}
    assert found(History(exits=[end], silences={"p": [(5, 6)]})) == {EXITS}
    assert found(History(exits=[end], silences={"p": [(8, 9)]})) == set()
    assert found(History(exits=[attrs.evolve(end, lease_was_gone=False)], silences={"p": [(8, 9)]})) == {EXITS}


def test_a_span_of_time_excludes_its_end():
    assert most_within([(0, 1), (1, 2)], 1) == 2
    assert most_within([(0, 1), (0.9, 2)], 1) == 3

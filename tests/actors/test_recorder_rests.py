"""The recorder runs only when there are results to write, and ends when all of them are written.

Its database is a substitute of the tests, so that pauses take no time.
"""

from __future__ import annotations

import itertools
import math
from functools import partial

import msgspec
import pytest
import trio
import trio.testing
from conditions import patience_s
from logged import capture_logs

from dataloader.actors.job_runs import Run, Runs
from dataloader.actors.lease import Lease
from dataloader.actors.outage import Outage
from dataloader.actors.recorder import MAX_BATCH, MAX_PAUSE_S, UNSTORABLE, Recorder, open_channel
from dataloader.actors.recorder_messages import Ended, Shown
from dataloader.actors.run_sums import RunSums
from dataloader.actors.wake import Wake
from dataloader.jobs.errors import StoreUnavailable, Unstorable
from dataloader.jobs.ids import uuid7
from dataloader.jobs.model import ClaimedJob
from dataloader.jobs.outcomes import Outcome
from dataloader.jobs.states import Status, Step
from dataloader.jobs.telemetry import Telemetry
from dataloader.store.queue.finish import Finished


class Steps(trio.abc.Instrument):
    """Counts the steps of a task."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count += self.name in task.name


class Locks:
    def forget(self, token: int) -> None:
        """Do nothing: no key is held."""


class Session:
    """Database in which another session has locked the first row for `tries` attempts."""

    def __init__(self, tries: float) -> None:
        self.tries = tries
        self.batches: list[list[int]] = []

    async def write(self, _finish, outcomes: list[Outcome]) -> Finished:
        self.batches.append([outcome.token for outcome in outcomes])
        locked = [outcome.token for outcome in outcomes[:1] if outcome.token == 1 and len(self.batches) <= self.tries]
        return Finished({e.token: Status.SUCCEEDED for e in outcomes if e.token not in locked}, [], locked)


class Statistics:
    """Database that accepts all sums."""

    async def write(self, _add, sums) -> None:
        pass


def a_recorder(session: object, runs: Runs) -> Recorder:
    return Recorder(
        session=session,
        locks=Locks(),
        runs=runs,
        outage=Outage(),
        telemetry=Telemetry(),
        released=Wake(),
        sums=RunSums(Statistics(), Outage()),
    )


def a_run(token: int = 7, *, lock_hash: int | None = 1) -> Run:
    job = ClaimedJob(
        job_id=uuid7(), token=token, queue="q", task="t", args="{}", lock_key="k", lock_hash=lock_hash,
        partition_key="", attempt=1, max_attempts=5, lease_s=60,
    )  # fmt: skip
    return Run(job=job, lease=Lease(job.lease_s, math.inf), claimed_at=0)


async def test_ends_of_jobs_with_a_key_are_written_first(mock_clock):
    runs, session = Runs(), Session(0)
    recorder = a_recorder(session, runs)
    send, receive = open_channel()
    for token in range(1, 401):
        run = a_run(token, lock_hash=1 if token > 390 else None)
        runs.add(run)
        send.send_nowait(Ended(run, Outcome(run.job.job_id, token, Step.SUCCEED)))
    send.close()
    await recorder.run(receive)
    assert session.batches == [[*range(391, 401), *range(1, 241)], [*range(241, 391)]]


async def test_ends_without_a_key_are_written_while_more_with_a_key_arrive(mock_clock):
    runs, session = Runs(), Session(0)
    recorder = a_recorder(session, runs)
    send, receive = open_channel()

    def end(token, lock_hash):
        run = a_run(token, lock_hash=lock_hash)
        run.when_recorded = partial(recorded, lock_hash)
        runs.add(run)
        send.send_nowait(Ended(run, Outcome(run.job.job_id, token, Step.SUCCEED)))

    def recorded(lock_hash):
        # Each job with a key is followed by another one, as in a backlog.
        if lock_hash is not None and len(session.batches) < 20:
            end(next(tokens), lock_hash)

    tokens = itertools.count(101)
    for token in range(1, 101):
        end(token, None)
    for _ in range(MAX_BATCH):
        end(next(tokens), 1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(recorder.run, receive)
        await trio.testing.wait_all_tasks_blocked()
        send.close()
    assert set(range(1, 101)) <= {token for batch in session.batches[:5] for token in batch}


async def test_it_rests_when_the_run_that_had_progress_to_be_shown_has_ended(mock_clock):
    runs, run = Runs(), a_run()
    runs.add(run)
    recorder = a_recorder(None, runs)
    send, receive = open_channel()
    async with trio.open_nursery() as nursery:
        await nursery.start(recorder.run, receive)
        run.outbox.put_progress("{}")
        send.send_nowait(Shown(run))
        send.send_nowait(Ended(run, None))
        await trio.testing.wait_all_tasks_blocked()
        assert not len(runs)
        mock_clock.jump(10)
        steps = Steps("Recorder.run")
        trio.lowlevel.add_instrument(steps)
        for _ in range(100):
            await trio.lowlevel.checkpoint()
        trio.lowlevel.remove_instrument(steps)
        assert steps.count < 5
        nursery.cancel_scope.cancel()


class LockedRow:
    """Database in which another session has locked the row."""

    async def write(self, _show, shown) -> set[int]:
        return {token for _, token, _ in shown}


async def test_progress_that_waits_for_a_locked_row_is_not_sent_again(mock_clock):
    runs, run = Runs(), a_run()
    runs.add(run)
    send, receive = open_channel()
    async with trio.open_nursery() as nursery:
        await nursery.start(a_recorder(LockedRow(), runs).run, receive)
        run.outbox.put_progress("{}")
        run.outbox.is_told = True
        send.send_nowait(Shown(run))
        for _ in range(3):
            await trio.testing.wait_all_tasks_blocked()
            assert run.outbox.is_told
            mock_clock.jump(10)
        nursery.cancel_scope.cancel()
    assert run.outbox.newest_progress == "{}"


def ended(runs: Runs, token: int, *, result: str | None = None) -> Ended:
    run = a_run(token)
    runs.add(run)
    return Ended(run, Outcome(run.job.job_id, token, Step.SUCCEED, result=result))


async def test_a_locked_outcome_is_retried_with_the_next_batch_or_after_growing_pauses(
    autojump_clock,
):
    runs, session = Runs(), Session(tries=20)
    recorder = a_recorder(session, runs)
    send, receive = open_channel()
    async with trio.open_nursery() as nursery:
        await nursery.start(recorder.run, receive)
        send.send_nowait(ended(runs, 1))
        send.send_nowait(ended(runs, 2))
        await trio.testing.wait_all_tasks_blocked()
        assert [run.job.token for run in runs] == [1]
        send.send_nowait(ended(runs, 3))
        await trio.testing.wait_all_tasks_blocked()
        assert [run.job.token for run in runs] == [1]
        assert session.batches == [[1, 2], [1, 3]]
        before = trio.current_time()
        await runs.wait_removed()
        assert 5 < trio.current_time() - before < 10
        assert session.batches[2:] == [[1]] * 19
        assert recorder.tally[Step.SUCCEED] == 3
        nursery.cancel_scope.cancel()


async def test_the_recorder_does_not_end_before_locked_outcomes_are_written(autojump_clock):
    runs, session = Runs(), Session(tries=3)
    send, receive = open_channel()
    send.send_nowait(ended(runs, 1))
    send.close()
    with trio.fail_after(patience_s()):
        await a_recorder(session, runs).run(receive)
    assert (len(runs), session.batches) == (0, [[1]] * 4)


async def test_at_the_end_of_a_drain_a_locked_outcome_is_left_to_its_lease(autojump_clock):
    runs, session = Runs(), Session(tries=math.inf)
    recorder = a_recorder(session, runs)
    send, receive = open_channel()
    send.send_nowait(ended(runs, 1))
    async with trio.open_nursery() as nursery:
        await nursery.start(recorder.run, receive)
        await trio.sleep(10)
        assert len(runs) == 1
        recorder.insisting = False
        send.close()
    assert not len(runs)


class Away:
    """Database with an outage."""

    def __init__(self) -> None:
        self.back = False
        self.asked = 0

    async def write(self, _operation, _rows) -> set[int]:
        self.asked += 1
        if not self.back:
            raise StoreUnavailable("gone")
        return set()


async def test_unwritten_progress_and_log_lines_are_reported_and_leave_no_outage(autojump_clock):
    runs, run, session = Runs(), a_run(), Away()
    runs.add(run)
    recorder = a_recorder(session, runs)
    send, receive = open_channel()
    with capture_logs() as lines:
        async with trio.open_nursery() as nursery:
            await nursery.start(recorder.run, receive)
            run.outbox.put_progress("{}")
            run.outbox.put_line(None, "{}")
            send.send_nowait(Shown(run))
            await trio.sleep(3)
            assert session.asked > 1
            assert not recorder.outage.lasts
            # The latest progress is written together with a success that the handler has committed itself.
            run.shield_commit()
            run.commit_ended(well=True)
            send.send_nowait(Ended(run, None))
            await trio.sleep(3)
            nursery.cancel_scope.cancel()
        recorder.outage.failed("heartbeat", StoreUnavailable("gone"))
        recorder.outage.worked("heartbeat")
    told = [line["event"] for line in lines if line["log_level"] == "warning"]
    assert {"progress waits for the database", "log lines could not be stored"} <= set(told)
    assert told[-2:] == ["the database is unavailable", "the database is available again"]


LONGEST_S = MAX_PAUSE_S * 1.2
"""Pauses differ by up to 20 %."""


class Gone:
    """Database that accepts no outcome until `back_at`.

    `asked` has the time and the number of outcomes of each attempt.
    """

    def __init__(self, back_at: float) -> None:
        self.back_at = back_at
        self.asked: list[tuple[float, int]] = []

    async def write(self, _finish, outcomes: list[Outcome]) -> Finished:
        self.asked.append((trio.current_time(), len(outcomes)))
        if trio.current_time() < self.back_at:
            raise StoreUnavailable("gone")
        return Finished({outcome.token: Status.SUCCEEDED for outcome in outcomes}, [])


async def test_outcomes_wait_for_the_database_with_growing_pauses_and_are_sent_together(autojump_clock):
    runs, session = Runs(), Gone(trio.current_time() + 60)
    recorder = a_recorder(session, runs)
    send, receive = open_channel()
    with capture_logs() as lines:
        async with trio.open_nursery() as nursery:
            await nursery.start(recorder.run, receive)
            for token in (1, 2):
                send.send_nowait(ended(runs, token))
            await trio.sleep(59)
            assert len(runs) == 2
            # Outcomes that arrive meanwhile are the next batch.
            send.send_nowait(ended(runs, 3))
            send.close()
    assert (len(runs), recorder.tally[Step.SUCCEED]) == (0, 3)
    assert [number for _, number in session.asked] == [2] * (len(session.asked) - 1) + [1]
    pauses = [later - sooner for (sooner, _), (later, _) in itertools.pairwise(session.asked[:-1])]
    assert pauses[0] < 0.2
    assert max(pauses) <= LONGEST_S
    assert min(pauses[-10:]) >= MAX_PAUSE_S / 1.25
    assert session.asked[-2][0] <= session.back_at + LONGEST_S
    told = [line["event"] for line in lines if line["log_level"] == "warning"]
    assert told == ["the database is unavailable", "the database is available again"]


async def test_at_the_end_of_a_drain_unwritten_outcomes_are_left_to_their_leases(autojump_clock):
    runs, session = Runs(), Gone(math.inf)
    recorder = a_recorder(session, runs)
    send, receive = open_channel()
    with capture_logs() as lines:
        async with trio.open_nursery() as nursery:
            await nursery.start(recorder.run, receive)
            for token in (1, 2):
                send.send_nowait(ended(runs, token))
            send.close()
            await trio.sleep(30)
            assert len(runs) == 2
            recorder.insisting = False
            bound = trio.current_time()
    assert len(runs) == 0
    assert trio.current_time() - bound <= LONGEST_S
    [told] = [line for line in lines if line["log_level"] == "error"]
    assert (told["event"], told["jobs"]) == (
        "outcomes could not be written; their jobs are recovered when their leases expire",
        2,
    )


class Particular:
    """Database that refuses a batch that contains the text `bad` with `error`, and records the accepted outcomes."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.taken: dict[int, Outcome] = {}

    async def write(self, _finish, outcomes: list[Outcome]) -> Finished:
        if any("bad" in (outcome.result, outcome.error) for outcome in outcomes):
            raise self.error
        self.taken |= {outcome.token: outcome for outcome in outcomes}
        return Finished({outcome.token: Status.SUCCEEDED for outcome in outcomes}, [])


@pytest.mark.parametrize("error", [Unstorable("what it says"), TypeError("of the driver")])
async def test_an_unstorable_outcome_ends_its_job_without_its_text_and_delays_no_other(autojump_clock, error):
    runs, session = Runs(), Particular(error)
    recorder = a_recorder(session, runs)
    send, receive = open_channel()
    messages = [ended(runs, token, result=result) for token, result in enumerate(("good", "bad", "good"), 1)]
    for message in messages:
        send.send_nowait(message)
    send.close()
    began = trio.current_time()
    with capture_logs() as lines, trio.fail_after(patience_s()):
        await recorder.run(receive)
    assert (len(runs), trio.current_time()) == (0, began)
    assert (session.taken[1], session.taken[3]) == (messages[0].outcome, messages[2].outcome)
    bare = msgspec.structs.replace(messages[1].outcome, result=None, error=UNSTORABLE)
    assert msgspec.structs.asdict(session.taken[2]) == msgspec.structs.asdict(bare)
    [told] = [line for line in lines if line["log_level"] == "error"]
    assert (told["event"], told["error"]) == ("an outcome could not be stored unchanged", str(error))

"""Races about one process, each in a forced order: one side stops inside its transaction while the other proceeds."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from uuid import UUID

import attrs
import pytest
import trio
from conditions import patience_s
from databases import raw_connection

from dataloader.store.processes.requests import Request, aio_act, aio_ask, aio_take_back
from dataloader.store.processes.steps import StepOutcome, Wakeup, aio_begin, aio_commit

CLAIM = """
UPDATE dl_jobs SET status = 'running', token = (random() * 1e15)::bigint + 1, claimed_by = 'w',
  lease_expires_at = now() + interval '60 s'
WHERE queue = 'process.pay' AND status = 'queued' AND waits_for IS NULL
RETURNING (args ->> 'key')::bigint, job_id, token
"""
LOST = "UPDATE dl_jobs SET status = 'queued', available_at = now() WHERE status = 'running'"


@attrs.frozen
class Side:
    """One of two sides that use the process 77 concurrently."""

    connection: object

    async def ask(self, kind="call", process_id="77", **fields):
        fields = {"method": "m"} | fields if kind == "call" else fields
        return await self.connection.run(aio_ask, Request(type="pay", process_id=process_id, kind=kind, **fields), 60)

    async def act(self, act):
        return await self.connection.run(aio_act, "pay", "77", act, 60)

    async def claim(self):
        key, job_id, token = await self.connection.fetchrow(CLAIM)
        return Wakeup(key, UUID(str(job_id)), token)

    async def begin(self, wakeup):
        [begun] = await self.connection.run(aio_begin, [wakeup])
        return begun

    async def commit(self, wakeup, task_id, outcome="done", **fields):
        step = StepOutcome(wakeup=wakeup, task_id=task_id, outcome=outcome, **fields)
        [committed] = await self.connection.run(aio_commit, [step])
        return committed

    async def step(self, **fields):
        """Claim, begin and commit a step."""
        wakeup = await self.claim()
        begun = await self.begin(wakeup)
        return await self.commit(wakeup, begun.work.task_id, **fields)


@pytest.fixture
async def sides(database):
    """Return two sides, and start the process."""
    async with raw_connection(database.dsn) as first, raw_connection(database.dsn) as second:
        one, other = Side(first), Side(second)
        await one.ask("init")
        await one.step()
        yield one, other


@pytest.fixture
def while_open(raw):
    """Return a context in which the other side proceeds while the one's transaction is open.

    It yields the other's answers.
    """

    @asynccontextmanager
    async def opened(one, other_does, *, commit=True):
        answers = []
        async with trio.open_nursery() as nursery:
            await one.connection.execute("BEGIN")
            yield answers

            async def do():
                answers.append(await other_does())

            nursery.start_soon(do)
            with trio.fail_after(patience_s()):
                blocked = "SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted)"
                while not answers and not await raw.fetchval(blocked):  # noqa: ASYNC110 - the database has no event
                    await trio.sleep(0.01)
            await one.connection.execute("COMMIT" if commit else "ROLLBACK")

    return opened


JOBS = "SELECT count(*) FROM dl_jobs WHERE status = 'queued' AND waits_for IS NULL"


@pytest.mark.requirement("P3", "P4")
@pytest.mark.parametrize("says", ["commit", "begin"])
async def test_a_call_beside_the_last_word_of_a_run_finds_a_job_that_runs_it(sides, while_open, raw, says):
    one, other = sides
    await one.ask(method="a")
    wakeup = await one.claim()
    task_id = (await one.begin(wakeup)).work.task_id
    if says == "begin":
        # The request of the job is withdrawn before it begins, so that it has nothing to do.
        await one.commit(wakeup, task_id, "returned")
        wakeup = await one.claim()
        await raw.execute("UPDATE dl_process_tasks SET expires_at = now() - interval '1 s'")
    async with while_open(one, partial(other.ask, method="b")) as answers:
        said = await (one.commit(wakeup, task_id) if says == "commit" else one.begin(wakeup))
        assert said.verdict == "rest"
    assert answers[0].verdict == "added"
    assert await raw.fetchval(JOBS) == 1
    assert (await one.begin(await one.claim())).work.method == "b"


@pytest.mark.requirement("P4")
async def test_a_call_before_the_commit_goes_before_the_timer_that_the_step_sets_to_now(sides, raw):
    one, other = sides
    await one.ask(method="a")
    wakeup = await one.claim()
    task_id = (await one.begin(wakeup)).work.task_id
    await other.ask(method="b")
    then = await one.commit(wakeup, task_id, following="timeout", after_s=0.0, go_on=True)
    assert (then.verdict, then.work.method) == ("next", "b")


@pytest.mark.requirement("P3")
async def test_a_begin_beside_a_call_waits_for_it_and_gives_it_before_the_timer(sides):
    one, other = sides
    await one.ask(method="a")
    await one.step(following="timeout", after_s=0.0)
    wakeup = await other.claim()
    await one.connection.execute("BEGIN")
    await one.ask(method="b")
    assert (await other.begin(wakeup)).verdict == "locked"
    await one.connection.execute("COMMIT")
    assert (await other.begin(wakeup)).work.method == "b"


@pytest.mark.requirement("P6")
async def test_one_of_two_concurrent_repairs_is_busy_and_leaves_no_row(sides, while_open, raw):
    one, other = sides
    await one.ask(method="a")
    await one.step(outcome="failed", error="broken")
    async with while_open(one, partial(other.ask, "repair")) as answers:
        assert (await one.ask("repair")).verdict == "added"
    assert answers[0].verdict == "busy"
    assert await raw.fetchval("SELECT count(*) FROM dl_process_tasks WHERE kind = 'repair'") == 1


@pytest.mark.requirement("P6")
async def test_while_a_timer_waits_for_its_next_try_there_is_nothing_to_repair(sides):
    one, _ = sides
    await one.ask(method="a")
    await one.step(following="timeout", after_s=0.0)
    await one.step(outcome="retry", error="not yet", after_s=60.0)
    assert (await one.ask("repair")).verdict == "status"
    assert (await one.act("resume")).verdict == "status"


@pytest.mark.requirement("P2")
@pytest.mark.parametrize("removed", [True, False])
async def test_a_removal_beside_a_commit_answers_all_once(sides, raw, removed):
    one, other = sides
    first, second = [(await one.ask(method=name)).task_id for name in "ab"]
    wakeup = await one.claim()
    await one.begin(wakeup)
    await other.connection.execute("BEGIN")
    assert (await other.act("remove")).told == [first, second]
    assert (await one.commit(wakeup, first)).verdict == "locked"
    await other.connection.execute("COMMIT" if removed else "ROLLBACK")
    assert (await one.commit(wakeup, first)).verdict == ("void" if removed else "rest")
    answered = await raw.fetch("SELECT status, error FROM dl_process_tasks WHERE kind = 'call' ORDER BY task_id")
    gone = ("cancelled", "the process was removed")
    assert [tuple(row) for row in answered] == ([gone, gone] if removed else [("finished", None), ("waiting", None)])


@pytest.mark.requirement("P2")
@pytest.mark.parametrize(
    ("others", "commit", "verdict"),
    [
        ({"args": 1}, True, "again"),
        ({"args": 2}, True, "conflict"),
        ({"args": 1}, False, "added"),
        ({"args": 1, "process_id": "new", "kind": "init"}, True, "conflict"),
        ({"args": 1, "process_id": "new", "may_start": True, "start": 1}, True, "conflict"),
    ],
)
async def test_one_key_sent_twice_at_once_stands_for_the_request_that_came_first(
    sides, while_open, raw, others, commit, verdict
):
    one, other = sides
    async with while_open(one, partial(other.ask, key="k", **others), commit=commit) as answers:
        first = await one.ask(args=1, key="k")
    assert answers[0].verdict == verdict
    assert (answers[0].task_id == first.task_id) == commit
    # A rejected request has created nothing.
    assert await raw.fetchval("SELECT count(*) FROM dl_processes") == 1
    assert await raw.fetchval("SELECT count(*) FROM dl_process_tasks WHERE kind = 'call'") == 1
    assert await raw.fetchval(JOBS) == 1


@pytest.mark.requirement("P2")
@pytest.mark.parametrize("removed", [True, False])
async def test_two_concurrent_starts_make_one_process_even_if_the_first_is_removed(sides, while_open, raw, removed):
    one, other = sides
    await one.act("remove")
    async with while_open(one, partial(other.ask, may_start=True, start=1)) as answers:
        await one.ask("init")
        if removed:
            await one.act("remove")
    assert answers[0].verdict == "added"
    assert await raw.fetchval("SELECT count(*) FROM dl_processes WHERE removed_at IS NULL") == 1
    assert (await one.begin(await one.claim())).work.kind == "init"


@pytest.mark.requirement("P3", "P7")
async def test_a_run_whose_job_is_anothers_neither_begins_nor_commits(sides, raw):
    one, other = sides
    task_id = (await one.ask(method="a")).task_id
    late = await one.claim()
    await one.begin(late)
    await raw.execute(LOST)
    assert (await one.commit(late, task_id)).verdict == "void"
    lost = await other.claim()
    assert (await one.commit(late, task_id, response='"late"')).verdict == "void"
    assert (await one.begin(late)).verdict == "void"
    again = await other.begin(attrs.evolve(lost, crashes=1))
    assert again.work.task_id == task_id
    assert (await one.begin(late)).verdict == "void"
    assert (await other.commit(lost, task_id)).verdict == "rest"


@pytest.mark.requirement("P4")
async def test_a_commit_that_is_sent_again_is_void_and_a_begin_tells_how_it_goes_on(sides, raw):
    one, _ = sides
    first = (await one.ask(method="a")).task_id
    wakeup = await one.claim()
    await one.begin(wakeup)
    second = (await one.ask(method="b")).task_id
    end = {"events": '["once"]', "go_on": True}
    assert (await one.commit(wakeup, first, **end)).work.task_id == second
    assert (await one.commit(wakeup, first, **end)).verdict == "void"
    assert (await one.begin(wakeup)).work.task_id == second
    assert (await one.commit(wakeup, second)).verdict == "rest"
    assert (await one.commit(wakeup, second)).verdict == "void"
    assert (await one.begin(wakeup)).verdict == "void"
    assert await raw.fetchval("SELECT count(*) FROM dl_process_events") == 1


@pytest.mark.requirement("P4")
async def test_a_commit_while_somebody_has_the_jobs_row_writes_nothing(sides, raw):
    one, other = sides
    task_id = (await one.ask(method="a")).task_id
    wakeup = await one.claim()
    await one.begin(wakeup)
    await other.connection.execute("BEGIN; SELECT FROM dl_jobs FOR UPDATE")
    assert (await one.commit(wakeup, task_id)).verdict == "locked"
    await other.connection.execute("COMMIT")
    assert (await one.commit(wakeup, task_id)).verdict == "rest"


@pytest.mark.requirement("P5")
async def test_a_timer_that_was_moved_after_the_claim_does_not_run_yet(sides, raw):
    one, _ = sides
    await one.ask(method="a")
    await one.step(following="timeout", after_s=0.0)
    wakeup = await one.claim()
    await raw.execute("UPDATE dl_processes SET timer_at = now() + interval '1 h'")
    assert (await one.begin(wakeup)).verdict == "rest"
    assert await raw.fetchval("SELECT waits_for FROM dl_jobs WHERE available_at > now()") == "time"


@pytest.mark.requirement("P12")
async def test_a_stop_beside_the_end_of_its_step_does_not_stop_the_next_one(sides):
    one, other = sides
    first, second = [(await one.ask(method=name)).task_id for name in "ab"]
    wakeup = await one.claim()
    await one.begin(wakeup)
    assert (await other.act("stop")).verdict == "done"
    assert (await one.commit(wakeup, first, go_on=True)).verdict == "rest"
    assert (await other.act("stop")).verdict == "status"
    assert (await one.begin(await one.claim())).work.task_id == second


@pytest.mark.requirement("P2")
@pytest.mark.parametrize("expired", [False, True])
async def test_a_call_is_not_taken_back_beside_its_beginning(sides, while_open, raw, expired):
    one, other = sides
    asked = await one.ask(method="a")
    wakeup = await one.claim()
    async with while_open(
        one, partial(aio_take_back, other.connection, {asked.task_id: asked.ident}, expired=expired)
    ) as answers:
        assert (await one.begin(wakeup)).work.task_id == asked.task_id
        await raw.execute("UPDATE dl_process_tasks SET expires_at = now() WHERE task_id = $1", asked.task_id)
    assert answers == [[]]
    assert await aio_take_back(raw, {asked.task_id: asked.ident}, expired=expired) == []
    assert (await one.commit(wakeup, asked.task_id)).verdict == "rest"
    assert await raw.fetchval("SELECT status FROM dl_process_tasks ORDER BY task_id DESC LIMIT 1") == "finished"

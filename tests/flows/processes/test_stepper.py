"""Stepper: steps share statements, each gets its own answer, and a canceled caller's unsent step is withdrawn."""

from __future__ import annotations

from uuid import UUID

import pytest
import trio
import trio.testing
from conditions import patience_s
from databases import raw_connection

from dataloader.flows.processes.stepper import open_stepper
from dataloader.jobs.errors import Unstorable
from dataloader.store.connection.bridge import open_database
from dataloader.store.connection.options import DatabaseOptions
from dataloader.store.processes.requests import Request, aio_ask
from dataloader.store.processes.steps import StepOutcome, Wakeup

CLAIM = """
UPDATE dl_jobs SET status = 'running', token = 7, claimed_by = 'w', lease_expires_at = now() + interval '60 s'
WHERE queue = 'process.pay' RETURNING (args ->> 'key')::bigint AS key, job_id
"""
LOCK = "BEGIN; SELECT FROM dl_processes WHERE process_id = 'a' FOR NO KEY UPDATE"
WAITS = "SELECT count(*) > 0 FROM pg_locks WHERE NOT granted AND pg_backend_pid() = ANY (pg_blocking_pids(pid))"
BEGUN = "SELECT string_agg(process_id, ',' ORDER BY process_id) FROM dl_processes WHERE running_task IS NOT NULL"


@pytest.fixture
async def store(database):
    async with open_database(DatabaseOptions(dsn=database.dsn, statement_timeout_s=10)) as store:
        yield store


@pytest.fixture
async def raw(database):
    async with raw_connection(database.dsn) as raw:
        yield raw


@pytest.fixture
def claimed(store, raw):
    """Return a function that starts processes and claims their wake-up jobs."""

    async def claim(*process_ids):
        for process_id in process_ids:
            await store.run(aio_ask, Request(type="pay", process_id=process_id, kind="init"), 60)
        rows = await raw.fetch(CLAIM)
        return [Wakeup(row["key"], UUID(str(row["job_id"])), 7) for row in sorted(rows, key=lambda row: row["key"])]

    return claim


@pytest.mark.requirement("P7")
async def test_a_canceled_caller_leaves_and_its_unsent_step_does_not_begin(store, raw, claimed):
    locked, unsent, sent = await claimed("a", "b", "c")
    begun = {}

    async def begin(stepper, wakeup):
        begun[wakeup] = (await stepper.begin(store, wakeup, in_turn=True)).verdict

    async with open_stepper() as stepper, trio.open_nursery() as nursery:
        await raw.execute(LOCK)
        nursery.start_soon(begin, stepper, locked)
        with trio.fail_after(patience_s()):
            while not await raw.fetchval(WAITS):  # noqa: ASYNC110 - the database has no event
                await trio.sleep(0.01)
        nursery.start_soon(begin, stepper, sent)
        async with trio.open_nursery() as leaving:
            leaving.start_soon(begin, stepper, unsent)
            await trio.testing.wait_all_tasks_blocked()
            leaving.cancel_scope.cancel()
        assert begun == {}
        await raw.execute("COMMIT")
    assert begun == {locked: "step", sent: "step"}
    assert await raw.fetchval(BEGUN) == "a,c"


@pytest.mark.requirement("P7")
async def test_a_caller_leaves_while_its_statement_is_in_progress(store, raw, claimed):
    [wakeup] = await claimed("a")
    async with open_stepper() as stepper:
        await raw.execute(LOCK)
        async with trio.open_nursery() as leaving:
            leaving.start_soon(lambda: stepper.begin(store, wakeup, in_turn=True))
            with trio.fail_after(patience_s()):
                while not await raw.fetchval(WAITS):  # noqa: ASYNC110 - the database has no event
                    await trio.sleep(0.01)
            leaving.cancel_scope.cancel()
        assert await raw.fetchval(WAITS)
        await raw.execute("COMMIT")
        assert (await stepper.begin(store, wakeup, in_turn=True)).verdict == "step"


async def test_each_step_of_a_batch_gets_its_own_answer_or_error(store, raw, claimed):
    wakeups = await claimed("a", "b", "c")
    responses = dict(zip(wakeups, ('"good"', "no JSON", '"good"'), strict=True))
    answers = {}

    async def commit(stepper, wakeup, begun):
        step = StepOutcome(wakeup=wakeup, task_id=begun.work.task_id, outcome="done", response=responses[wakeup])
        try:
            answers[wakeup] = (await stepper.commit(store, step)).verdict
        except Unstorable:
            answers[wakeup] = "unstorable"

    async with open_stepper() as stepper:
        begun = [await stepper.begin(store, wakeup) for wakeup in wakeups]
        async with trio.open_nursery() as nursery:
            for wakeup, one in zip(wakeups, begun, strict=True):
                nursery.start_soon(commit, stepper, wakeup, one)
    assert [answers[wakeup] for wakeup in wakeups] == ["rest", "unstorable", "rest"]

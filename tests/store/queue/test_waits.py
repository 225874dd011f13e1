from __future__ import annotations

from contextlib import asynccontextmanager
from uuid import UUID

import attrs
import pytest
import trio
import trio.testing
from conditions import patience_s
from databases import raw_connection
from watched_database import WatchedDatabase

from dataloader.jobs.errors import JobNotFound
from dataloader.jobs.ids import uuid7
from dataloader.jobs.states import Status
from dataloader.store.queue import control, reads, waits
from dataloader.store.queue.waits import Waits

FOREVER_S = 20
BRIEFLY = f"{reads._SELECT_JOB_BRIEFLY}WHERE job_id = $1"
"""Statement with which a waiter reads its job."""


@asynccontextmanager
async def listening(database, held):
    """Do the listener's part: notifications on dl_changed go to `held`."""
    async with raw_connection(database.dsn) as connection:
        await connection._cross(
            connection.asyncpg.add_listener, "dl_changed", lambda *event: held.changed(UUID(event[3]))
        )
        yield


@pytest.fixture
def held(store):
    # A periodic read would hide a missed notification.
    return Waits(store, reread_s=3600.0)


class Waiter:
    """Wait in the background whose end and answer are visible."""

    def __init__(self, nursery, held, job_id, *, seen=None, timeout_s=FOREVER_S):
        self.job = None
        self.ended = trio.Event()
        nursery.start_soon(self.run, held, job_id, seen, timeout_s)

    async def run(self, held, job_id, seen, timeout_s):
        self.job = await held.wait(job_id, timeout_s=timeout_s, seen=seen)
        self.ended.set()

    async def answer(self):
        with trio.fail_after(patience_s()):
            await self.ended.wait()
        return self.job


@pytest.fixture
def until_watched(until):
    async def until_watched(job_id):
        await until("watched FROM dl_jobs WHERE job_id = $1", job_id)

    return until_watched


@pytest.mark.slow
@pytest.mark.requirement("Q3")
@pytest.mark.parametrize("change", ["status = 'succeeded'", "status = 'running'", "progress = '{\"rows\": 1}'"])
async def test_a_waiter_is_notified_of_the_end_and_of_each_change(
    store, raw, database, add_job, held, change, until_watched
):
    job_id = await add_job()
    seen = await reads.get_job(store, job_id)
    async with listening(database, held), trio.open_nursery() as nursery:
        waiter = Waiter(nursery, held, job_id, seen=seen)
        await until_watched(job_id)
        await raw.execute(f"UPDATE dl_jobs SET {change} WHERE job_id = $1", job_id)
        assert await waiter.answer() == await reads.get_job(store, job_id)


async def test_a_waiter_is_notified_of_consecutive_changes(raw, database, add_job, held, until_watched):
    job_id = await add_job(status="'running'")
    async with listening(database, held), trio.open_nursery() as nursery:
        seen = await held.wait(job_id, timeout_s=0)
        for rows in range(1, 4):
            waiter = Waiter(nursery, held, job_id, seen=seen)
            await until_watched(job_id)
            await raw.execute("UPDATE dl_jobs SET progress = $2 WHERE job_id = $1", job_id, f'{{"rows": {rows}}}')
            seen = await waiter.answer()
            assert seen.progress == {"rows": rows}


async def test_waiters_in_two_processes_are_both_notified_of_a_change(
    store, raw, database, add_job, held, until_watched
):
    job_id, other = await add_job(status="'running'"), Waits(store)
    async with listening(database, held), listening(database, other), trio.open_nursery() as nursery:
        waiters = [Waiter(nursery, one, job_id, seen=await reads.get_job(store, job_id)) for one in (held, other)]
        await until_watched(job_id)
        await raw.execute("UPDATE dl_jobs SET status = 'succeeded' WHERE job_id = $1", job_id)
        assert [(await waiter.answer()).status for waiter in waiters] == [Status.SUCCEEDED] * 2


async def test_a_change_that_is_none_for_the_waiter_does_not_end_the_wait(raw, database, add_job, held, until_watched):
    job_id = await add_job(status="'running'")
    async with listening(database, held), trio.open_nursery() as nursery:
        waiter = Waiter(nursery, held, job_id)
        await until_watched(job_id)
        await raw.execute("UPDATE dl_jobs SET heartbeat_at = now() WHERE job_id = $1", job_id)
        held.changed(job_id)
        held.changed(uuid7())
        await raw.execute("UPDATE dl_jobs SET error = 'x', status = 'failed' WHERE job_id = $1", job_id)
        assert (await waiter.answer()).error == "x"


async def test_a_wait_for_an_ended_job_returns_immediately_and_writes_nothing(raw, add_job, held):
    job_id = await add_job(status="'failed'")
    with trio.fail_after(patience_s()):
        assert (await held.wait(job_id, timeout_s=FOREVER_S)).status is Status.FAILED
    assert await raw.fetchval("SELECT watched FROM dl_jobs") is False


async def test_a_waiter_with_an_older_state_is_answered_immediately(store, raw, add_job, held):
    job_id = await add_job()
    seen = await reads.get_job(store, job_id)
    await raw.execute("UPDATE dl_jobs SET status = 'running'")
    with trio.fail_after(patience_s()):
        assert (await held.wait(job_id, timeout_s=FOREVER_S, seen=seen)).status is Status.RUNNING


async def test_an_unknown_job_is_refused(held):
    with pytest.raises(JobNotFound):
        await held.wait(uuid7(), timeout_s=FOREVER_S)
    assert held._watches == {}


async def test_after_the_timeout_the_current_job_is_returned(add_job, held):
    job_id = await add_job()
    with trio.fail_after(patience_s()):
        for timeout_s in (0, 0.05):
            assert (await held.wait(job_id, timeout_s=timeout_s)).status is Status.QUEUED
    assert held._watches == {}


@pytest.mark.requirement("Q3")
async def test_a_change_between_the_mark_and_the_reading_is_not_missed(store, add_job):
    job_id = await add_job()
    seen = await reads.get_job(store, job_id)

    async def aio_change(connection, sql, *_values, **_answer):
        if sql == waits._WATCH:
            await connection.execute("UPDATE dl_jobs SET status = 'running' WHERE job_id = $1", job_id)

    held = Waits(WatchedDatabase(store, after=aio_change), reread_s=3_600)
    with trio.fail_after(patience_s()):
        assert (await held.wait(job_id, timeout_s=60, seen=seen)).status is Status.RUNNING


@pytest.mark.requirement("Q3")
async def test_a_change_between_the_reading_and_the_wait_is_not_missed(store, database, add_job):
    job_id = await add_job()
    readings = []

    async def aio_change(connection, sql, *_values, answer):
        if sql == BRIEFLY:
            readings.append(answer["status"])
            if len(readings) == 1:
                await connection.execute("UPDATE dl_jobs SET status = 'running' WHERE job_id = $1", job_id)

    held = Waits(WatchedDatabase(store, after=aio_change), reread_s=3_600)
    async with listening(database, held):
        with trio.fail_after(patience_s()):
            assert (await held.wait(job_id, timeout_s=60)).status is Status.RUNNING
    assert readings == [Status.QUEUED, Status.RUNNING]


async def test_a_change_that_began_before_the_mark_and_commits_after_it_is_not_missed(
    raw, database, add_job, held, until_blocked
):
    job_id = await add_job(status="'running'")
    seen = await reads.get_job(held._database, job_id)
    await raw.execute("BEGIN")
    await raw.execute("UPDATE dl_jobs SET status = 'succeeded' WHERE job_id = $1", job_id)
    async with listening(database, held), trio.open_nursery() as nursery:
        waiter = Waiter(nursery, held, job_id, seen=seen)
        await until_blocked()
        await raw.execute("COMMIT")
        assert (await waiter.answer()).status is Status.SUCCEEDED


async def test_a_locked_row_does_not_delay_a_waiter_beyond_its_timeout(raw, add_job, held):
    job_id = await add_job()
    await raw.execute("BEGIN")
    await raw.execute("SELECT FROM dl_jobs WHERE job_id = $1 FOR UPDATE", job_id)
    with trio.fail_after(patience_s()):
        assert (await held.wait(job_id, timeout_s=0.2)).job_id == job_id
    await raw.execute("COMMIT")


async def test_without_notifications_a_look_now_and_then_finds_the_change(store, raw, add_job, until_watched):
    held = Waits(store, reread_s=0.05)
    job_id = await add_job()
    seen = await reads.get_job(store, job_id)
    async with trio.open_nursery() as nursery:
        waiters = [Waiter(nursery, held, job_id, seen=seen) for _ in range(3)]
        await until_watched(job_id)
        await raw.execute("UPDATE dl_jobs SET status = 'running'")
        assert {(await waiter.answer()).status for waiter in waiters} == {Status.RUNNING}


async def test_after_a_reconnect_everybody_looks_again(raw, add_job, held, until_watched):
    jobs = [await add_job() for _ in range(3)]
    async with trio.open_nursery() as nursery:
        waiters = [Waiter(nursery, held, job_id) for job_id in jobs]
        for job_id in jobs:
            await until_watched(job_id)
        await raw.execute("UPDATE dl_jobs SET status = 'canceled'")
        held.all_changed()
        assert [(await waiter.answer()).job_id for waiter in waiters] == jobs


async def test_many_waiters_on_a_job_share_its_readings(store, raw, database, add_job, until_watched):
    job_id = await add_job()
    readings = []

    async def aio_count(_connection, sql, *_values, **_answer):
        if sql == BRIEFLY:
            readings.append(sql)

    held = Waits(WatchedDatabase(store, after=aio_count), reread_s=3_600)
    async with listening(database, held), trio.open_nursery() as nursery:
        waiters = [Waiter(nursery, held, job_id) for _ in range(50)]
        await until_watched(job_id)
        await raw.execute("UPDATE dl_jobs SET status = 'succeeded'")
        assert {(await waiter.answer()).status for waiter in waiters} == {Status.SUCCEEDED}
    assert 1 <= len(readings) <= 4
    assert held._watches == {}


async def test_a_new_waiter_never_gets_an_older_state_than_it_knows(store, raw, add_job, held, until_watched):
    job_id = await add_job()
    async with trio.open_nursery() as nursery:
        first = Waiter(nursery, held, job_id)
        await until_watched(job_id)
        await trio.testing.wait_all_tasks_blocked(0.05)
        await raw.execute("UPDATE dl_jobs SET status = 'running'")
        seen = await reads.get_job(store, job_id)
        newcomer = await held.wait(job_id, timeout_s=0.1, seen=seen)
        assert (newcomer.status, first.ended.is_set()) == (Status.RUNNING, False)
        nursery.cancel_scope.cancel()


async def test_a_reader_that_times_out_leaves_a_read_for_the_others(raw, add_job, held):
    job_id = await add_job()
    seen = attrs.evolve(await reads.get_job(held._database, job_id), status=Status.RUNNING)
    await raw.execute("BEGIN")
    await raw.execute("SELECT FROM dl_jobs WHERE job_id = $1 FOR UPDATE", job_id)
    async with trio.open_nursery() as nursery:
        impatient = Waiter(nursery, held, job_id, timeout_s=0.2)
        await trio.testing.wait_all_tasks_blocked()
        patient = Waiter(nursery, held, job_id, seen=seen)
        assert (await impatient.answer()).status is Status.QUEUED
        await raw.execute("COMMIT")
        assert (await patient.answer()).status is Status.QUEUED


@pytest.mark.requirement("Q4")
async def test_an_operators_cancel_notifies_the_waiter(store, raw, database, add_job, held, until_watched):
    job_id = await add_job()
    async with listening(database, held), trio.open_nursery() as nursery:
        waiter = Waiter(nursery, held, job_id)
        await until_watched(job_id)
        await control.cancel(store, job_id, control.Operator("a"))
        assert (await waiter.answer()).status is Status.CANCELED


async def test_a_watched_job_is_kept_without_args_and_result(raw, add_job, held, until_watched):
    """They may be long, and there may be hundreds; the answer has them."""
    job_id = await add_job()
    await raw.execute("UPDATE dl_jobs SET args = '{\"text\": \"long\"}', result = '[1]'")
    async with trio.open_nursery() as nursery:
        waiter = Waiter(nursery, held, job_id)
        await until_watched(job_id)
        [watch] = held._watches.values()
        async with watch.turn:
            assert (watch.job.args, watch.job.result, watch.job.status) == (None, None, Status.QUEUED)
        await raw.execute("UPDATE dl_jobs SET status = 'succeeded'")
        held.changed(job_id)
        job = await waiter.answer()
        assert (job.args, job.result) == ({"text": "long"}, [1])

"""Only one run of a load at a time, however its runs are started; a run without its load commits nothing (E6)."""

from __future__ import annotations

import pytest
import trio
from etl_loads import open_load

from dataloader.jobs.errors import LeaseLost
from dataloader.jobs.states import Step
from dataloader.store.connection.bridge import open_database
from dataloader.store.connection.options import DatabaseOptions
from dataloader.store.etl.load_holders import LoadIsHeld
from dataloader.store.etl.merge import Merge
from dataloader.store.etl.run_journal import (
    aio_begin_run,
    aio_end_run,
    aio_note_task,
)
from dataloader.store.etl.segment_commit import SegmentCommit, aio_commit_segment
from dataloader.store.queue.leases import reap
from dataloader.store.queue.transaction import Transactions

pytestmark = pytest.mark.requirement("E6", "Q10")


@pytest.fixture
def worker(start_worker):
    return start_worker()


@pytest.fixture
async def start(worker, add_job):
    """Return a function that returns a running job."""

    async def start():
        await add_job()
        [job] = await worker.claim()
        return job

    return start


@pytest.fixture
def begin(transactions):
    """Return a function that begins a job's run of the load `rates`."""

    async def begin(job, kind="load"):
        tasks = [("ods", "names"), ("ods", "rates")] if kind == "flow" else [("", "rates")]
        return await transactions.run(aio_begin_run, job.job_id, job.token, "run", kind, tasks)

    return begin


@pytest.fixture
def note(transactions):
    """Return a function that records the status of the task `rates` of a job's run."""

    async def note(job, status):
        await transactions.run(aio_note_task, job.job_id, job.token, "rates", status, {})

    return note


@pytest.fixture
async def commit(transactions, raw):
    """Return a function that commits a segment of the load `rates` with one row."""
    load = await open_load(transactions, raw, "id int PRIMARY KEY, a text", key="id")

    async def commit(job, number=1):
        rows = await load.stage([(number, "a")])
        merge = Merge(table=load.table, segment=load.segment, columns=load.columns, key=load.key, rows=rows)
        return await transactions.run(
            aio_commit_segment,
            SegmentCommit(run_id=job.job_id, token=job.token, task="rates", segment=f"day {number}", merges=[merge]),
        )

    return commit


async def test_a_second_run_of_a_load_does_not_begin_and_leaves_no_record(start, begin, raw):
    first, second = await start(), await start()
    await begin(first)
    with pytest.raises(LoadIsHeld, match=f"the run {first.job_id} of the load rates has not ended") as held:
        await begin(second)
    assert (held.value.load, held.value.run_id) == ("rates", first.job_id)
    assert held.value.held_s >= 0
    assert [row["run_id"] for row in await raw.fetch("SELECT run_id FROM dl_etl_runs")] == [first.job_id]
    await begin(first)  # its holder may begin again


@pytest.mark.slow
@pytest.mark.parametrize("status", ["succeeded", "failed", "canceled", "interrupted"])
async def test_the_end_of_a_run_frees_its_load_however_it_ended(start, begin, note, commit, status):
    first, second = await start(), await start()
    await begin(first)
    await note(first, status)
    await begin(second)
    assert (await commit(second))["inserted"] == 1


async def test_a_flow_holds_a_load_only_while_its_task_runs(start, begin, note):
    flow, load = await start(), await start()
    await begin(flow, "flow")
    await begin(load)
    with pytest.raises(LoadIsHeld):
        await note(flow, "running")
    await note(load, "succeeded")
    await note(flow, "running")
    with pytest.raises(LoadIsHeld):
        await begin(load)
    await note(flow, "succeeded")
    await begin(load)


async def test_a_killed_run_holds_its_load_until_its_lease_has_ended(start, begin, raw, store):
    dead, next_one = await start(), await start()
    await begin(dead)
    with pytest.raises(LoadIsHeld):
        await begin(next_one)
    await raw.execute("UPDATE dl_jobs SET lease_expires_at = now() - interval '1 s' WHERE job_id = $1", dead.job_id)
    await reap(store, 100)
    await begin(next_one)
    # The job of the dead run is queued again, and waits in its turn.
    [row] = await raw.fetch("SELECT status FROM dl_jobs WHERE job_id = $1", dead.job_id)
    assert row["status"] == "queued"


@pytest.mark.parametrize("how", ["deleted", "given back"])
async def test_a_job_that_does_not_run_holds_nothing(start, begin, worker, raw, how):
    first, second = await start(), await start()
    await begin(first)
    if how == "deleted":
        await raw.execute("DELETE FROM dl_jobs WHERE job_id = $1", first.job_id)
    else:
        await worker.end(first, Step.RETURN)
    await begin(second)


async def test_a_run_whose_load_another_one_holds_commits_nothing(start, begin, commit, raw):
    first, second = await start(), await start()
    await begin(first)
    await commit(first, 1)
    # The answer to the commit is lost; meanwhile the run ends and the next run begins.
    holder = "UPDATE dl_load_holders SET run_id = $1, token = $2"
    await raw.execute(holder, second.job_id, second.token)
    with pytest.raises(LeaseLost, match="another run holds the load rates"):
        await commit(first, 2)
    assert [row["id"] for row in await raw.fetch("SELECT id FROM target")] == [1]
    assert await raw.fetchval("SELECT count(*) FROM dl_etl_segments") == 1


async def test_a_commit_of_a_run_that_begins_no_load_commits_nothing(start, begin, commit, raw):
    flow = await start()
    await begin(flow, "flow")
    with pytest.raises(LeaseLost):
        await commit(flow)
    assert await raw.fetchval("SELECT count(*) FROM target") == 0


async def test_a_load_is_not_free_before_a_commit_under_way_has_ended(start, begin, note, raw, until, database):
    first, second = await start(), await start()
    await begin(first)
    async with open_database(DatabaseOptions(dsn=database.dsn)) as other, trio.open_nursery() as nursery:
        slow = Transactions(other)
        sleeps = trio.Event()

        async def aio_commit_slowly(connection):
            await aio_commit_segment(
                connection,
                SegmentCommit(run_id=first.job_id, token=first.token, task="rates", segment="day 1", merges=[]),
            )
            nursery_token.run_sync_soon(sleeps.set)
            # The transaction is open until the test releases the lock.
            await connection.execute("SELECT pg_advisory_xact_lock(7)")

        nursery_token = trio.lowlevel.current_trio_token()
        await raw.execute("SELECT pg_advisory_lock(7)")
        nursery.start_soon(slow.run, aio_commit_slowly)
        await sleeps.wait()
        nursery.start_soon(note, first, "interrupted")
        # The commit waits for the advisory lock, and the note for the commit.
        await until("(SELECT count(*) = 2 FROM pg_locks WHERE NOT granted)")
        assert await raw.fetchval("SELECT run_id FROM dl_load_holders") == first.job_id
        await raw.execute("SELECT pg_advisory_unlock(7)")
        await until("NOT EXISTS (SELECT FROM dl_load_holders)")
        slow.close()
    assert await raw.fetchval("SELECT count(*) FROM dl_etl_segments") == 1
    await begin(second)


@pytest.mark.slow
async def test_of_many_runs_that_begin_concurrently_one_holds_the_load(start, database, raw):
    jobs = [await start() for _ in range(8)]
    for _ in range(10):
        began = []

        async def one(job, transactions, go, began=began):
            await go.wait()
            try:
                await transactions.run(aio_begin_run, job.job_id, job.token, "run", "load", [("", "rates")])
            except LoadIsHeld:
                return
            began.append(job)

        async with open_database(DatabaseOptions(dsn=database.dsn, transaction_pool_size=8)) as store:
            transactions, go = Transactions(store), trio.Event()
            async with trio.open_nursery() as nursery:
                for job in jobs:
                    nursery.start_soon(one, job, transactions, go)
                go.set()
            [holder] = began
            held = await raw.fetchrow("SELECT run_id, token FROM dl_load_holders")
            assert (held["run_id"], held["token"]) == (holder.job_id, holder.token)
            await transactions.run(aio_note_task, holder.job_id, holder.token, "rates", "succeeded", {})
            await transactions.run(aio_end_run, holder.job_id, holder.token, "succeeded", {})
            transactions.close()

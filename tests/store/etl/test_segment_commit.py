"""The commit of a segment: idempotent by its ledger row, for several tables (E6, E10)."""

from __future__ import annotations

import asyncio
import json

import attrs
import pytest
import trio
from etl_loads import open_load

from dataloader.jobs.errors import StoreError, StoreUnavailable
from dataloader.store.etl.failure_rows import Failure
from dataloader.store.etl.merge import Merge
from dataloader.store.etl.run_journal import aio_begin_run, staging_name
from dataloader.store.etl.segment_commit import SegmentCommit, aio_commit_segment
from dataloader.store.etl.staging import StagedLines, StagedSegment, aio_create_staging, aio_stage
from dataloader.store.etl.target_table import aio_describe

pytestmark = pytest.mark.requirement("E6", "E10")


@pytest.fixture
async def commit(start_worker, add_job, transactions, raw):
    """Return the commit of a segment with one staged row, in a run that has begun."""
    await add_job()
    [job] = await start_worker().claim()
    await transactions.run(aio_begin_run, job.job_id, job.token, "rates", "load", [("", "rates")])
    load = await open_load(transactions, raw, "id int PRIMARY KEY, a text", key="id")
    rows = await load.stage([(1, "a")])
    merge = Merge(table=load.table, segment=load.segment, columns=load.columns, key=load.key, rows=rows)
    failure = Failure(load="rates", segment="day 1", phase="record", key="2", error="no", requests=[])
    return SegmentCommit(
        run_id=job.job_id,
        token=job.token,
        task="rates",
        segment="day 1",
        merges=[merge],
        failures=[failure],
        counts={"requests": 2},
    )


@pytest.fixture
def committed(raw):
    """Return a function that reads what is committed: the rows, the ledger's counts, the number of failures."""

    async def committed():
        ledger = await raw.fetch("SELECT counts FROM dl_etl_segments")
        return (
            [tuple(row) for row in await raw.fetch("TABLE target")],
            [json.loads(row["counts"]) for row in ledger],
            await raw.fetchval("SELECT count(*) FROM dl_etl_failures"),
        )

    return committed


ONCE = ([(1, "a")], [{"requests": 2, "inserted": 1}], 1)


async def test_a_repeated_commit_writes_nothing_and_returns_the_recorded_counts(commit, committed, transactions):
    first = await transactions.run(aio_commit_segment, commit)
    assert first["inserted"] == 1
    assert await transactions.run(aio_commit_segment, commit) == {"inserted": 1}
    assert await committed() == ONCE


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["commits", "is cut"])
async def test_a_repeated_commit_waits_for_the_first_transaction(commit, committed, transactions, raw, until, ends):
    counts = []

    async def aio_commit_slowly(connection):
        await aio_commit_segment(connection, commit)
        await connection.execute("SELECT pg_advisory_xact_lock(7)")

    async def first():
        try:
            await transactions.run(aio_commit_slowly)
        except StoreUnavailable:
            counts.append("cut")

    async def again():
        counts.append(await transactions.run(aio_commit_segment, commit))

    await raw.execute("SELECT pg_advisory_lock(7)")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(first)
        await until("EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted)")
        nursery.start_soon(again)
        await until("EXISTS (SELECT FROM pg_locks WHERE locktype = 'transactionid' AND NOT granted)")
        assert counts == []
        if ends == "is cut":
            await raw.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
            )
        await raw.execute("SELECT pg_advisory_unlock(7)")
    [found] = [one for one in counts if one != "cut"]
    assert (found["inserted"], "cut" in counts) == (1, ends == "is cut")
    assert await committed() == ONCE


@pytest.mark.slow
async def test_the_server_ends_the_transaction_of_a_stopped_worker(commit, committed, transactions, until):
    async def aio_stop_in_the_middle(connection):
        await aio_commit_segment(connection, attrs.evolve(commit, lease_s=0.5))
        await asyncio.sleep(60)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(transactions.run, aio_stop_in_the_middle)
        await until("EXISTS (SELECT FROM pg_stat_activity WHERE state = 'idle in transaction')")
        with trio.fail_after(30):
            assert (await transactions.run(aio_commit_segment, commit))["inserted"] == 1
        nursery.cancel_scope.cancel()
    assert await committed() == ONCE


@pytest.fixture
async def with_child(commit, transactions, raw):
    """Return the commit with a second merge, of a row that refers to the first one."""
    await raw.execute("CREATE TABLE child (id int PRIMARY KEY, parent int REFERENCES target)")
    table = await transactions.run(aio_describe, "child")
    segment = StagedSegment(staging_name(commit.run_id, commit.token, 1), 7, 1)
    await transactions.run(aio_create_staging, table, segment.staging, ["id", "parent"], ["id"])
    lines = StagedLines(("id", "parent"), 1, b"1\t11\t1\n")
    await transactions.run(aio_stage, segment, [(1, lines)])
    child = Merge(table=table, segment=segment, columns=["id", "parent"], key=["id"], rows=1)
    return attrs.evolve(commit, merges=[*commit.merges, child])


async def test_a_commit_merges_the_tables_of_a_segment_in_their_order(with_child, transactions, raw, committed):
    assert (await transactions.run(aio_commit_segment, with_child))["inserted"] == 2
    assert await committed() == ([(1, "a")], [{"requests": 2, "inserted": 2}], 1)
    assert await raw.fetchval("SELECT parent FROM child WHERE id = 11") == 1


async def test_if_one_table_refuses_its_rows_the_segment_is_in_none(with_child, transactions, raw, committed):
    parent, child = with_child.merges
    with pytest.raises(StoreError, match="violates foreign key"):
        await transactions.run(aio_commit_segment, attrs.evolve(with_child, merges=[child, parent]))
    assert await committed() == ([], [], 0)
    assert await raw.fetchval("SELECT count(*) FROM child") == 0

"""A segment whose commit has no answer: the commit is repeated, and the segment's ledger row decides (E6, E10)."""

from __future__ import annotations

import time

import pytest
import trio
from conditions import until
from databases import raw_connection
from etl_tasks import item, items_load, with_limits
from proxy import open_proxy

from dataloader import Tasks
from dataloader.flows.etl import Checkpoint, Table, add_loads
from dataloader.testing import run_task

pytestmark = [pytest.mark.slow, pytest.mark.requirement("E6", "E10")]

WAITING = "(SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query ~ 'item')"


@pytest.fixture
def tasks(items, limits):
    """Return the tasks of a load with one segment: three records, of which one fails."""
    items.records = [item(1), {"id": None, "day": "2026-01-01", "value": "b"}, item(3)]
    tasks = Tasks()
    add_loads(tasks, items_load(items.service.url, windows=None, pipeline={"max_failed_share": 1}))
    return with_limits(tasks, limits.now)


async def test_a_commit_whose_answer_was_lost_counts_once(tasks, items, database, raw):
    outcomes = []

    async def run(dsn):
        outcomes.append(await run_task(tasks, "items", dsn=dsn))

    async with open_proxy(database.dsn) as proxy, trio.open_nursery() as nursery:
        # The last statement before COMMIT is the fence.
        proxy.freeze_at("transaction", b"COMMIT", after=b"FOR SHARE OF h")
        nursery.start_soon(run, proxy.dsn)
        await until(lambda: raw.fetchval("SELECT count(*) FROM dl_etl_segments"))
        await until(proxy.is_frozen)
        proxy.cut("transaction")
        proxy.thaw()
    [outcome] = outcomes
    assert (outcome.status, outcome.result["status"]) == ("succeeded", "succeeded_with_failures")
    assert {name: outcome.result["counts"][name] for name in ("inserted", "records", "records_failed", "requests")} == {
        "inserted": 2,
        "records": 3,
        "records_failed": 1,
        "requests": 1,
    }
    assert len(items.service.requests) == 1
    assert await raw.fetchval("SELECT count(*) FROM item") == 2
    assert await raw.fetchval("SELECT count(*) FROM dl_etl_failures") == 1


async def test_no_row_is_lost_or_doubled_while_answers_to_commits_are_lost(database, raw):
    await raw.execute("CREATE TABLE event (id int)")
    tasks, outcomes = Tasks(), []

    @tasks.load("counted", table=Table("event", mode="insert"), every_rows=3)
    def counted(run):
        for number in range((run.state or 0) + 1, 101):
            time.sleep(0.002)
            yield {"id": number}
            yield Checkpoint(number)

    async def run(dsn):
        outcomes.append(await run_task(tasks, "counted", dsn=dsn))

    async with open_proxy(database.dsn) as proxy, trio.open_nursery() as nursery:
        nursery.start_soon(run, proxy.dsn)
        for _ in range(8):
            proxy.freeze_at("transaction", b"COMMIT", after=b"FOR SHARE OF h")
            await until(proxy.is_frozen)
            proxy.cut("transaction")
            proxy.thaw()
    [outcome] = outcomes
    assert (outcome.status, outcome.result["counts"]["inserted"]) == ("succeeded", 100)
    assert await raw.fetchval("SELECT array_agg(id ORDER BY id) FROM event") == [*range(1, 101)]
    assert await raw.fetchval("SELECT sum((counts ->> 'inserted')::int) FROM dl_etl_segments") == 100


@pytest.mark.parametrize("are_rows_lost", [False, True], ids=["rows are staged", "rows are lost"])
async def test_a_commit_that_did_not_happen_is_repeated_with_the_staged_rows(
    tasks, items, database, raw, are_rows_lost
):
    outcomes = []

    async def run():
        outcomes.append(await run_task(tasks, "items", dsn=database.dsn))

    async with raw_connection(database.dsn) as holder, trio.open_nursery() as nursery:
        await holder.execute("BEGIN; LOCK TABLE item IN SHARE MODE")
        nursery.start_soon(run)
        await until(lambda: raw.fetchval(f"SELECT count(*) FROM {WAITING} AS waiting"))
        if are_rows_lost:  # as after a crash of the server
            staging = await raw.fetchval("SELECT relname FROM pg_class WHERE relname LIKE 'dl_stage_%'")
            await raw.execute(f"DELETE FROM {staging}")
        await raw.execute(f"SELECT pg_terminate_backend(pid) FROM {WAITING} AS waiting")
        await holder.execute("COMMIT")
    [outcome] = outcomes
    assert len(items.service.requests) == 1
    if are_rows_lost:
        # The job runs again, and loads the segment again.
        assert outcome.status != "succeeded"
        assert "terminating connection" in outcome.error
        assert await raw.fetchval("SELECT count(*) FROM dl_etl_failures WHERE phase = 'segment'") == 0
    else:
        assert (outcome.status, outcome.result["counts"]["inserted"]) == ("succeeded", 2)

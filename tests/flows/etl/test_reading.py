"""A transform may read the database; each worker has a separate connection, which cannot write (E2)."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import trio
from etl_tasks import item, items_load

from dataloader.flows.etl import Detail, Reader, Request, Table
from dataloader.jobs.errors import StoreUnavailable
from dataloader.store.connection.bridge import open_database
from dataloader.store.connection.options import DatabaseOptions

pytestmark = pytest.mark.requirement("E2")

WATCHDOG_S = 20
CONNECTIONS = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE '% workers'"


@pytest.fixture
async def names(raw):
    """Create a table for lookups by transforms."""
    await raw.execute("CREATE TABLE name (id int PRIMARY KEY, value text)")
    await raw.execute("INSERT INTO name VALUES (1, 'one'), (2, 'two')")


def named(record, reader):
    return {**record, "value": reader.fetchval("SELECT value FROM name WHERE id = $1", record["id"])}


async def test_a_transform_looks_things_up(items, counts_of, table, raw, names):
    items.records = [item(1), item(2), item(3)]
    counts = await counts_of(items_load(items.service.url, windows=None, transform=named, reads=True))
    assert counts["inserted"] == 3
    assert await table("t.id, t.value") == ["(1,one)", "(2,two)", "(3,)"]
    assert await raw.fetchval(CONNECTIONS) == 0


async def test_a_row_comes_by_its_columns_names(items, counts_of, table, names):
    items.records = [item(1)]

    def transform(record, reader):
        [row] = reader.fetch("SELECT id, value FROM name WHERE id = $1 AND value = $2", 1, "one")
        return {**record, **row, "value": f"{row['value']} {reader.fetchval('SELECT 1 WHERE false')}"}

    await counts_of(items_load(items.service.url, windows=None, transform=transform, reads=True))
    assert await table("t.value") == ["one None"]


async def test_queries_of_a_transform_have_the_default_planner_settings(items, counts_of, table):
    items.records = [item(1)]

    def transform(record, reader):
        names = ["enable_seqscan", "enable_hashjoin", "enable_mergejoin", "enable_sort", "plan_cache_mode"]
        settings = reader.fetch("SELECT DISTINCT setting FROM pg_settings WHERE name = ANY ($1) ORDER BY 1", names)
        return {**record, "value": "/".join(row["setting"] for row in settings)}

    await counts_of(items_load(items.service.url, windows=None, transform=transform, reads=True))
    assert await table("t.value") == ["auto/on"]


async def test_each_worker_reads_on_its_own_connection(items, counts_of):
    items.records = [item(number, number) for number in range(1, 4)]
    together, backends = threading.Barrier(3), []

    def transform(record, reader):
        together.wait(WATCHDOG_S)
        backends.append(reader.fetchval("SELECT pg_backend_pid() FROM pg_sleep(0.1)"))
        return record

    load = items_load(items.service.url, transform=transform, reads=True, pipeline={"workers": 3})
    assert (await counts_of(load, to="2026-01-04"))["inserted"] == 3
    assert len({*backends}) == 3


@pytest.mark.slow
@pytest.mark.parametrize("before", [(), ("SET TRANSACTION READ WRITE",), ("COMMIT",)])
async def test_nothing_can_be_written(items, counts_of_failed, raw, names, before):
    items.records = [item(1), item(2)]

    def transform(record, reader):
        for statement in before if record["id"] == 1 else ():
            reader.fetch(statement)
        if record["id"] == 1:
            reader.fetch("DELETE FROM name")
        return record

    counts = await counts_of_failed(items_load(items.service.url, windows=None, transform=transform, reads=True))
    assert (counts["inserted"], counts["records_failed"]) == (1, 1)
    assert await raw.fetchval("SELECT count(*) FROM name") == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sql", "args", "said"),
    [("SELECT 1 FROM nowhere", (), '"nowhere" does not exist'), ("SELECT 1", (1,), "expects 0 arguments")],
)
async def test_a_statement_that_can_not_be_run_is_its_record_s_failure(items, outcome_of, raw, sql, args, said):
    items.records = [item(1)]
    load = items_load(items.service.url, windows=None, transform=lambda _, reader: reader.fetch(sql, *args), reads=True)
    await outcome_of(load)
    [failure] = await raw.fetch("SELECT phase, error FROM dl_etl_failures")
    assert failure["phase"] == "record"
    assert said in failure["error"]
    assert "queue" not in failure["error"]


@pytest.mark.slow
@pytest.mark.parametrize("wraps", [False, True])
async def test_a_connection_that_is_lost_is_no_record_s_failure(items, outcome_of, raw, wraps):
    items.records = [item(number) for number in range(20)]

    def transform(record, reader):
        try:
            reader.fetch("SELECT pg_terminate_backend(pg_backend_pid())")
        except StoreUnavailable as error:
            if wraps:
                raise LookupError("no rates") from error
            raise
        return record

    outcome = await outcome_of(items_load(items.service.url, windows=None, transform=transform, reads=True))
    assert (outcome.status, outcome.error.partition(":")[0]) == ("queued", "StoreUnavailable")
    assert await raw.fetchval("SELECT count(*) FROM dl_etl_failures") == 0


@pytest.mark.slow
async def test_the_transform_of_a_detail_reads_too(items, counts_of, table, names, raw):
    items.records = [item(1), item(2)]
    await raw.execute("CREATE TABLE detail (id int PRIMARY KEY, value text)")
    load = items_load(
        items.service.url,
        windows=None,
        detail=Detail(
            id=lambda record: record["id"],
            request=lambda _number: Request(endpoint="/items"),
            source=items_load(items.service.url).source,
            table=Table("detail", key="id"),
            transform=lambda number, _record, reader: named({"id": int(number)}, reader),
            reads=True,
        ),
    )
    assert (await counts_of(load))["details"] == 2
    assert await table(name="detail") == ["(1,one)", "(2,two)"]


async def test_a_thread_that_was_left_behind_gets_no_connection(database, raw):
    async with open_database(DatabaseOptions(dsn=database.dsn)) as store:
        reader = Reader(store)
        ask = partial(trio.to_thread.run_sync, reader.fetchval, "SELECT 1")
        assert await ask() == 1
        assert await raw.fetchval(CONNECTIONS) == 1
        await reader.close()
        with pytest.raises(StoreUnavailable, match="the workers connection was closed"):
            await ask()
        assert await raw.fetchval(CONNECTIONS) == 0


def test_processes_read_nothing():
    with pytest.raises(ValueError, match="load items: reads: cannot be combined with processes"):
        items_load("http://localhost", processes=True, reads=True)

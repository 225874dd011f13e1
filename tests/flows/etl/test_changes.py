"""Loads whose rows have the time of their change: versions for queries about any point in time (E8)."""

from __future__ import annotations

import pytest
from etl_tasks import BEARS_ALL, items_load

from dataloader.flows.etl import History, Table
from dataloader.flows.etl.plan.known_history import aio_known_history
from dataloader.store.connection.bridge import open_database
from dataloader.store.connection.options import DatabaseOptions

pytestmark = pytest.mark.requirement("E8")

HISTORY = History(tracked=("price",), complete=False, changed_at="updated_at")


def product(record):
    if record["price"] is None:
        return {"id": record["id"], "updated_at": record["at"], "is_current": False}
    return {"id": record["id"], "price": record["price"], "updated_at": record["at"]}


def change(number: int, day: int, time: str, price: int | None):
    at = None if not time else f"2026-01-0{day}T{time}Z"
    return {"id": number, "day": f"2026-01-0{day}", "price": price, "at": at}


@pytest.fixture
async def load(items, raw):
    await raw.execute("""
        CREATE TABLE product (id int, price int NOT NULL, updated_at timestamptz NOT NULL, valid_from timestamptz,
          valid_to timestamptz, is_current boolean NOT NULL, PRIMARY KEY (id, valid_from))""")
    table = Table("product", key="id", history=HISTORY)

    def load(**fields):
        return items_load(items.service.url, table=table, transform=product, pipeline=BEARS_ALL, **fields)

    return load


@pytest.fixture
def price_at(raw):
    """Return a function that reads the price of product 1 at a time in January."""

    async def price_at(time):
        return await raw.fetchval(
            "SELECT price FROM product WHERE id = 1 AND valid_from <= $1::text::timestamptz"
            " AND (valid_to IS NULL OR valid_to > $1::text::timestamptz)",
            f"2026-01-{time}Z",
        )

    return price_at


@pytest.mark.slow
async def test_the_price_before_a_change_is_the_old_one_within_a_window(items, load, counts_of, price_at):
    items.records = [change(1, 1, "10:00", 5), change(1, 2, "21:30:58", 6), change(1, 3, "12:00", None)]
    counts = await counts_of(load(), to="2026-01-05")
    assert (counts["inserted"], counts["changed"], counts["closed"]) == (1, 1, 1)
    times = ["01T09:59", "01T10:00", "02T21:30:57", "02T21:30:58", "03T11:59", "03T12:00"]
    assert [await price_at(time) for time in times] == [None, 5, 5, 6, 6, None]


async def test_a_load_without_windows_keeps_versions_by_the_times_of_its_rows(items, load, counts_of, price_at):
    items.records = [change(1, 1, "10:00", 5)]
    await counts_of(load(windows=None))
    items.records = [change(1, 4, "08:00", 7), change(2, 4, "08:00", 1)]
    await counts_of(load(windows=None))
    assert [await price_at(time) for time in ("04T07:59", "04T08:00")] == [5, 7]


@pytest.mark.slow
async def test_a_row_without_its_time_fails_alone_and_can_be_retried(items, load, outcome_of, counts_of, price_at):
    items.records = [change(1, 1, "", 5), change(2, 1, "10:00", 5)]
    outcome = await outcome_of(load(), to="2026-01-02")
    assert outcome.result["failures"][0]["error"] == (
        "ValueError: column updated_at, the change time of the row, has no value"
    )
    items.records[0] = change(1, 1, "11:00", 5)
    await counts_of(load(), failures="all")
    assert [await price_at(time) for time in ("01T10:59", "01T11:00")] == [None, 5]


@pytest.mark.slow
async def test_a_backfill_gives_the_history_that_loading_in_order_gives(items, load, counts_of, raw):
    items.records = [change(1, day, "10:00", day // 2) for day in range(1, 8)]
    ask = "SELECT id, price, valid_from, valid_to, is_current FROM product ORDER BY valid_from"
    await counts_of(load(), to="2026-01-09")
    in_order = await raw.fetch(ask)
    await raw.execute("TRUNCATE product; DELETE FROM dl_load_history; DELETE FROM dl_load_state")
    await counts_of(load(), **{"from": "2026-01-05", "to": "2026-01-09"})
    await counts_of(load(), **{"from": "2026-01-01", "to": "2026-01-05"})
    assert await raw.fetch(ask) == in_order


async def test_a_load_of_changes_has_no_snapshots_that_its_plan_could_know(load, items, counts_of, database):
    items.records = [change(1, 1, "10:00", 5)]
    await counts_of(load(windows=None))
    async with open_database(DatabaseOptions(dsn=database.dsn)) as opened:
        assert await opened.run(aio_known_history, "items", load(windows=None).table) is None


def test_a_history_without_windows_says_what_is_needed():
    table = Table("product", key="id", history=History(tracked=("price",)))
    with pytest.raises(
        ValueError, match=r"windows: is required; .* set windows, or History\(as_of=…\), such as as_of="
    ):
        items_load("http://h", windows=None, table=table)

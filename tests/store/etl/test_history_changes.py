"""Versions of rows that have their own times: each begins with its change, in any order of the rows (E8)."""

from __future__ import annotations

import datetime as dt
import random

import pytest
from etl_loads import STAGE, open_load

from dataloader.jobs.errors import TargetError, Unstorable
from dataloader.store.etl.history import History
from dataloader.store.etl.history_merge import HistoryCounts, aio_merge_history
from dataloader.store.etl.history_snapshot import HistoryMerge
from dataloader.store.etl.staging import aio_create_staging
from dataloader.store.etl.target_table import aio_describe

pytestmark = pytest.mark.requirement("E8")

TABLE = """
key text, price text NOT NULL, note text, updated_at timestamptz, id bigserial, valid_from timestamptz NOT NULL,
valid_to timestamptz, is_current boolean NOT NULL, CHECK (valid_from < valid_to),
CHECK (is_current = (valid_to IS NULL)), PRIMARY KEY (key, valid_from)"""
HISTORY = History(tracked=("price",), complete=False, changed_at="updated_at")
COLUMNS = ("key", "price", "note", "updated_at", "is_current")


def at(hour: int) -> dt.datetime:
    return dt.datetime(2026, 3, 1, tzinfo=dt.UTC) + dt.timedelta(hours=hour)


@pytest.fixture
async def load(transactions, raw):
    load = await open_load(transactions, raw, TABLE, " ".join(COLUMNS))
    await raw.execute("CREATE UNIQUE INDEX ON target (key) WHERE is_current")
    await transactions.run(aio_create_staging, load.table, STAGE, COLUMNS, ("key",), HISTORY)
    return load


@pytest.fixture
def merge(load, transactions):
    """Return a function that merges rows (key, price, hour, note) as one segment.

    A price None means that the key is gone.
    """

    async def merge(*rows):
        cells = [
            (key, price, *(note or [None]), at(hour), None if price is not None else False)
            for key, price, hour, *note in rows
        ]
        staged = await load.stage(cells)
        snapshot = HistoryMerge(
            table=load.table,
            history=HISTORY,
            segment=load.segment,
            rows=staged,
            key=("key",),
            columns=("key", "price", "note", "updated_at"),
            is_marked=True,
        )
        return await transactions.run(aio_merge_history, snapshot)

    return merge


@pytest.fixture
def versions(raw):
    """Return a function that reads the versions as texts: key, price, first and last hour."""

    async def versions(columns="price"):
        rows = await raw.fetch(
            f"SELECT key, concat_ws(' ', {columns}) AS v, valid_from, valid_to, is_current FROM target"
        )
        told = []
        for row in rows:
            assert row["is_current"] is (row["valid_to"] is None)
            first, last = (None if one is None else (one - at(0)) // dt.timedelta(hours=1) for one in row[2:4])
            told.append((row["key"], first, f"{row['key']} {row['v']} {first}-{'' if last is None else last}"))
        return [text for *_, text in sorted(told)]

    return versions


async def test_a_version_begins_with_the_change_of_its_row(merge, versions):
    assert await merge(("k", "1", 3), ("l", "9", 4)) == HistoryCounts(inserted=2)
    assert await merge(("k", "2", 7), ("l", "9", 8)) == HistoryCounts(changed=1, filled=1)
    assert await versions() == ["k 1 3-7", "k 2 7-", "l 9 4-"]


async def test_several_changes_of_a_key_in_one_segment_are_versions(merge, versions):
    assert await merge(("k", "3", 5), ("k", "1", 1), ("k", "2", 3)) == HistoryCounts(inserted=1, changed=2)
    assert await versions() == ["k 1 1-3", "k 2 3-5", "k 3 5-"]


async def test_a_change_that_comes_late_holds_until_the_next_one(merge, versions):
    await merge(("k", "1", 1))
    await merge(("k", "3", 5))
    assert await merge(("k", "2", 3)) == HistoryCounts(woven=1)
    assert await versions() == ["k 1 1-3", "k 2 3-5", "k 3 5-"]


async def test_a_change_that_comes_late_ends_where_its_row_was_seen_unchanged(merge, versions):
    await merge(("k", "1", 1))
    await merge(("k", "1", 5))
    await merge(("k", "2", 3))
    assert await versions() == ["k 1 1-3", "k 2 3-5", "k 1 5-"]


async def test_rows_that_come_again_change_nothing(merge, versions, raw):
    rows = [("k", "1", 1), ("k", "2", 3), ("k", None, 5), ("k", "2", 7), ("k", "2", 8), ("l", None, 2)]
    await merge(*rows)
    before = await raw.fetch("SELECT t.*, xmin::text FROM target t ORDER BY key, valid_from")
    assert await merge(*rows) == HistoryCounts(unchanged=6)
    assert await raw.fetch("SELECT t.*, xmin::text FROM target t ORDER BY key, valid_from") == before
    assert await versions() == ["k 1 1-3", "k 2 3-5", "k 2 7-"]


async def test_a_row_that_is_gone_closes_its_version_and_needs_no_other_values(merge, versions):
    await merge(("k", "1", 1), ("l", "1", 1))
    assert await merge(("k", None, 4), ("m", None, 4)) == HistoryCounts(closed=1, unchanged=1)
    assert await versions() == ["k 1 1-4", "l 1 1-"]
    assert await merge(("k", "1", 6)) == HistoryCounts(inserted=1)
    assert await versions() == ["k 1 1-4", "k 1 6-", "l 1 1-"]


async def test_an_older_row_stays_closed_by_a_tombstone_that_came_first(merge, versions):
    await merge(("k", None, 4))
    await merge(("k", "1", 2))
    assert await versions() == ["k 1 2-4"]


async def test_the_last_row_of_a_key_and_time_is_used(merge, versions):
    assert await merge(("k", "1", 1), ("k", "2", 1)) == HistoryCounts(inserted=1, duplicates=1)
    assert await merge(("k", "3", 1)) == HistoryCounts(changed=1)
    assert await versions() == ["k 3 1-"]


async def test_untracked_columns_have_the_values_of_the_last_row_of_a_version(merge, versions):
    await merge(("k", "1", 1, "a"), ("k", "1", 4, "c"), ("k", "2", 6, "d"))
    await merge(("k", "1", 2, "b"))
    assert await versions("price, note") == ["k 1 c 1-6", "k 2 d 6-"]


@pytest.mark.parametrize("value", ["infinity", "-infinity", None])
async def test_a_time_that_is_none_is_refused_with_its_row(load, value):
    with pytest.raises(Unstorable, match=r"check constraint|not-null constraint"):
        await load.stage([("k", "1", None, value, True)])


async def test_a_row_that_is_not_gone_needs_the_columns_that_may_not_be_null(load):
    with pytest.raises(Unstorable, match="price is missing"):
        await load.stage([("k", None, None, at(1), True)])


async def test_a_time_of_another_type_than_the_versions_is_refused(load, transactions, raw):
    await raw.execute(f"ALTER TABLE {load.table.sql} ALTER updated_at TYPE date")
    table = await transactions.run(aio_describe, "target")
    with pytest.raises(
        TargetError, match=r"column updated_at has the type date, but must have that of valid_from, time"
    ):
        HISTORY.check_table(table)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, "complete: must be False with changed_at, "),
        ({"complete": False, "as_of": lambda _: at(0)}, "as_of: cannot be combined with changed_at"),
        ({"complete": False, "valid_to": "at"}, "changed_at: must be a column of the rows, or valid_from, not 'at'"),
    ],
)
def test_a_history_of_changes_that_contradicts_itself_is_refused(fields, told):
    with pytest.raises(ValueError, match=f"^{told}"):
        History(tracked=("a",), changed_at="at", **fields)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
async def test_any_order_of_changes_gives_the_history_of_their_times(merge, versions, seed):
    chance = random.Random(seed)
    known: dict[tuple[str, int], str | None] = {}
    for _ in range(12):
        rows = {}
        for _ in range(chance.randint(1, 8)):
            place = chance.choice("kl"), chance.randint(0, 9)
            rows[place] = known[place] = chance.choice(["1", "2", "2", None])
        await merge(*((key, price, hour) for (key, hour), price in rows.items()))
        assert await versions() == _history(known), known


def _history(known):
    """Return the expected rows of the table after these observations, by key and hour."""
    told = []
    for key in "kl":
        changes: list[tuple[int, str | None]] = []
        for hour in sorted(hour for name, hour in known if name == key):
            if (changes[-1][1] if changes else None) != known[key, hour]:
                changes.append((hour, known[key, hour]))
        ends = [*(hour for hour, _ in changes[1:]), ""]
        told += [
            f"{key} {price} {hour}-{end}"
            for (hour, price), end in zip(changes, ends, strict=False)
            if price is not None
        ]
    return told

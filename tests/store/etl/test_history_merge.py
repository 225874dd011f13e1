"""Snapshots merged into tables of versions, by example (E8)."""

from __future__ import annotations

import datetime as dt
import time

import attrs
import etl_loads
import pytest
import trio
from etl_loads import STAGE, open_load

from dataloader.jobs.errors import StoreError, TargetError
from dataloader.store.etl.history_merge import HistoryCounts
from dataloader.store.etl.staging import StagedSegment
from dataloader.store.etl.target_table import quote
from dataloader.store.queue.transaction import Transactions

D1, D2, D3, D4 = (dt.date(2020, 1, n) for n in range(1, 5))


@pytest.fixture
def identities(raw):
    """Return a function that reads the IDs to which facts would refer, and the transactions that have written them."""

    async def identities():
        return [tuple(row) for row in await raw.fetch("SELECT id, xmin::text, xmax::text FROM target ORDER BY id")]

    return identities


@pytest.mark.requirement("E8")
async def test_a_snapshot_begins_changes_ends_and_leaves_versions(open_dimension, history):
    dimension = await open_dimension()
    first = [("k", "1", "1"), ("l", "1", "1"), ("m", "1", None)]
    assert await dimension.merge(D1, first) == HistoryCounts(inserted=3)
    second = [("k", "1", "1"), ("l", "1", "2"), ("n", "1", "1")]
    assert await dimension.merge(D2, second) == HistoryCounts(inserted=1, changed=1, closed=1, unchanged=1)
    assert await history("a, b") == ["k 1 1 1-", "l 1 1 1-2", "l 1 2 2-", "m 1 1-2", "n 1 1 2-"]
    third = [*second, ("m", "1", None)]
    assert await dimension.merge(D4, third) == HistoryCounts(reappeared=1, unchanged=3)
    assert await history("a, b") == ["k 1 1 1-", "l 1 1 1-2", "l 1 2 2-", "m 1 1-2", "m 1 4-", "n 1 1 2-"]


@pytest.mark.requirement("E8")
async def test_null_is_a_value_like_any_other(open_dimension, history):
    dimension = await open_dimension("a")
    await dimension.merge(D1, [("k", None), ("l", "x"), ("m", None)])
    assert await dimension.merge(D2, [("k", None), ("l", None), ("m", "")]) == HistoryCounts(changed=2, unchanged=1)
    assert await history("coalesce(a, 'NULL')") == ["k NULL 1-", "l x 1-2", "l NULL 2-", "m NULL 1-2", "m  2-"]


@pytest.mark.requirement("E8")
@pytest.mark.parametrize("complete", [True, False])
async def test_a_rerun_writes_nothing(open_dimension, identities, raw, complete):
    dimension = await open_dimension("a b", "fetched_at")
    await dimension.merge(D1, [("k", "1", None, "t1"), ("l", "1", "1", "t1"), ("m", "1", "1", "t1")])
    second = [("k", "2", None, "t1"), ("l", "1", "1", "t1")]
    await dimension.merge(D2, second, complete=complete)
    before = await identities(), await raw.fetchval("SELECT xmin::text FROM dl_load_history")
    assert await dimension.merge(D2, [(*row[:3], "t2") for row in second], complete=complete) == HistoryCounts(
        unchanged=2
    )
    assert (await identities(), await raw.fetchval("SELECT xmin::text FROM dl_load_history")) == before
    assert await raw.fetchval(f"SELECT count(*) FROM {quote(STAGE)}") == 0


@pytest.mark.requirement("E8")
async def test_an_incomplete_snapshot_closes_no_missing_row(open_dimension, history):
    dimension = await open_dimension("a")
    await dimension.merge(D1, [("k", "1"), ("l", "1")])
    assert await dimension.merge(D2, [("k", "2")], complete=False) == HistoryCounts(changed=1)
    assert await dimension.merge(D2, [], complete=False) == HistoryCounts()
    assert await dimension.merge(D3, [], complete=False) == HistoryCounts()
    assert await history("a") == ["k 1 1-2", "k 2 2-", "l 1 1-"]
    assert await dimension.merge(D4, []) == HistoryCounts(closed=2)


@pytest.mark.slow
@pytest.mark.requirement("E8")
@pytest.mark.parametrize(
    ("first", "second", "counts", "expected"),
    [
        ("k2", "k3", HistoryCounts(corrected=1), ["k 1 1-2", "k 3 2-"]),
        ("k2", "k1", HistoryCounts(corrected=1), ["k 1 1-"]),
        ("k2", "", HistoryCounts(corrected=1), ["k 1 1-2"]),
        ("", "k1", HistoryCounts(corrected=1), ["k 1 1-"]),
        ("", "k2", HistoryCounts(changed=1), ["k 1 1-2", "k 2 2-"]),
        ("k1", "k2", HistoryCounts(changed=1), ["k 1 1-2", "k 2 2-"]),
        ("k1", "", HistoryCounts(closed=1), ["k 1 1-2"]),
        ("n1", "n2", HistoryCounts(corrected=1), ["k 1 1-2", "n 2 2-"]),
        ("n1", "", HistoryCounts(corrected=1), ["k 1 1-2"]),
        ("g1", "g2", HistoryCounts(corrected=1), ["g 1 0-1", "g 2 2-", "k 1 1-2"]),
        ("g1", "", HistoryCounts(corrected=1), ["g 1 0-1", "k 1 1-2"]),
        ("", "g1", HistoryCounts(reappeared=1), ["g 1 0-1", "g 1 2-", "k 1 1-2"]),
    ],
)
async def test_a_second_snapshot_of_a_day_corrects_the_first(
    open_dimension, history, raw, first, second, counts, expected
):
    """k exists since the first of the month, g existed before that, n is new."""
    dimension = await open_dimension("a")
    snapshots = [(dt.date(2019, 12, 31), "g1"), (D1, "k1"), (D2, first), (D2, second)]
    for as_of, snapshot in snapshots:
        found = await dimension.merge(as_of, [tuple(snapshot)] if snapshot else [])
    assert found == counts
    expected = [version.replace("0-", "31-") for version in expected]
    expected = expected if expected[0].startswith("g") else ["g 1 31-1", *expected]
    assert await history("a") == expected
    # A third snapshot, equal to the first: the result is the same as without the second.
    await dimension.merge(D2, [tuple(first)] if first else [])
    third = await history("a")
    await raw.execute("TRUNCATE target, dl_load_history CASCADE")
    for as_of, snapshot in snapshots[:3]:
        await dimension.merge(as_of, [tuple(snapshot)] if snapshot else [])
    assert await history("a") == third


@pytest.mark.requirement("E8")
async def test_a_correction_keeps_the_version_that_facts_refer_to(open_dimension, raw):
    dimension = await open_dimension("a")
    await dimension.merge(D1, [("k", "1")])
    await dimension.merge(D2, [("k", "2")])
    before = await raw.fetchval("SELECT id FROM target WHERE is_current")
    await dimension.merge(D2, [("k", "3")])
    assert await raw.fetchval("SELECT id FROM target WHERE is_current AND a = '3'") == before


@pytest.mark.requirement("E8")
async def test_a_column_that_is_added_is_filled_in_place(open_dimension, history, raw, identities):
    dimension = await open_dimension("a")
    await dimension.merge(D1, [("k", "1"), ("l", "1"), ("m", "1"), ("g", "1")])
    await raw.execute("ALTER TABLE target ADD b text DEFAULT '?'")
    await dimension.bring("key a b", tracked=["a", "b"])
    second = [("k", "1", "x"), ("l", "2", "x"), ("m", "1", "?")]
    assert await dimension.merge(D2, second) == HistoryCounts(filled=1, changed=1, closed=1, unchanged=1)
    assert await history("a, b") == ["g 1 ? 1-2", "k 1 x 1-", "l 1 ? 1-2", "l 2 x 2-", "m 1 ? 1-"]
    # From now on its values distinguish versions.
    third = [("k", "1", "y"), ("l", "2", "x"), ("m", "1", "?")]
    assert await dimension.merge(D3, third) == HistoryCounts(changed=1, unchanged=2)
    # A column that snapshots no longer have does not change; once they have it again, it is filled again.
    await dimension.bring("key a", tracked=["a"])
    assert await dimension.merge(D4, [row[:2] for row in third]) == HistoryCounts(unchanged=3)
    await dimension.bring("key a b", tracked=["a", "b"])
    assert await dimension.merge(D4, [("k", "1", "z"), *third[1:]]) == HistoryCounts(filled=1, unchanged=2)
    assert await raw.fetchval("SELECT b FROM target WHERE key = 'k' AND is_current") == "z"
    assert len(await identities()) == 6


@pytest.mark.requirement("E8")
async def test_a_column_that_is_added_by_parts_is_filled_as_they_come(open_dimension, history, raw):
    dimension = await open_dimension("a")
    await dimension.merge(D1, [("k", "1"), ("l", "1")])
    await raw.execute("ALTER TABLE target ADD b text")
    await dimension.bring("key a b", tracked=["a", "b"], complete=False)
    assert await dimension.merge(D2, [("k", "1", "x")]) == HistoryCounts(filled=1)
    # l has no value yet; k has one, and it changes.
    assert await dimension.merge(D3, [("k", "1", "y"), ("l", "1", "x")]) == HistoryCounts(filled=1, changed=1)
    assert await history("a, b") == ["k 1 x 1-3", "k 1 y 3-", "l 1 x 1-"]
    assert await dimension.merge(D4, [("k", "1", "z"), ("l", "1", None)], complete=True) == HistoryCounts(filled=2)
    assert await dimension.merge(D4, [("k", "1", "z"), ("l", "1", "y")], complete=True) == HistoryCounts(
        changed=1, unchanged=1
    )


@pytest.mark.requirement("E8")
async def test_a_column_that_is_renamed_makes_no_versions(open_dimension, raw, identities):
    dimension = await open_dimension("a b")
    rows = [("k", "1", "x"), ("l", "1", None)]
    await dimension.merge(D1, rows)
    before = await identities()
    await raw.execute("ALTER TABLE target RENAME b TO c")
    await dimension.bring("key a c", tracked=["a", "c"])
    assert await dimension.merge(D2, rows) == HistoryCounts(unchanged=2)
    assert await identities() == before


@pytest.mark.requirement("E8")
async def test_other_columns_are_brought_up_to_date_on_the_current_version(open_dimension, history):
    dimension = await open_dimension("a", "o fetched_at")
    await dimension.merge(D1, [("k", "1", "x", "t1"), ("l", "1", "x", "t1"), ("m", "1", "x", "t1")])
    second = [("k", "1", "y", "t2"), ("l", "2", "y", "t2"), ("m", "1", "x", "t2")]
    assert await dimension.merge(D2, second) == HistoryCounts(filled=1, changed=1, unchanged=1)
    assert await history("a, o, fetched_at") == ["k 1 y t2 1-", "l 1 x t1 1-2", "l 2 y t2 2-", "m 1 x t1 1-"]


async def test_of_rows_with_one_key_the_last_counts(open_dimension, history):
    dimension = await open_dimension("a")
    counts = await dimension.merge(D1, [("k", "1"), ("l", "1"), ("k", "2"), ("k", "3")])
    assert counts == HistoryCounts(inserted=2, duplicates=2)
    assert await history("a") == ["k 3 1-", "l 1 1-"]


async def test_a_history_of_keys_alone_shows_when_they_existed(open_dimension, history):
    dimension = await open_dimension("")
    assert await dimension.merge(D1, [("k",), ("l",)]) == HistoryCounts(inserted=2)
    assert await dimension.merge(D2, [("k",)]) == HistoryCounts(closed=1, unchanged=1)
    assert await dimension.merge(D2, [("l",)]) == HistoryCounts(corrected=1, closed=1)
    assert await history("NULL") == ["k 1-2", "l 1-"]


@pytest.mark.requirement("E8")
async def test_instants_and_other_names_of_columns_do_as_well(transactions, raw):
    definition = "k int, code varchar(2), a numeric, since timestamptz, until timestamptz, now boolean"
    load = await open_load(transactions, raw, definition, "k code a", key="k code")
    names = {"valid_from": "since", "valid_to": "until", "is_current": "now"}
    dimension = etl_loads.Dimension(load, {"key": ["k", "code"], "tracked": ["a"], **names})
    zone = dt.timezone(dt.timedelta(hours=3))
    await dimension.merge(dt.date(2020, 1, 1), [(1, "a", 1), (1, "b", 1)])
    await dimension.merge(dt.datetime(2020, 1, 1, 3, tzinfo=zone), [(1, "a", 2), (1, "b", "1.0")])
    await dimension.merge(dt.datetime(2020, 1, 1, 4, tzinfo=zone), [(1, "a", 3), (1, "b", 1)])
    rows = await raw.fetch("SELECT (code, a, since AT TIME ZONE 'UTC', now)::text AS row FROM target ORDER BY code, a")
    assert [row["row"] for row in rows] == [
        '(a,2,"2020-01-01 00:00:00",f)',
        '(a,3,"2020-01-01 01:00:00",t)',
        '(b,1,"2020-01-01 00:00:00",t)',
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "error", "why"),
    [
        ({"tracked": ["x"]}, TargetError, "no column x"),
        ({"key": []}, TargetError, "needs a key"),
        ({"tracked": ["key"]}, TargetError, "must be unique and not empty"),
        ({"is_current": "a"}, TargetError, "must be unique and not empty"),
        ({"valid_from": "b"}, TargetError, "must both have the type date"),
        ({"tracked": [], "valid_from": "a", "valid_to": "b"}, TargetError, "must both have the type date"),
        ({"as_of": dt.datetime(2020, 1, 1, tzinfo=dt.UTC)}, TargetError, "valid_from is a date"),
        ({"as_of": dt.datetime(2020, 1, 1)}, ValueError, "no time zone"),  # noqa: DTZ001 - the case under test
    ],
)
async def test_a_misfit_of_the_table_is_refused_before_any_change(open_dimension, fields, error, why):
    dimension = await open_dimension("a", "b")
    with pytest.raises(error, match=why):
        await dimension.merge_staged(0, **{"as_of": D1, "others": []} | fields)


@pytest.mark.requirement("E10")
async def test_a_snapshot_with_rows_that_were_lost_changes_nothing(open_dimension, raw, history):
    dimension = await open_dimension("a")
    await dimension.merge(D1, [("k", "1")])
    assert await dimension.stage([("l", "1")]) == 1
    with pytest.raises(StoreError, match=r"1 rows .* instead of 2"):
        await dimension.merge_staged(2, as_of=D2)
    assert await history("a") == ["k 1 1-"]
    assert await raw.fetchval("SELECT last_as_of::date FROM dl_load_history") == D1


@pytest.mark.requirement("E8")
async def test_merges_of_one_target_wait_for_each_other(open_dimension, raw, until_blocked, history):
    dimension = await open_dimension("a")
    other = StagedSegment(STAGE, 8, 1)
    await dimension.stage([("k", "1")])
    await dimension.stage([("k", "2")], other)
    # The first merges of a table: there is no row to lock yet.
    await raw.execute('BEGIN; INSERT INTO dl_load_history (target) VALUES (\'"public"."target"\')')
    found = []

    async def merge(as_of, **fields):
        found.append(await dimension.merge_staged(1, as_of=as_of, **fields))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(merge, D1)
        await until_blocked()
        await raw.execute("ROLLBACK")
    await raw.execute("BEGIN; SELECT FROM dl_load_history FOR UPDATE")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: merge(D2, segment=other))
        await until_blocked()
        await raw.execute("UPDATE dl_load_history SET last_as_of = '2020-01-03 00:00+00'; COMMIT")
    assert found[0] == HistoryCounts(inserted=1)
    assert found[1] == HistoryCounts(woven=1)
    await dimension.stage([("k", "2")], other)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: merge(D3, segment=other))
        await dimension.merge(D3, [("k", "3")])
    # One after the other, in either order: the last one has corrected the snapshot.
    assert await history("a") in (["k 1 1-2", "k 2 2-"], ["k 1 1-2", "k 2 2-3", "k 3 3-"])


@pytest.mark.slow
@pytest.mark.requirement("E8")
async def test_a_correction_of_many_versions_takes_no_longer_than_a_snapshot(open_dimension, raw):
    """By yesterday's statistics few versions begin today, and a new stage has no statistics."""
    dimension = await open_dimension("a")
    keys = [str(n) for n in range(20_000)]
    await dimension.merge(D1, [(key, "1") for key in keys])
    await raw.execute("ANALYZE target")
    second = [(key, "2") for key in keys]
    assert await dimension.merge(D2, second) == HistoryCounts(changed=20_000)
    rows = await dimension.stage(second)
    started = time.monotonic()
    assert await dimension.merge_staged(rows, as_of=D2) == HistoryCounts(unchanged=20_000)
    assert time.monotonic() - started < 15


@attrs.frozen
class OtherSettings:
    """Transactions in a session whose settings produce other texts of dates."""

    transactions: Transactions

    async def run(self, operation, *args):
        async def with_settings(connection):
            await connection.execute("SET LOCAL timezone = 'Asia/Tokyo'; SET LOCAL datestyle = 'SQL, DMY'")
            return await operation(connection, *args)

        return await self.transactions.run(with_settings)


@pytest.mark.requirement("E8")
async def test_former_values_are_found_by_a_session_with_other_settings(open_dimension, transactions, raw):
    dimension = await open_dimension("a", "o")
    await dimension.merge(D1, [("k", "1", "old")])
    dimension.load = attrs.evolve(dimension.load, transactions=OtherSettings(transactions))
    await dimension.merge(D2, [("k", "1", "new")])
    dimension.load = attrs.evolve(dimension.load, transactions=transactions)
    # It ends the version whose column the first snapshot of the day has updated.
    await dimension.merge(D2, [("k", "2", "new")])
    assert await raw.fetchval("SELECT o FROM target WHERE NOT is_current") == "old"

"""Snapshots that are older than the newest one, woven into tables of versions, by example (E8)."""

from __future__ import annotations

import datetime as dt

import attrs
import etl_loads
import pytest
from etl_loads import STAGE, open_load

from dataloader.flows.etl.parse.copy_lines import LineEncoder
from dataloader.jobs.errors import StoreError, TargetError
from dataloader.store.etl.history import History
from dataloader.store.etl.history_merge import HistoryCounts, aio_merge_history
from dataloader.store.etl.history_snapshot import HistoryMerge
from dataloader.store.etl.target_table import quote

pytestmark = pytest.mark.requirement("E8")

DAYS = [dt.date(2020, 1, n) for n in range(1, 32)]
D1, D2, D3, D4, D5 = DAYS[:5]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("snapshot", "counts", "expected"),
    [
        ("k1", {"unchanged": 1}, ["k 1 1-5", "k 2 5-"]),
        ("k2", {"woven": 1}, ["k 1 1-3", "k 2 3-4", "k 1 4-5", "k 2 5-"]),
        ("", {"closed": 1}, ["k 1 1-3", "k 1 4-5", "k 2 5-"]),
        ("k1 l1", {"woven": 1, "unchanged": 1}, ["k 1 1-5", "k 2 5-", "l 1 3-4"]),
    ],
)
async def test_an_older_complete_snapshot_holds_until_the_next_one(open_dimension, history, snapshot, counts, expected):
    dimension = await open_dimension("a")
    for as_of, value in ((D1, "1"), (D4, "1"), (D5, "2")):
        await dimension.merge(as_of, [("k", value)])
    rows = [tuple(text) for text in snapshot.split()]
    assert await dimension.merge(D3, rows) == HistoryCounts(**counts)
    assert await history() == expected
    assert await dimension.merge(D3, rows) == HistoryCounts(unchanged=len(rows))
    assert await history() == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("value", "expected"),
    [("0", ["k 0 1-2", "k 1 2-4", "k 2 4-"]), ("1", ["k 1 1-4", "k 2 4-"])],
)
async def test_a_history_is_extended_to_the_past(open_dimension, history, value, expected):
    dimension = await open_dimension("a", complete=False)
    await dimension.merge(D2, [("k", "1")])
    await dimension.merge(D4, [("k", "2")])
    assert await dimension.merge(D1, [("k", value)]) == HistoryCounts(woven=1)
    assert await history() == expected


async def test_rows_missing_from_an_older_incomplete_snapshot_stay_open(open_dimension, history):
    dimension = await open_dimension("a", complete=False)
    await dimension.merge(D1, [("k", "1"), ("l", "1")])
    await dimension.merge(D5, [("m", "1")])
    assert await dimension.merge(D3, [("k", "2")]) == HistoryCounts(woven=1)
    assert await dimension.merge(D2, []) == HistoryCounts()
    assert await history() == ["k 1 1-3", "k 2 3-", "l 1 1-", "m 1 5-"]


async def test_a_row_that_did_not_change_later_ends_what_is_woven_in(open_dimension, history):
    """This also holds if many snapshots have followed."""
    dimension = await open_dimension("a", complete=False)
    await dimension.merge(D1, [("k", "1"), ("l", "1"), ("m", "1")])
    for as_of in DAYS[9:30]:
        await dimension.merge(as_of, [("n", "1")] if as_of.day % 10 else [("k", "1"), ("n", "1")])
    assert await dimension.merge(DAYS[30], [("l", "1")]) == HistoryCounts(unchanged=1)
    assert await dimension.merge(D2, [("k", "2"), ("l", "2"), ("m", "2")]) == HistoryCounts(woven=3)
    assert await history() == [
        *["k 1 1-2", "k 2 2-10", "k 1 10-"],
        *["l 1 1-2", "l 2 2-31", "l 1 31-"],
        *["m 1 1-2", "m 2 2-"],
        "n 1 10-",
    ]


async def test_a_correction_of_an_older_snapshot_joins_what_it_had_split(open_dimension, history, raw):
    dimension = await open_dimension("a", complete=False)
    for as_of, value in ((D1, "1"), (D4, "1"), (D2, "2")):
        await dimension.merge(as_of, [("k", value)])
    assert await history() == ["k 1 1-2", "k 2 2-4", "k 1 4-"]
    assert await dimension.merge(D2, [("k", "1")]) == HistoryCounts(woven=1)
    assert await history() == ["k 1 1-"]
    assert await dimension.merge(D2, [("k", "3")]) == HistoryCounts(woven=1)
    assert await history() == ["k 1 1-2", "k 3 2-4", "k 1 4-"]


async def test_a_version_that_begins_earlier_was_still_observed_at_its_first_beginning(open_dimension, history):
    dimension = await open_dimension("a", complete=False)
    await dimension.merge(D4, [("k", "1")])
    assert await dimension.merge(D2, [("k", "1")]) == HistoryCounts(woven=1)
    assert await history() == ["k 1 2-"]
    assert await dimension.merge(D2, [("k", "2")]) == HistoryCounts(woven=1)
    assert await history() == ["k 2 2-4", "k 1 4-"]


async def test_a_split_version_keeps_its_row_and_all_columns_in_both_parts(transactions, raw, history):
    definition = (
        "key text, a text, b text DEFAULT '?', id bigserial, n int GENERATED ALWAYS AS (length(a)) STORED,"
        " valid_from date, valid_to date, is_current boolean NOT NULL, PRIMARY KEY (key, valid_from)"
    )
    load = await open_load(transactions, raw, definition, "key a", key="key")
    dimension = etl_loads.Dimension(load, {"key": ["key"], "tracked": ["a"]})
    await dimension.merge(D1, [("k", "1")])
    await raw.execute("UPDATE target SET b = 'by hand'")
    await dimension.merge(D4, [("k", "1")])
    await dimension.merge(D2, [("k", "22")])
    assert await history("a, b, n, id") == ["k 1 by hand 1 1 1-2", "k 22 ? 2 3 2-4", "k 1 by hand 1 2 4-"]


async def test_instants_are_woven_as_days_are(transactions, raw):
    definition = "k numeric, a text, since timestamptz, until timestamptz, now boolean"
    load = await open_load(transactions, raw, definition, "k a", key="k")
    names = {"valid_from": "since", "valid_to": "until", "is_current": "now", "complete": False}
    dimension = etl_loads.Dimension(load, {"key": ["k"], "tracked": ["a"], **names})
    begin = dt.datetime(2020, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=3)))
    for hours, value in ((1, "1"), (3, "1"), (2, "2")):
        # Numbers are equal whatever their digits are.
        await dimension.merge(begin + dt.timedelta(hours=hours), [("1.0" if hours == 3 else "1", value)])
    rows = await raw.fetch("SELECT (a, since AT TIME ZONE '+03', now)::text AS row FROM target ORDER BY since")
    assert [row["row"] for row in rows] == [
        '(1,"2019-12-31 19:00:00",f)',
        '(2,"2019-12-31 20:00:00",f)',
        '(1,"2019-12-31 21:00:00",t)',
    ]


async def test_versions_of_another_program_count_as_snapshots_at_both_ends(open_dimension, raw, history):
    dimension = await open_dimension("a")
    await raw.execute(
        "INSERT INTO target VALUES ('k', '1', 1, '2020-01-01', NULL, true),"
        " ('l', '1', 2, '2020-01-01', '2020-01-03', false)"
    )
    assert await dimension.merge(D2, [("k", "1"), ("m", "1")]) == HistoryCounts(woven=1, closed=1, unchanged=1)
    assert await history() == ["k 1 1-", "l 1 1-2", "m 1 2-3"]
    assert await dimension.merge(D1, [("k", "2"), ("l", "1")]) == HistoryCounts(woven=1, unchanged=1)
    assert await history() == ["k 2 1-2", "k 1 2-", "l 1 1-2", "m 1 2-3"]
    assert await dimension.merge(D3, [("k", "1"), ("l", "1")]) == HistoryCounts(reappeared=1, unchanged=1)


async def test_a_joined_version_of_another_program_still_ends_older_snapshots(open_dimension, raw, history):
    dimension = await open_dimension("a")
    await raw.execute(
        "INSERT INTO target VALUES ('k', 'y', 1, '2020-01-10', '2020-01-20', false),"
        " ('k', 'z', 2, '2020-01-20', NULL, true)"
    )
    assert await dimension.merge(DAYS[4], [("k", "y")]) == HistoryCounts(woven=1)
    assert await dimension.merge(DAYS[6], [("k", "z"), ("l", "1")]) == HistoryCounts(woven=2)
    assert await history() == ["k y 5-7", "k z 7-10", "k y 10-20", "k z 20-", "l 1 7-10"]


@pytest.mark.parametrize("is_complete", [True, False])
async def test_a_joined_newest_version_of_another_program_stays_newest(open_dimension, raw, history, is_complete):
    dimension = await open_dimension("a", complete=is_complete)
    await raw.execute("INSERT INTO target VALUES ('k', 'y', 1, '2020-01-20', NULL, true)")
    assert await dimension.merge(DAYS[4], [("k", "y")]) == HistoryCounts(woven=1)
    assert await dimension.merge(DAYS[6], [("k", "z")]) == HistoryCounts(woven=1)
    assert await history() == ["k y 5-7", "k z 7-20", "k y 20-"]


async def test_a_removed_end_of_another_program_still_ends_older_snapshots(open_dimension, raw, history):
    dimension = await open_dimension("a")
    await raw.execute("INSERT INTO target VALUES ('k', 'y', 1, '2020-01-10', '2020-01-20', false)")
    await dimension.merge(DAYS[30], [("l", "1")])
    assert await dimension.merge(DAYS[14], []) == HistoryCounts(closed=1)
    assert await dimension.merge(DAYS[16], [("k", "y")]) == HistoryCounts(woven=1)
    assert await history() == ["k y 10-15", "k y 17-20", "l 1 31-"]


async def test_an_incomplete_snapshot_leaves_a_boundary_of_another_program_complete(open_dimension, raw, history):
    dimension = await open_dimension("a")
    await raw.execute(
        "INSERT INTO target VALUES ('k', 'y', 1, '2020-01-10', '2020-01-20', false),"
        " ('k', 'z', 2, '2020-01-20', NULL, true)"
    )
    for as_of, value in ((DAYS[19], "z"), (DAYS[9], "y")):
        assert await dimension.merge(as_of, [("k", value)], is_complete=False) == HistoryCounts(unchanged=1)
    await dimension.merge(DAYS[14], [("k", "y"), ("l", "1")])
    await dimension.merge(DAYS[6], [("m", "1")])
    assert await history() == ["k y 10-20", "k z 20-", "l 1 15-20", "m 1 7-10"]


async def test_a_complete_snapshot_that_joins_a_version_keeps_its_incomplete_one(open_dimension, history):
    dimension = await open_dimension("a")
    await dimension.merge(DAYS[20], [("k", "y")], complete=False)
    await dimension.merge(DAYS[21], [("k", "x")])
    assert await dimension.merge(DAYS[13], [("k", "y")]) == HistoryCounts(woven=1)
    assert await history() == ["k y 14-22", "k x 22-"]
    assert await dimension.merge(DAYS[14], [("k", "z")], complete=False) == HistoryCounts(woven=1)
    assert await history() == ["k y 14-15", "k z 15-21", "k y 21-22", "k x 22-"]


@pytest.mark.parametrize("is_complete", [True, False])
async def test_versions_deleted_by_sql_do_not_block_a_backfill(open_dimension, raw, history, is_complete):
    dimension = await open_dimension("a", "o", complete=is_complete)

    async def backfill(*days):
        for as_of in days:
            await dimension.merge(as_of, [("k", "1", f"of {as_of.day}")])

    await backfill(D2, D3, D4)
    await raw.execute("TRUNCATE target")
    await backfill(D3, D4)
    await backfill(D2, D3, D4)
    assert await history("a, o") == ["k 1 of 4 2-"]
    await dimension.merge(D4, [("k", "2", "of 4")])
    assert await history("a, o") == ["k 1 of 3 2-4", "k 2 of 4 4-"]


async def test_values_of_a_version_that_was_deleted_by_sql_do_not_return(open_dimension, raw, history):
    dimension = await open_dimension("a", "o")
    await dimension.merge(D2, [("k", "1", "deleted")])
    await dimension.merge(D4, [("k", "1", "of 4")])
    await raw.execute("TRUNCATE target")
    await dimension.merge(D2, [("k", "1", "of 2")])
    await dimension.merge(D4, [("k", "2", "of 4")])
    assert await history("a, o") == ["k 1 of 2 2-4", "k 2 of 4 4-"]


@pytest.mark.parametrize("end", ["infinity", "9999-12-31"])
@pytest.mark.parametrize("is_current", [True, False])
async def test_a_table_whose_open_versions_end_far_ahead_is_refused(open_dimension, raw, end, is_current):
    dimension = await open_dimension("a")
    await raw.execute("ALTER TABLE target DROP CONSTRAINT target_check1")
    await raw.execute("INSERT INTO target VALUES ('k', '1', 1, '2020-01-01', $1::text::date, $2)", end, is_current)
    told = f'valid_to of some versions is {end}; loads mark an open version by NULL alone. .* WHERE "valid_to" >= '
    with pytest.raises(TargetError, match=told):
        await dimension.merge(D2, [("k", "2")])


async def test_a_current_version_that_will_end_is_refused_without_advice_to_forget_its_end(open_dimension, raw):
    dimension = await open_dimension("a")
    await raw.execute("ALTER TABLE target DROP CONSTRAINT target_check1")
    await raw.execute("INSERT INTO target VALUES ('k', '1', 1, '2020-01-01', '2030-01-01', true)")
    with pytest.raises(TargetError, match=r"is 2030-01-01, but must be NULL; set is_current to false") as caught:
        await dimension.merge(D2, [("k", "2")])
    assert "UPDATE" not in str(caught.value)


async def test_a_column_that_a_row_lacks_is_that_of_the_version_of_its_instant(open_dimension, history):
    dimension = await open_dimension("a b")
    await dimension.merge(D1, [("k", "1", "x")])
    await dimension.merge(D3, [("k", "1", "y")])
    await dimension.merge(D4, [("k", "1", "x")])
    staged = await _lacking(dimension.load, "b").stage([("k", "2")])
    shapes = [("key", "a"), ("key", "a", "b")]
    assert await dimension.merge_staged(staged, as_of=D2, shapes=shapes) == HistoryCounts(woven=1)
    assert await history("a, b") == ["k 1 x 1-2", "k 2 x 2-3", "k 1 y 3-4", "k 1 x 4-"]


def _lacking(load, name):
    columns = tuple(column for column in load.columns if column != name)
    return attrs.evolve(load, columns=columns, encoder=LineEncoder(columns))


async def test_a_backfill_brings_the_values_of_a_column_that_was_added(open_dimension, history, raw):
    dimension = await open_dimension("a")
    for as_of, value in ((D1, "1"), (D2, "2"), (D3, "3")):
        await dimension.merge(as_of, [("k", value)])
    await raw.execute("ALTER TABLE target ADD b text")
    await dimension.bring("key a b", tracked=["a", "b"])
    await dimension.merge(D4, [("k", "3", "z")])
    for as_of, row in ((D1, ("1", "x")), (D2, ("2", "y")), (D3, ("3", "y"))):
        await dimension.merge(as_of, [("k", *row)])
    assert await history("a, b") == ["k 1 x 1-2", "k 2 y 2-3", "k 3 y 3-4", "k 3 z 4-"]


async def test_a_correction_of_the_newest_snapshot_gives_back_values_after_a_split(open_dimension, history):
    dimension = await open_dimension("a", "o")
    await dimension.merge(D1, [("k", "1", "x")])
    await dimension.merge(D3, [("k", "1", "y")])
    await dimension.merge(D5, [("k", "1", "z")])
    # The part that the newest snapshot has filled begins on the third day now.
    await dimension.merge(D2, [("k", "2", "w")])
    assert await dimension.merge(D5, [("k", "3", "v")]) == HistoryCounts(changed=1)
    assert await history("a, o") == ["k 1 z 1-2", "k 2 w 2-3", "k 1 y 3-5", "k 3 v 5-"]


async def test_an_older_snapshot_with_rows_that_were_lost_changes_nothing(open_dimension, raw, history):
    dimension = await open_dimension("a")
    await dimension.merge(D1, [("k", "1")])
    await dimension.merge(D3, [("k", "1")])
    assert await dimension.stage([("k", "2")]) == 1
    with pytest.raises(StoreError, match=r"1 rows .* instead of 2"):
        await dimension.merge_staged(2, as_of=D2)
    assert await history() == ["k 1 1-"]
    assert await raw.fetchval("SELECT to_regclass($1)", quote(f"{STAGE}w")) is None


async def test_of_older_rows_with_one_key_the_last_counts(open_dimension, history):
    dimension = await open_dimension("a")
    await dimension.merge(D1, [("k", "1")])
    await dimension.merge(D3, [("k", "1")])
    assert await dimension.merge(D2, [("k", "2"), ("k", "3")]) == HistoryCounts(woven=1, duplicates=1)
    assert await history() == ["k 1 1-2", "k 3 2-3", "k 1 3-"]


async def test_a_history_of_keys_alone_is_woven(open_dimension, history):
    dimension = await open_dimension("")
    await dimension.merge(D1, [("k",), ("l",)])
    await dimension.merge(D4, [("k",)])
    assert await dimension.merge(D2, [("l",), ("m",)]) == HistoryCounts(closed=1, woven=1, unchanged=1)
    assert await history("NULL") == ["k 1-2", "k 4-", "l 1-4", "m 2-4"]


@pytest.mark.slow
async def test_a_staging_table_full_of_dead_rows_is_read_a_few_times(open_dimension, transactions):
    """A nested loop would read it once for each row."""
    dimension = await open_dimension("a", "o", complete=False)
    keys = [str(n) for n in range(30_000)]
    for as_of in (D1, D2, D4):
        await dimension.merge(as_of, [(key, "1", "x") for key in keys])

    async def aio_merge_and_count(connection, merge):
        counts = await aio_merge_history(connection, merge)
        scans = "SELECT pg_stat_get_xact_numscans(to_regclass($1)), pg_stat_get_xact_numscans(to_regclass('target'))"
        return counts, await connection.fetchrow(scans, quote(STAGE))

    for value, counted in (("2", "woven"), ("2", "unchanged")):
        rows = await dimension.stage([(key, value, "y") for key in keys[:1_000]])
        merge = HistoryMerge(
            table=dimension.load.table,
            history=History(tracked=("a",), complete=False),
            segment=dimension.load.segment,
            rows=rows,
            key=("key",),
            columns=("key", "a", "o"),
            as_of=D3,
        )
        counts, scans = await transactions.run(aio_merge_and_count, merge)
        assert (getattr(counts, counted), max(scans) < 100) == (1_000, True), scans


@pytest.mark.slow
async def test_many_versions_are_woven_in_seconds(open_dimension, raw):
    """Each of the keys is split, though the statistics of the table are old and it has no index on days."""
    dimension = await open_dimension("a")
    keys = [str(n) for n in range(20_000)]
    await dimension.merge(D1, [(key, "1") for key in keys])
    await raw.execute("ANALYZE target")
    await dimension.merge(D3, [(key, "1") for key in keys])
    assert await dimension.merge(D2, [(key, "2") for key in keys[:-10]]) == HistoryCounts(woven=19_990, closed=10)
    assert await raw.fetchval("SELECT count(*) FROM target") == 3 * 19_990 + 2 * 10

"""Merges of staged rows into their table, in sets: insert, upsert, soft delete (E6)."""

from __future__ import annotations

import datetime as dt
import time

import attrs
import pytest
import trio
from etl_loads import STAGE, open_load

from dataloader.flows.etl.parse.copy_lines import LineEncoder
from dataloader.jobs.errors import StoreError, TargetError
from dataloader.store.etl.merge import Counts, Merge, Mode, Scope
from dataloader.store.etl.staging import SEQUENCE
from dataloader.store.etl.target_table import quote

PRICES = "id int, day date, price numeric, source_file text, note text, PRIMARY KEY (day, id)"
LOADED = "id day price source_file"
BLOCKS = """
SELECT heap_blks_read + heap_blks_hit + idx_blks_read + idx_blks_hit
FROM pg_statio_user_tables WHERE relid = 'target'::regclass
"""
MANY = 300_000


@pytest.fixture
def target(raw):
    """Return a function that reads the target's rows as texts in order."""

    async def target(columns="t"):
        return [row[0] for row in await raw.fetch(f"SELECT ({columns})::text FROM target t ORDER BY 1")]

    return target


@pytest.fixture
def versions(raw):
    """Return a function that reads the position of each row, and the transactions that wrote or locked it."""

    async def versions():
        return [row[0] for row in await raw.fetch("SELECT (t.tableoid, t.ctid, t.xmin, t.xmax)::text FROM target t")]

    return versions


@pytest.mark.requirement("E6")
async def test_rows_are_inserted_updated_or_left_as_they_are(transactions, raw, target):
    load = await open_load(transactions, raw, PRICES, LOADED, key="id day")
    first = [(1, "2020-01-01", "1.50", "a"), (2, "2020-01-01", None, "a"), (1, "2020-01-02", 3, "a")]
    assert await load.merge(first) == Counts(inserted=3)
    await raw.execute("UPDATE target SET note = 'mine'")
    second = [(1, "2020-01-01", "1.500", "b"), (2, "2020-01-01", 7, "b"), (1, "2020-01-03", 4, "b")]
    assert await load.merge(second) == Counts(inserted=1, updated=1, unchanged=1)
    assert await target() == [
        "(1,2020-01-01,1.50,a,mine)",
        "(1,2020-01-02,3,a,mine)",
        "(1,2020-01-03,4,b,)",
        "(2,2020-01-01,7,b,mine)",
    ]


@pytest.mark.requirement("E6")
@pytest.mark.parametrize("suffix", ["", "PARTITION BY RANGE (day)"])
async def test_a_rerun_writes_and_locks_no_row(transactions, raw, versions, suffix):
    load = await open_load(transactions, raw, PRICES, LOADED, key="day id", suffix=suffix)
    if suffix:
        await raw.execute("CREATE TABLE part PARTITION OF target DEFAULT")
    rows = [(n, "2020-01-01", None if n % 3 else n, "a") for n in range(50)]
    assert await load.merge(rows) == Counts(inserted=50)
    before = await versions()
    assert await load.merge([(*row[:3], "b") for row in reversed(rows)]) == Counts(unchanged=50)
    assert await versions() == before
    assert await raw.fetchval(f"SELECT count(*) FROM {quote(STAGE)}") == 0


@pytest.mark.requirement("E6")
async def test_of_staged_rows_with_one_key_the_last_counts(transactions, raw, target):
    load = await open_load(transactions, raw, "id int PRIMARY KEY, a text", key="id")
    await load.stage([(1, "first"), (2, "only")])
    assert await load.stage([(1, "second"), (1, "third")]) == 2
    assert await load.merge_staged(4) == Counts(inserted=2, duplicates=2)
    assert await target() == ["(1,third)", "(2,only)"]
    assert await load.merge([(2, "new"), (2, "only")]) == Counts(unchanged=1, duplicates=1)
    await load.stage([(1, "fifth")], request=2)
    assert await load.stage([(1, "fourth"), (2, "only")]) == 2
    assert await load.merge_staged(3) == Counts(updated=1, unchanged=1, duplicates=1)
    assert await target() == ["(1,fifth)", "(2,only)"]


@pytest.mark.requirement("E6")
async def test_a_content_hash_decides_what_has_changed(transactions, raw, target):
    load = await open_load(transactions, raw, "id int PRIMARY KEY, doc json, content_hash text", key="id")
    await load.merge([(1, {"a": 1}, "x"), (2, {"a": 1}, None)])
    assert await load.merge([(1, {"a": 2}, "x"), (2, {"a": 2}, "y")]) == Counts(updated=1, unchanged=1)
    assert await target() == ['(1,"{""a"":1}",x)', '(2,"{""a"":2}",y)']


async def test_a_hash_that_the_load_does_not_bring_decides_nothing(transactions, raw):
    load = await open_load(transactions, raw, "id int PRIMARY KEY, a int, content_hash text", "id a", key="id")
    await load.merge([(1, 1)])
    assert await load.merge([(1, 2)]) == Counts(updated=1)


async def test_values_of_types_without_equality_are_compared_by_their_text(transactions, raw):
    load = await open_load(transactions, raw, "id int PRIMARY KEY, a json, b point, c json[], d box", key="id")
    row = (1, {"a": 1}, "(1,2)", [{"a": 1}], "(0,0),(2,2)")
    assert await load.merge([row]) == Counts(inserted=1)
    assert await load.merge([row]) == Counts(unchanged=1)
    assert await load.merge([(*row[:4], "(0,0),(1,4)")]) == Counts(updated=1)
    assert await load.merge([(*row[:3], [{"a": 2}], "(0,0),(1,4)")]) == Counts(updated=1)


async def test_a_load_may_fill_some_columns_of_rows_that_are_there(transactions, raw, target):
    """Loads of details do so. The other columns may be NOT NULL, and no number of the row's sequence is used up."""
    load = await open_load(
        transactions, raw, "id int PRIMARY KEY, name text NOT NULL, n bigserial, detail text", "id detail", key="id"
    )
    await raw.execute("INSERT INTO target VALUES (1, 'a'), (2, 'b')")
    assert await load.merge([(1, "x"), (2, "y")]) == Counts(updated=2)
    assert await target() == ["(1,a,1,x)", "(2,b,2,y)"]
    assert await raw.fetchval("SELECT last_value FROM target_n_seq") == 2


async def test_a_load_of_keys_alone_adds_those_that_are_missing(transactions, raw, target):
    load = await open_load(transactions, raw, "id int PRIMARY KEY, gone boolean", "id", key="id")
    assert await load.merge([(1,), (2,)]) == Counts(inserted=2)
    assert await load.merge([(2,), (3,)]) == Counts(inserted=1, unchanged=1)
    assert await load.merge([(2,)], deleted="gone", scope=Scope()) == Counts(unchanged=1, deleted=2)
    assert await load.merge([(1,)], deleted="gone") == Counts(updated=1)
    assert await target() == ["(1,f)", "(2,)", "(3,t)"]


@pytest.mark.slow
@pytest.mark.requirement("E6")
@pytest.mark.parametrize("analyzed", [True, False], ids=["analyzed", "as it was filled"])
async def test_a_merge_reads_what_its_rows_need_however_large_the_target_is(transactions, raw, analyzed):
    load = await open_load(transactions, raw, "id int, day date, a text, PRIMARY KEY (id, day)", key="id day")
    await raw.execute("ALTER TABLE target SET (autovacuum_enabled = off)")  # it also reads the table
    await raw.execute(f"INSERT INTO target SELECT i, '2020-01-01', 'a' FROM generate_series(1, {MANY}) AS i")
    if analyzed:
        await raw.execute("VACUUM ANALYZE target")
    await _tell_statistics(raw)  # those of the fill, which could arrive later otherwise
    bound = 25 * 50
    assert bound < await raw.fetchval("SELECT pg_relation_size('target') / current_setting('block_size')::int")

    async def blocks_of(rows):
        before = await raw.fetchval(BLOCKS)
        counts = await load.merge([(n, "2020-01-01", value) for n, value in rows])
        await transactions.run(_tell_statistics)
        return counts, await raw.fetchval(BLOCKS) - before

    present = range(7, MANY, MANY // 50)
    some_of_each = [*((n, "b") for n in present[:20]), *((n, "c") for n in present[20:40])]
    some_of_each += [(2 * MANY + n, "a") for n in range(10)]
    for what, rows, expected in (
        ("new, behind all", [(MANY + 1 + n, "a") for n in range(50)], Counts(inserted=50)),
        ("new, before all", [(-n, "a") for n in range(50)], Counts(inserted=50)),
        ("as they are", [(n, "a") for n in present[:50]], Counts(unchanged=50)),
        ("changed", [(n, "b") for n in present[:50]], Counts(updated=50)),
        ("some of each", some_of_each, Counts(inserted=10, updated=20, unchanged=20)),
    ):
        counts, blocks = await blocks_of(rows)
        assert counts == expected, what
        assert blocks < bound, what


async def _tell_statistics(connection):
    await connection.execute("SELECT pg_stat_force_next_flush()")


@pytest.mark.requirement("E6")
async def test_without_a_key_rows_are_appended_in_order(transactions, raw, target):
    load = await open_load(transactions, raw, "a text, n bigserial", "a")
    rows = [("b",), ("a",), ("b",)]
    await load.stage(rows)
    # Now the first rows are stored behind the others.
    await raw.execute(f"UPDATE {quote(STAGE)} SET a = a WHERE {SEQUENCE} < 3")
    assert await load.merge_staged(3, mode=Mode.INSERT) == Counts(inserted=3)
    assert await load.merge(rows[:1], mode=Mode.INSERT) == Counts(inserted=1)
    assert await target("n, a") == ["(1,b)", "(2,a)", "(3,b)", "(4,b)"]


@pytest.mark.requirement("E6")
async def test_an_insert_with_a_key_leaves_what_is_there(transactions, raw, target, versions):
    load = await open_load(transactions, raw, "id int PRIMARY KEY, a text UNIQUE", key="id")
    assert await load.merge([(1, "a"), (2, "b"), (2, "c")], mode=Mode.INSERT) == Counts(inserted=2, duplicates=1)
    before = await versions()
    assert await load.merge([(1, "x"), (2, "c")], mode=Mode.INSERT) == Counts(unchanged=2)
    assert await versions() == before
    with pytest.raises(StoreError, match="target_a_key"):
        await load.merge([(3, "c")], mode=Mode.INSERT)
    assert await target() == ["(1,a)", "(2,c)"]


@pytest.mark.slow
@pytest.mark.requirement("E6")
@pytest.mark.parametrize(
    ("kind", "gone"), [("timestamptz", "gone < now()"), ("date", "gone = current_date"), ("boolean", "gone")]
)
async def test_rows_missing_from_a_snapshot_are_marked_and_unmarked_when_they_come_back(
    transactions, raw, versions, kind, gone
):
    load = await open_load(transactions, raw, f"id int PRIMARY KEY, a text, gone {kind}", "id a", key="id")
    marked = f"SELECT coalesce(array_agg(id ORDER BY id), '{{}}') FROM target WHERE {gone}"
    snapshot = {"deleted": "gone", "scope": Scope()}
    assert await load.merge([(1, "a"), (2, "b"), (3, "c")], **snapshot) == Counts(inserted=3)
    assert await load.merge([(1, "a")], **snapshot) == Counts(unchanged=1, deleted=2)
    assert await raw.fetchval(marked) == [2, 3]
    before = await versions()
    assert await load.merge([(1, "a")], **snapshot) == Counts(unchanged=1)
    assert await versions() == before
    # A row comes back: unchanged, and with another value. Also without a scope.
    assert await load.merge([(1, "a"), (2, "b")], deleted="gone") == Counts(updated=1, unchanged=1)
    assert await load.merge([(1, "a"), (2, "b"), (3, "d")], **snapshot) == Counts(updated=1, unchanged=2)
    assert await raw.fetchval(marked) == []
    assert await load.merge([]) == Counts()
    assert await load.merge([], **snapshot) == Counts(deleted=3)


@pytest.mark.slow
@pytest.mark.requirement("E6")
@pytest.mark.parametrize(
    ("scope", "gone"),
    [
        (Scope("at", dt.date(2020, 1, 2), dt.date(2020, 1, 4)), [2, 3]),
        (Scope("at", "2020-01-02 00:00:01+00"), [3, 4]),
        (Scope("at", end=dt.datetime(2020, 1, 3, 2, tzinfo=dt.timezone(dt.timedelta(hours=2)))), [1, 2]),
        (Scope("id", 2, 3), [2]),
        (Scope(), [1, 2, 3, 4, 5]),
    ],
)
async def test_only_rows_of_the_window_are_marked(transactions, raw, scope, gone):
    load = await open_load(transactions, raw, "id int PRIMARY KEY, at timestamptz, gone boolean", "id at", key="id")
    days = [*(f"2020-01-0{n}" for n in range(1, 5)), None]
    await load.merge([*enumerate(days, 1), (6, "2020-01-02")])
    merged = await load.merge([(6, "2020-01-02")], deleted="gone", scope=scope)
    assert merged == Counts(unchanged=1, deleted=len(gone))
    assert await raw.fetchval("SELECT array_agg(id ORDER BY id) FROM target WHERE gone") == gone


@pytest.mark.slow
@pytest.mark.requirement("E6")
async def test_a_snapshot_of_a_day_that_the_statistics_do_not_know_is_compared_in_one_pass(transactions, raw):
    """They expect few rows of that day, and then the whole snapshot may be read again for each row."""
    load = await open_load(transactions, raw, "day date, id int, gone boolean, PRIMARY KEY (day, id)", key="day id")
    load = attrs.evolve(load, columns=("day", "id"), encoder=LineEncoder(("day", "id")))
    await load.merge([("2020-01-01", n) for n in range(20_000)])
    await raw.execute("ANALYZE target")
    newest = [("2020-01-02", n) for n in range(20_000)]
    await load.merge(newest)
    snapshot = {"deleted": "gone", "scope": Scope("day", dt.date(2020, 1, 2))}
    rows = await load.stage(newest)
    started = time.monotonic()
    assert await load.merge_staged(rows, **snapshot) == Counts(unchanged=20_000)
    assert time.monotonic() - started < 15


@pytest.mark.requirement("E6")
async def test_rows_of_other_segments_and_tokens_stay_where_they_are(transactions, raw, target):
    load = await open_load(transactions, raw, "id int PRIMARY KEY, gone boolean", "id", key="id")
    await load.merge([(1,), (2,), (3,)])
    others = [attrs.evolve(load.segment, number=2), attrs.evolve(load.segment, token=8)]
    for segment in others:
        await load.stage([(2,), (2,), (4,)], segment)
    assert await load.merge([(1,)], deleted="gone", scope=Scope()) == Counts(unchanged=1, deleted=2)
    assert await target() == ["(1,)", "(2,t)", "(3,t)"]
    for segment in others:
        assert (await load.merge_staged(3, segment=segment)).duplicates == 1
    assert await target() == ["(1,)", "(2,t)", "(3,t)", "(4,)"]


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "kept"), [(Mode.UPSERT, "ours"), (Mode.INSERT, "theirs")])
async def test_a_row_that_another_transaction_adds_meanwhile_is_as_any_that_is_there(
    transactions, raw, target, until_blocked, mode, kept
):
    load = await open_load(transactions, raw, "id int PRIMARY KEY, a text", key="id")
    await raw.execute("BEGIN; INSERT INTO target VALUES (1, 'theirs')")
    counts = []

    async def merge():
        counts.append(await load.merge([(1, "ours"), (2, "ours")], mode=mode))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(merge)
        await until_blocked()
        await raw.execute("COMMIT")
    assert await target() == [f"(1,{kept})", "(2,ours)"]
    assert counts == [Counts(inserted=1, **{"updated" if kept == "ours" else "unchanged": 1})]


@pytest.mark.requirement("E10")
async def test_a_merge_of_another_number_of_rows_than_were_staged_does_nothing(transactions, raw, target):
    """A crash of the server empties unlogged tables."""
    load = await open_load(transactions, raw, "id int PRIMARY KEY", key="id")
    await load.merge([(1,)])
    await load.stage([(2,), (2,), (3,)])
    for rows in (2, 4):
        with pytest.raises(StoreError, match=f"3 rows .* instead of {rows}|2 rows .* instead of {rows - 1}"):
            await load.merge_staged(rows)
    assert await target() == ["(1)"]
    assert await load.merge_staged(3) == Counts(inserted=2, duplicates=1)


@pytest.mark.requirement("E10")
async def test_a_merge_that_fails_leaves_the_segment_as_it_was(transactions, raw, target):
    load = await open_load(transactions, raw, "id int PRIMARY KEY, a int UNIQUE", key="id")
    await load.merge([(1, 1)])
    await load.stage([(1, 3), (2, 2), (3, 2)])
    with pytest.raises(StoreError, match="target_a_key"):
        await load.merge_staged(3)
    assert await target() == ["(1,1)"]
    assert await raw.fetchval(f"SELECT count(*) FROM {quote(STAGE)}") == 3


MISFITS = [
    ({"columns": ["id", "b"]}, "no column b"),
    ({"columns": ["id", "twice"]}, "twice is generated by the database"),
    ({"key": ["a"]}, r"no unique key \(a\); its unique keys are: id"),
    ({"columns": ["a"]}, "does not have all columns of its key"),
    ({"key": []}, "an upsert needs a key"),
    ({"deleted": "a"}, "must be a boolean"),
    ({"deleted": "gone", "columns": ["id", "gone"]}, "load itself has the column gone"),
    ({"deleted": "gone", "mode": Mode.INSERT}, "only be marked as deleted by an upsert"),
    ({"scope": Scope()}, "there is no column for the mark"),
    ({"deleted": "gone", "scope": Scope(start=1)}, "a window needs a column"),
    ({"deleted": "gone", "scope": Scope("b")}, "no column b"),
]


async def test_a_misfit_of_the_target_is_refused_before_any_change(transactions, raw):
    definition = "id int PRIMARY KEY, a text, gone boolean, twice int GENERATED ALWAYS AS (id * 2) STORED"
    load = await open_load(transactions, raw, definition, "id a", key="id")
    common = {"table": load.table, "segment": load.segment, "rows": 0, "columns": load.columns, "key": load.key}
    Merge(**common)
    for fields, why in MISFITS:
        with pytest.raises(TargetError, match=f'"target".*{why}'):
            Merge(**common | fields)


async def test_a_target_that_has_changed_meanwhile_is_reported(transactions, raw):
    load = await open_load(transactions, raw, "id int PRIMARY KEY, a text", key="id")
    await load.stage([(1, "a")])
    await raw.execute("ALTER TABLE target DROP COLUMN a")
    with pytest.raises(TargetError, match=r"column .*a.* does not exist"):
        await load.merge_staged(1)
    await raw.execute("DROP TABLE target")
    with pytest.raises(TargetError, match="target"):
        await load.merge_staged(1)


@pytest.mark.full
@pytest.mark.requirement("E6")
async def test_a_hundred_thousand_rows_go_into_a_million_in_seconds(transactions, raw):
    """Set by set: row by row it would take minutes, and with the queue's planner settings a scan for each row."""
    load = await open_load(transactions, raw, PRICES + ", gone boolean", LOADED, key="day id")
    day = "date '2020-01-01' + i % 1000"
    await raw.execute(f"INSERT INTO target SELECT i, {day}, i % 97, 'a' FROM generate_series(1, 1000000) i")
    await raw.execute("ANALYZE target")
    begun = dt.date(2020, 1, 1)
    # Half of the rows are unchanged, a quarter have another price, a quarter are new.
    rows = [(n, begun + dt.timedelta(days=n % 1000), n % 97 + (n % 20 == 0), "b") for n in range(10, 1_000_001, 10)]
    rows[:25_000] = [(n + 2_000_000, *row[1:]) for n, row in enumerate(rows[:25_000])]
    staged = await load.stage(rows)
    started = time.monotonic()
    counts = await load.merge_staged(staged, deleted="gone", scope=Scope("day", begun, begun + dt.timedelta(days=10)))
    assert time.monotonic() - started < 45
    assert counts.inserted == 25_000
    assert counts.updated == counts.unchanged == 37_500
    assert counts.deleted == 10_000 - 750


async def test_types_without_equality_within_other_types_are_compared_by_their_text(transactions, raw):
    await raw.execute("""
        CREATE TYPE inner_pair AS (n int, doc json);
        CREATE TYPE pair AS (a inner_pair, t text);
        CREATE DOMAIN docs AS json[];
        CREATE TYPE plain AS (n int, t varchar, k regclass)""")
    load = await open_load(
        transactions, raw, "id int PRIMARY KEY, p pair, q pair[], d docs, j jsonpath, s pg_snapshot, e plain", key="id"
    )
    comparable = {column.name for column in load.table.columns if column.has_equality}
    assert comparable == {"id", "e"}
    first = (1, '("(1,""{}"")",x)', '{"(\\"(1,{})\\",x)"}', "{[1]}", "$.a", "10:20:10,14", "(1,x,)")
    second = (1, '("(2,""{}"")",x)', *first[2:])
    assert await load.merge([first]) == Counts(inserted=1)
    assert await load.merge([first]) == Counts(unchanged=1)
    assert await load.merge([second]) == Counts(updated=1)
    assert await raw.fetchval("SELECT (p).a.n FROM target") == 2

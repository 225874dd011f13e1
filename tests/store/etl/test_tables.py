"""A load's target in the catalog, rows as lines of COPY, and the stage in which they wait (E3, E6, E10)."""

from __future__ import annotations

import datetime as dt
import os
import pickle
from decimal import Decimal
from functools import partial

import msgspec
import pytest
import trio
from etl_loads import STAGE, open_load
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from dataloader.flows.etl.parse.copy_lines import LineEncoder
from dataloader.jobs.errors import TargetError, Unstorable
from dataloader.store.etl.staging import (
    REQUEST,
    SEQUENCE,
    StagedLines,
    StagedSegment,
    aio_create_staging,
    aio_drop_staging,
    aio_stage,
    shape_of,
)
from dataloader.store.etl.target_table import aio_describe, quote

PHASES = [Phase.generate, Phase.shrink]
SEED = int(os.environ.get("PROPERTY_SEED", "0"))
EXAMPLES = int(os.environ.get("PROPERTY_EXAMPLES", "25"))


# Descriptions from the catalog.


async def test_a_table_is_described_with_its_columns_and_unique_keys(transactions, raw):
    await raw.execute("""
        CREATE SCHEMA ods;
        CREATE DOMAIN codes AS text[];
        CREATE DOMAIN note AS jsonb;
        CREATE SEQUENCE places;
        CREATE TABLE ods."Big Orders" (
          id bigint GENERATED ALWAYS AS IDENTITY, code varchar(3) UNIQUE, region text NOT NULL DEFAULT 'eu', gone int,
          amount numeric(10, 2), tags text[], codes codes, doc json, note note, place int DEFAULT nextval('places'),
          twice numeric GENERATED ALWAYS AS (amount * 2) STORED,
          "odd "" name" int, PRIMARY KEY (region, id), UNIQUE (amount) DEFERRABLE);
        ALTER TABLE ods."Big Orders" DROP COLUMN gone;
        CREATE UNIQUE INDEX ON ods."Big Orders" (amount) WHERE amount > 0;
        CREATE UNIQUE INDEX ON ods."Big Orders" (amount, lower(code));
        CREATE UNIQUE INDEX ON ods."Big Orders" (code, amount) INCLUDE (tags);""")
    table = await transactions.run(aio_describe, 'ods."Big Orders"')
    assert table.sql == '"ods"."Big Orders"'
    assert [(column.name, column.type) for column in table.columns] == [
        ("id", "bigint"),
        ("code", "character varying(3)"),
        ("region", "text"),
        ("amount", "numeric(10,2)"),
        ("tags", "text[]"),
        ("codes", "codes"),
        ("doc", "json"),
        ("note", "note"),
        ("place", "integer"),
        ("twice", "numeric"),
        ('odd " name', "integer"),
    ]
    by = {flag: [column.name for column in table.columns if getattr(column, flag)] for flag in (
        "not_null", "has_default", "generated", "numbered", "is_array", "is_document")}  # fmt: skip
    assert by["not_null"] == ["id", "region"]
    assert by["has_default"] == ["region", "place"]
    assert by["numbered"] == ["place"]
    assert by["is_document"] == ["doc", "note"]
    assert by["generated"] == ["id", "twice"]
    assert by["is_array"] == ["tags", "codes"]
    assert [column.name for column in table.columns if not column.has_equality] == ["doc"]
    assert table.keys == (("region", "id"), ("code",), ("code", "amount"))
    assert "doc" in table
    assert "gone" not in table


async def test_a_name_without_a_schema_is_found_as_the_session_finds_it(transactions, raw):
    await raw.execute("CREATE TABLE lower_case (a int); CREATE SCHEMA other; CREATE TABLE other.hidden (a int)")
    assert (await transactions.run(aio_describe, "Lower_Case")).sql == '"public"."lower_case"'
    for name in ("hidden", "nowhere.at_all", "other.elsewhere"):
        with pytest.raises(TargetError, match=rf"no table {name};"):
            await transactions.run(aio_describe, name)


async def test_a_name_that_is_no_table_is_refused(transactions, raw):
    await raw.execute("CREATE VIEW view AS SELECT 1 AS a")
    for name in ("", "two words", "a.b.c.d", 'x"', "elsewhere.public.t", "view"):
        with pytest.raises(TargetError):
            await transactions.run(aio_describe, name)


# Rows as lines.

TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)))
NUMBERS = st.decimals(allow_nan=False, allow_infinity=False, places=5, min_value=-(10**20), max_value=10**20)
# Without the days that do not exist in another zone.
INSTANTS = st.datetimes().filter(lambda at: 1 < at.toordinal() < dt.date.max.toordinal())
ZONES = st.integers(-15 * 3600, 15 * 3600).map(lambda s: dt.timezone(dt.timedelta(seconds=s)))
# jsonb has numerics: a float with more digits is read as another whole number.
FLOATS = st.floats(-1e15, 1e15)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | FLOATS | TEXTS,
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
    max_leaves=8,
)
CELLS = {
    "t text": TEXTS,
    "i bigint": st.integers(-(2**63), 2**63 - 1),
    "n numeric": NUMBERS,
    "f float8": st.floats(),
    "b boolean": st.booleans(),
    "d date": st.dates(),
    "ts timestamp": INSTANTS,
    "tz timestamptz": st.builds(lambda at, zone: at.replace(tzinfo=zone), INSTANTS, ZONES),
    "tm time": st.times(),
    "iv interval": st.timedeltas(dt.timedelta(days=-99_999), dt.timedelta(days=99_999)),
    "u uuid": st.uuids(),
    "by bytea": st.binary(),
    "js jsonb": JSON,
    "ja jsonb[]": st.lists(JSON),
    "ta text[]": st.lists(st.none() | TEXTS),
    "na numeric[]": st.lists(NUMBERS, min_size=1).map(lambda row: [row, row]),
}
NAMES = [definition.split()[0] for definition in CELLS]


@pytest.mark.slow
@pytest.mark.requirement("E3")
async def test_every_value_is_unchanged_when_read_from_the_database(transactions, raw):
    load = await open_load(transactions, raw, ", ".join(CELLS))

    async def check(rows):
        assert await load.stage(rows) == len(rows)
        found = await transactions.run(aio_read)
        for row, record in zip(rows, found, strict=True):
            for name, cell in zip(NAMES, row, strict=True):
                assert same(record[name], cell), (name, cell, record[name])

    @seed(SEED)
    @settings(
        max_examples=EXAMPLES, deadline=None, database=None, phases=PHASES, suppress_health_check=list(HealthCheck)
    )
    @given(rows=st.lists(st.tuples(*(st.none() | cells for cells in CELLS.values())), max_size=4))
    def lists_of_rows(rows):
        trio.from_thread.run(check, rows)

    await trio.to_thread.run_sync(lists_of_rows)


@pytest.mark.requirement("E3")
async def test_a_text_in_json_is_a_text_and_json_that_is_ready_made_is_taken_as_it_is(transactions, raw):
    load = await open_load(transactions, raw, "a jsonb, b json, c jsonb[]")
    ready = msgspec.Raw(b'{"b": [5]}')
    rows = [("5", "5", ["5", 5, None]), (ready, ready, [ready]), (dt.date(2026, 1, 2), True, []), (None,) * 3]
    await load.stage(rows)
    rows = await raw.fetch(f"SELECT a::text, b::text, c::text FROM {quote(STAGE)} ORDER BY {SEQUENCE}")
    assert [tuple(row) for row in rows] == [
        ('"5"', '"5"', '{"\\"5\\"",5,NULL}'),
        ('{"b": [5]}', '{"b": [5]}', '{"{\\"b\\": [5]}"}'),
        ('"2026-01-02"', "true", "{}"),
        (None, None, None),
    ]


async def aio_read(connection):
    rows = await connection.fetch(f"SELECT * FROM {quote(STAGE)} ORDER BY {SEQUENCE}")
    await connection.execute(f"TRUNCATE {quote(STAGE)}")
    return rows


def same(found, cell):
    if isinstance(cell, float):
        return repr(found) == repr(cell)  # NaN and -0.0 too
    return found == cell and isinstance(found, bool) is isinstance(cell, bool)


def test_subtypes_are_written_as_what_they_are():
    class Code(str):
        __slots__ = ()

        def __repr__(self):
            return "not this"

        __str__ = __repr__

    class Number(int):
        __repr__ = __str__ = lambda _: "nor this"

    class When(dt.datetime):
        pass

    encoder = LineEncoder(["a", "b", "c", "d", "e"], ["e"])
    row = (Code("a"), Number(5), When(2020, 1, 2), True, [Code("b"), Number(6)])
    assert encoder.encode(row) == b'a\t5\t2020-01-02T00:00:00\ttrue\t{"b","6"}\n'


@pytest.mark.parametrize(
    ("cell", "line"),
    [
        ("\\N", r"\\N"),
        ("a\tb", r"a\tb"),
        ("a\nb", r"a\nb"),
        ("a\rb", r"a\rb"),
        (b"\\", r"\\x5c"),
        # Each part has a sign: in the style of the SQL standard, the first sign would apply to all parts.
        (dt.timedelta(days=-2, seconds=5, microseconds=7), "-2 days +5.000007 seconds"),
        ({"a": Decimal("1.10"), "b": 2**70}, '{"a":1.10,"b":1180591620717411303424}'),
        ({"a": "\\u0000"}, r'{"a":"\\\\u0000"}'),
        ((1, "x"), '[1,"x"]'),
    ],
)
def test_cells_are_written_as_the_database_reads_them(cell, line):
    assert LineEncoder(["a"]).encode((cell,)) == f"{line}\n".encode()


def test_an_encoder_goes_to_another_process():
    encoder = pickle.loads(pickle.dumps(LineEncoder(["a", "b"], ["b"])))
    assert encoder.encode((None, ["x", None, 'a"\\'])) == b'\\N\t{"x",NULL,"a\\\\"\\\\\\\\"}\n'


@pytest.mark.requirement("E10")
@pytest.mark.parametrize(
    ("cell", "why"),
    [
        ("a\0b", "NUL"),
        ("a\ud800b", "surrogate"),
        ({"a": ["b\0"]}, "NUL"),
        ({"a": ["\udfff"]}, "surrogate"),
        (["x", "\0"], "NUL"),
        (object(), "a value of type object cannot be stored"),
        ([object()], "object"),
        ({"a": object()}, "object"),
        pytest.param(10**5000, "4300", id="a long number"),
    ],
)
def test_an_unstorable_value_is_refused_with_its_column(cell, why):
    for arrays in ([], ["bad"]):
        with pytest.raises(Unstorable, match=rf"column bad: .*{why}"):
            LineEncoder(["good", "bad"], arrays).encode(("fine", cell))


def test_a_row_of_another_width_is_refused():
    with pytest.raises(Unstorable, match="row of 1 cells for the 2 columns a, b"):
        LineEncoder(["a", "b"]).encode((1,))


# The stage.


@pytest.fixture
async def load(transactions, raw):
    definition = """
      id int PRIMARY KEY, name varchar(5) NOT NULL, price numeric CHECK (price > 0), at date DEFAULT '2020-01-01',
      serial bigserial, other text NOT NULL, twice numeric GENERATED ALWAYS AS (price * 2) STORED,
      CHECK (other <> name)"""
    return await open_load(transactions, raw, definition, "id name price at", key="id")


@pytest.mark.requirement("E3")
async def test_a_stage_has_the_loads_columns_and_no_log(load, raw, transactions):
    await load.stage([(1, "a", "1.50", "2020-01-01")])
    await load.stage(
        [(2, "b", None, "1999-12-31"), (3, "", 2, None)], segment=StagedSegment(STAGE, 2**40, 5), request=9
    )
    shape = shape_of(("id", "name", "price", "at"))
    rows = [tuple(row) for row in await raw.fetch(f"SELECT t::text FROM {quote(STAGE)} t")]
    assert rows == [
        (f"(1,a,1.50,2020-01-01,7,1,1,{shape},1)",),
        (f"(2,b,,1999-12-31,1099511627776,5,9,{shape},2)",),
        (f'(3,"",2,,1099511627776,5,9,{shape},3)',),
    ]
    assert await raw.fetchval("SELECT relpersistence::text FROM pg_class WHERE relname = $1", STAGE) == "u"
    assert await raw.fetchval("SELECT count(*) FROM target") == 0
    assert await raw.fetchval("SELECT is_called FROM target_serial_seq") is False


@pytest.mark.requirement("E3")
async def test_rows_that_bring_other_columns_are_staged_together_with_the_others_defaults(load, raw, transactions):
    pieces = [
        (1, StagedLines(("id", "name"), 2, b"1\t1\ta\n4\t2\tb\n")),
        (1, StagedLines(("id", "name", "price", "at"), 2, b"2\t3\tc\t1.5\t\\N\n3\t4\td\t\\N\t1999-12-31\n")),
        (2, StagedLines(("id", "name"), 1, b"1\t5\te\n")),
    ]
    assert await transactions.run(aio_stage, load.segment, pieces) == 5
    rows = await raw.fetch(f"SELECT t::text FROM {quote(STAGE)} t ORDER BY {REQUEST}, {SEQUENCE}")
    few, all_of_them = shape_of(("id", "name")), shape_of(("id", "name", "price", "at"))
    assert [row["t"] for row in rows] == [
        f"(1,a,,2020-01-01,7,1,1,{few},1)",
        f"(3,c,1.5,,7,1,1,{all_of_them},2)",
        f"(4,d,,1999-12-31,7,1,1,{all_of_them},3)",
        f"(2,b,,2020-01-01,7,1,1,{few},4)",
        f"(5,e,,2020-01-01,7,1,2,{few},1)",
    ]
    # A refused piece also rolls back those of the other columns.
    bad = (3, StagedLines(("id", "name", "price"), 1, b"1\t6\tf\tnone\n"))
    with pytest.raises(Unstorable, match="line 1, column price"):
        await transactions.run(aio_stage, load.segment, [*pieces, bad])
    assert await raw.fetchval(f"SELECT count(*) FROM {quote(STAGE)}") == 5


async def test_a_row_that_brings_nothing_is_one_of_defaults(transactions, raw):
    load = await open_load(transactions, raw, "a int DEFAULT 5")
    assert await transactions.run(aio_stage, load.segment, [(1, StagedLines((), 2, b"1\n2\n"))]) == 2
    assert await raw.fetchval(f"SELECT array_agg(a) FROM {quote(STAGE)}") == [5, 5]


@pytest.mark.parametrize(("first", "pieces"), [(9, ["1 2 3 4 5"]), (5, ["1 2 3 4 5"]), (1, ["1", "2 3", "4 5"])])
def test_lines_are_cut_to_the_room_that_a_batch_has(first, pieces):
    lines = StagedLines(("a",), 5, b"1\n2\n3\n4\n5\n")
    assert [(each.number, each.text.decode().split()) for each in lines.cut(first, 2)] == [
        (len(piece.split()), piece.split()) for piece in pieces
    ]


async def test_no_lines_are_no_rows(load):
    assert await load.stage([]) == 0


async def test_a_column_of_empty_texts_is_as_many_rows(transactions, raw):
    load = await open_load(transactions, raw, "a text")
    assert await load.stage([("\\.",), ("\\N",), (None,), ("",), ("",)]) == 5
    rows = await raw.fetch(f"SELECT a FROM {quote(STAGE)} ORDER BY {SEQUENCE}")
    assert [row["a"] for row in rows] == ["\\.", "\\N", None, "", ""]


@pytest.mark.slow
@pytest.mark.requirement("E10")
@pytest.mark.parametrize(
    ("row", "what"),
    [
        (("x", "a", 1, None), 'line 3, column id: invalid input syntax for type integer: "x"'),
        ((2, "secret", 1, None), r"line 3, column name: value too long for type character varying\(5\)"),
        ((2, None, 1, None), 'line 3, column name: null value in column "name".* violates not-null'),
        ((None, "a", 1, None), 'line 3, column id: null value in column "id"'),
        ((2, "a", -1, None), 'line 3: .* violates check constraint "target_price_check"'),
        ((2, "a", 1, "2020-02-30"), 'line 3, column at: date/time field value out of range: "2020-02-30"'),
        ((2, "a", "x" * 9000, None), "line 3, column price: (.|\n)* characters cut"),
    ],
)
async def test_a_bad_value_is_named_with_its_line_and_column_and_undoes_its_batch(load, raw, row, what):
    await load.stage([(1, "a", 1, None)])
    with pytest.raises(Unstorable, match=f"^{what}") as raised:
        await load.stage([(4, "b", 1, None), (5, "c", 1, None), row, (6, "d", 1, None)])
    assert "secret" not in str(raised.value)
    assert len(str(raised.value)) < 700
    assert await raw.fetchval(f"SELECT count(*) FROM {quote(STAGE)}") == 1


@pytest.mark.requirement("E10")
async def test_a_key_is_never_null(transactions, raw):
    load = await open_load(transactions, raw, "a int, b int, UNIQUE (a, b)", key="a b")
    with pytest.raises(Unstorable, match=r'line 1, column b: null value in column "b"'):
        await load.stage([(1, None)])


async def test_a_line_without_enough_cells_is_refused_and_not_quoted(load, transactions):
    lines = partial(StagedLines, load.columns, 2)
    with pytest.raises(Unstorable, match=r"^line 2: missing data for column .price.$"):
        await transactions.run(aio_stage, load.segment, [(1, lines(b"1\t1\ta\t1\t\\N\n2\t2\tsecre\n"))])
    with pytest.raises(Unstorable, match=r"^line 1: extra data after last expected column$"):
        await transactions.run(aio_stage, load.segment, [(1, lines(b"1\t1\ta\t1\t\\N\tsecre\n"))])


async def test_a_stage_that_is_gone_and_columns_that_are_not_there_are_the_targets_fault(load, raw, transactions):
    for columns in ("id nothing", "id twice", "id id", ""):
        with pytest.raises(TargetError, match="target"):
            await transactions.run(aio_create_staging, load.table, STAGE, columns.split())
    await transactions.run(aio_drop_staging, STAGE)
    await transactions.run(aio_drop_staging, STAGE)
    with pytest.raises(TargetError, match=STAGE):
        await load.stage([(1, "a", 1, None)])
    await raw.execute("DROP TABLE target")
    with pytest.raises(TargetError, match="target"):
        await transactions.run(aio_create_staging, load.table, STAGE, load.columns)


async def test_preparing_again_leaves_nothing_of_an_earlier_run(load, raw, transactions):
    await load.stage([(1, "a", 1, None)])
    await transactions.run(aio_create_staging, load.table, STAGE, load.columns)
    assert await raw.fetchval(f"SELECT count(*) FROM {quote(STAGE)}") == 0

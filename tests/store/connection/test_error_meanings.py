"""The meaning of errors of PostgreSQL and of its driver: each code of the server's own list has exactly one."""

from __future__ import annotations

import asyncio
import re
import ssl
from pathlib import Path

import asyncpg
import pytest
import trio
import trio.lowlevel
from asyncpg import exceptions
from asyncpg.exceptions import _base
from conditions import until
from databases import raw_connection
from proxy import open_proxy

from dataloader.jobs.errors import AccessDenied, BadRequest, SchemaError, StoreError, StoreUnavailable, Unstorable
from dataloader.store.connection import error_meanings
from dataloader.store.connection.bridge import open_database
from dataloader.store.connection.driver_errors import translate
from dataloader.store.connection.error_meanings import (
    BY_CLASS,
    BY_CODE,
    ErrorMeaning,
    Misused,
    meaning_of_code,
    meaning_of_error,
)
from dataloader.store.connection.options import DatabaseOptions

STORE = Path(error_meanings.__file__).parents[1]
NO_ERRORS = ("00", "01", "02")
OURS = {
    ErrorMeaning.OUTAGE: StoreUnavailable,
    ErrorMeaning.CONFLICT: StoreUnavailable,
    ErrorMeaning.BAD_VALUE: Unstorable,
    ErrorMeaning.BUG: StoreError,
}
# One code of each kind that a service encounters, repeated here: a change of the table is a change of behavior.
EXPECTED = {
    ErrorMeaning.OUTAGE: (
        "08000 08001 08003 08004 08006 08007 25006 25P03 25P04 28000 28P01 3D000 40003 53000 53100 53200 53300"
        " 53400 57000 57014 57P01 57P02 57P03 57P04 57P05 58000 58030 HV001 HV00N"
    ),
    ErrorMeaning.CONFLICT: "40000 40001 40P01 55P03 72000",
    ErrorMeaning.BAD_VALUE: (
        "22001 22003 22021 22023 22P02 22P05 23502 23503 23505 23514 23P01 40002 44000 54000 54001 P0001"
    ),
    ErrorMeaning.BUG: (
        "08P01 0A000 21000 25001 25P02 26000 42501 42601 42703 42883 42P01 42P05 55000 55006 58P01 XX000 XX001 XX002"
    ),
}


def listed_codes(server):
    """Return the codes of errors in the server's own list, the source of its programs and its documentation."""
    [path] = {path.resolve() for path in Path(server.embedded.bin_dir).parents[0].rglob("errcodes.txt")} or {
        path.resolve() for path in Path("/usr/share/postgresql", str(server.version)).glob("errcodes.txt")
    }
    return re.findall(r"^([0-9A-Z]{5})\s+[EF]\s", path.read_text(), re.MULTILINE)


async def test_each_code_of_the_servers_list_has_one_meaning_also_when_raised(database, postgres, store):
    codes = listed_codes(postgres)
    assert len(codes) > 200
    assert {code[:2] for code in codes} - BY_CLASS.keys() == set()
    async with raw_connection(database.dsn) as raw:
        for code in codes:
            with pytest.raises(asyncpg.PostgresError) as caught:
                await raw.execute(f"DO $$ BEGIN RAISE SQLSTATE '{code}'; END $$")
            assert caught.value.sqlstate == code
            meaning = meaning_of_error(caught.value)
            assert meaning is meaning_of_code(code)
            assert isinstance(translate(caught.value), OURS[meaning])
            is_outage = isinstance(translate(caught.value), StoreUnavailable)
            assert is_outage == (meaning in {ErrorMeaning.OUTAGE, ErrorMeaning.CONFLICT}), code


def test_each_code_of_the_drivers_list_has_one_meaning():
    kinds = {
        kind
        for kind in vars(exceptions).values()
        if isinstance(kind, type) and issubclass(kind, asyncpg.PostgresError) and kind.sqlstate
    }
    assert len(kinds) > 200
    for kind in kinds:
        assert kind.sqlstate[:2] in {*BY_CLASS, *NO_ERRORS}, kind
        assert meaning_of_error(kind("text")) in ErrorMeaning


def test_the_codes_that_a_service_meets_have_the_meaning_that_is_documented():
    for meaning, codes in EXPECTED.items():
        assert {code: meaning_of_code(code) for code in codes.split()} == dict.fromkeys(codes.split(), meaning)


def test_the_table_says_nothing_twice():
    assert [code for code, meaning in BY_CODE.items() if BY_CLASS[code[:2]] is meaning] == []


async def test_an_unknown_code_has_the_meaning_of_its_class(raw):
    for code, meaning in {
        "57XYZ": ErrorMeaning.OUTAGE,
        "22XYZ": ErrorMeaning.BAD_VALUE,
        "40XYZ": ErrorMeaning.CONFLICT,
        "ZZ001": ErrorMeaning.BUG,
    }.items():
        with pytest.raises(asyncpg.PostgresError) as caught:
            await raw.execute(f"DO $$ BEGIN RAISE SQLSTATE '{code}'; END $$")
        assert isinstance(caught.value, _base.UnknownPostgresError)
        assert meaning_of_error(caught.value) is meaning


@pytest.mark.parametrize(
    ("error", "meaning"),
    [
        (asyncpg.InterfaceError("connection is closed"), ErrorMeaning.OUTAGE),
        (asyncpg.ConnectionDoesNotExistError("connection was closed in the middle of operation"), ErrorMeaning.OUTAGE),
        (asyncpg.PostgresError.new({"S": "FATAL", "C": "08P01", "M": "server conn crashed?"}), ErrorMeaning.OUTAGE),
        (asyncpg.PostgresError.new({"S": "ERROR", "C": "08P01", "M": "invalid message format"}), ErrorMeaning.BUG),
        (asyncpg.InternalClientError("got result for unknown protocol state"), ErrorMeaning.OUTAGE),
        (asyncpg.ProtocolError("unexpected message"), ErrorMeaning.OUTAGE),
        (asyncpg.TargetServerAttributeNotMatched("no primary"), ErrorMeaning.OUTAGE),
        (asyncpg.ClientConfigurationError("no such file"), ErrorMeaning.OUTAGE),
        (TimeoutError(), ErrorMeaning.OUTAGE),
        (ConnectionResetError(), ErrorMeaning.OUTAGE),
        (OSError(113, "No route to host"), ErrorMeaning.OUTAGE),
        (ssl.SSLEOFError(), ErrorMeaning.OUTAGE),
        (asyncio.IncompleteReadError(b"", 4), ErrorMeaning.OUTAGE),
        (asyncpg.InvalidCachedStatementError("cached statement plan is invalid"), ErrorMeaning.CONFLICT),
        (asyncpg.OutdatedSchemaCacheError("outdated"), ErrorMeaning.CONFLICT),
        (asyncpg.DataError("invalid input for query argument $1"), ErrorMeaning.BAD_VALUE),
        (UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed"), ErrorMeaning.BAD_VALUE),
        (Misused("the server expects 1 argument for this query, 0 were passed"), ErrorMeaning.BUG),
        (asyncpg.UnsupportedClientFeatureError("no"), ErrorMeaning.BUG),
        (asyncpg.UnsupportedServerFeatureError("no"), ErrorMeaning.BUG),
        (ValueError("a fault of the program"), None),
        (AccessDenied("one of ours already"), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_error_of_the_driver_and_of_the_network_has_one_meaning(error, meaning):
    assert meaning_of_error(error) is meaning
    ours = translate(error)
    assert ours is None if meaning is None else type(ours) is OURS[meaning]


async def test_a_wrong_call_on_an_open_connection_is_a_bug_and_a_closed_one_an_outage(store):
    async def one_argument_less(connection):
        await connection.fetch("SELECT $1::int")

    with pytest.raises(StoreError, match="expects 1 argument") as caught:
        await store.run(one_argument_less)
    assert not isinstance(caught.value, StoreUnavailable)

    async def on_a_closed_one(connection):
        await connection.close()
        await connection.fetch("SELECT 1")

    with pytest.raises(StoreUnavailable, match="connection is closed"):
        await store.run(on_a_closed_one)


async def test_errors_that_ask_for_something_special_of_a_reader_keep_their_text(store):
    async def of(connection, sql):
        await connection.execute(sql)

    with pytest.raises(BadRequest, match=r"^queue: must be shorter") as caught:
        await store.run(of, "SELECT dl_refuse('queue', 'must be shorter')")
    assert caught.value.field == "queue"
    with pytest.raises(SchemaError, match="dataloader migrate"):
        await store.run(of, "SELECT FROM no_such_table")
    with pytest.raises(StoreError, match="pooler does not keep prepared statements"):
        await store.run(of, "EXECUTE no_such_statement")


async def test_a_probe_distinguishes_a_limit_of_a_value_from_one_of_the_server(database, store, raw):
    """Both have the code 54000: a text that is too long for an index, and a server that assigns no more IDs."""
    await raw.execute("CREATE TABLE long (text text PRIMARY KEY)")

    async def too_long(connection):
        # Random: a text that can be compressed would fit.
        sql = "INSERT INTO long SELECT string_agg(md5(n::text || random()::text), '') FROM generate_series(1, 500) n"
        await connection.execute(sql)

    with pytest.raises(Unstorable, match="index row"):
        await store.run(too_long)
    # A function represents a server that also refuses the probe: a real one would take two billion transactions.
    await raw.execute("""
        CREATE SCHEMA stopped;
        CREATE FUNCTION stopped.pg_current_xact_id() RETURNS int LANGUAGE plpgsql AS $$ BEGIN
          RAISE SQLSTATE '54000' USING MESSAGE = 'database is not accepting commands to avoid wraparound data loss';
        END $$
    """)
    # The probe's connection, which is new, finds it before the server's function.
    await raw.execute(f"ALTER DATABASE {database.name} SET search_path = stopped, pg_catalog, public")
    with pytest.raises(StoreUnavailable, match="index row"):
        await store.run(too_long)


async def test_a_server_serves_if_it_accepts_writes_by_default(store, raw, database):
    assert await store.crossing.is_served()
    [name] = await raw.fetchrow("SELECT current_database()")
    await raw.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    assert not await store.crossing.is_served()
    async with open_database(DatabaseOptions(dsn="postgresql://127.0.0.1:1/nowhere")) as nowhere:
        assert not await nowhere.serves(10)


async def test_callers_that_wait_for_a_probe_share_the_next_one(database):
    async with open_proxy(database.dsn) as proxy, open_database(DatabaseOptions(dsn=proxy.dsn)) as store:
        seen, answers = set(), []

        async def is_probed():
            seen.update(proxy.links("probe"))
            return bool(seen)

        async def ask():
            answers.append(await store.crossing.is_served())
            await is_probed()

        proxy.freeze()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await until(is_probed)
            for _ in range(20):
                nursery.start_soon(ask)
            await trio.lowlevel.checkpoint()
            proxy.thaw()
            while len(answers) < 21:
                await is_probed()
                await trio.sleep(0.001)
        assert answers == [True] * 21
        assert len(seen) == 2


def test_no_other_file_of_the_store_judges_an_error_by_its_code_or_class():
    allowed = {"PostgresError", "InterfaceError"}
    for path in STORE.rglob("*.py"):
        if path.name != "error_meanings.py":
            text = path.read_text()
            assert set(re.findall(r"asyncpg\.(?:exceptions\.)?(\w+Error)\b", text)) <= allowed, path
            assert "sqlstate" not in text.lower() or path.name == "driver_errors.py", path

"""Requirements on a server and its pooler: checked when a service or `migrate` starts, refused in one line (Q7)."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

import pytest
import trio
from bouncer import find_bouncer, open_bouncer
from pooler import open_pooler
from proxy import open_proxy

from dataloader.jobs.errors import ConfigError, StoreError, StoreUnavailable
from dataloader.store.connection.bridge import Session, open_database
from dataloader.store.connection.connect import OLDEST, PLANNER
from dataloader.store.connection.options import DatabaseOptions
from dataloader.store.connection.server_check import check_server

WRONG_USE = 2
IGNORED = frozenset(
    {"statement_timeout", "idle_in_transaction_session_timeout", "default_transaction_isolation", *PLANNER}
)
OLD = "max_client_conn = 50"
"""Setting of a PgBouncer before 1.21, which does not know the setting that keeps prepared statements."""


@pytest.fixture
def refused(start):
    """Return a function that returns the output of a command, by default `serve`, that refuses a database.

    The output is one line, with the exit code for wrong use.
    """

    async def refused(command="serve", **settings):
        process = start(command, WORKERS_JSON="[]", DL_PORT="0", DL_LOG_FORMAT="json", **settings)
        _, errors = await trio.to_thread.run_sync(lambda: process.communicate(timeout=60))
        assert process.returncode == WRONG_USE, errors
        [line] = [line for line in errors.splitlines() if not line.startswith("{")]
        return line

    return refused


async def checked(dsn, direct_dsn=None):
    async with open_database(DatabaseOptions(dsn=dsn, direct_dsn=direct_dsn)) as database:
        return await check_server(database)


def with_database(dsn, name):
    return dsn.replace(urlsplit(dsn).path, f"/{name}", 1)


@pytest.mark.each_server
async def test_a_server_that_is_supported_is_taken(postgres, database):
    assert await checked(database.dsn) == postgres.version


@pytest.mark.slow
async def test_addresses_of_two_databases_are_refused_and_two_ways_to_one_are_allowed(
    database, empty_database, refused
):
    line = await refused(DL_DB_DSN=database.dsn, DL_DIRECT_DSN=empty_database.dsn)
    assert line.startswith(f"DL_DIRECT_DSN: refers to the database '{empty_database.name}', and DL_DB_DSN to ")
    async with open_proxy(database.dsn) as proxy:
        assert await checked(proxy.dsn, direct_dsn=database.dsn)


@pytest.mark.full
@pytest.mark.parametrize("command", ["serve", "migrate", "queues"])
async def test_a_server_that_is_too_old_is_refused_by_every_command(database, refused, command):
    old = OLDEST - 1
    async with open_proxy(database.dsn) as proxy:
        version = re.search(rb"^(\d+)\.\d+", database.psql("show server_version").encode())
        name = b"server_version\0"
        proxy.reworded = name + version[0], name + (b"%d.0" % old).ljust(len(version[0]))
        said = await refused(command, DL_DB_DSN=proxy.dsn)
    assert said == f"DL_DB_DSN: PostgreSQL {old} is too old; PostgreSQL {OLDEST} or later is required"


@pytest.mark.full
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda dsn: with_database(dsn, "nowhere"), 'database "nowhere" does not exist'),
        (lambda dsn: re.sub(r":[^:@/]+@", ":guessed@", dsn), 'password authentication failed for user "postgres"'),
        (lambda dsn: dsn.replace("postgres:", "nobody:"), 'password authentication failed for user "nobody"'),
        (lambda dsn: re.sub(r"//[^@]+@", "//stranger:secret-word@", dsn), "permission denied for database"),
    ],
    ids=["no such database", "wrong password", "no such role", "no right to connect"],
)
async def test_a_refused_connection_ends_the_service_without_a_wait(database, raw, refused, change, says):
    await raw.execute(f"""
        DO $$ BEGIN
          CREATE ROLE stranger LOGIN PASSWORD 'secret-word';
        EXCEPTION WHEN duplicate_object THEN NULL; END $$;
        REVOKE CONNECT ON DATABASE {database.name} FROM PUBLIC""")
    dsn = change(database.dsn)
    said = await refused(DL_DB_DSN=dsn)
    assert said.startswith(f"DL_DB_DSN: the server rejected the connection ({says}")
    assert "secret-word" not in said
    assert await refused("queues", DL_DB_DSN=dsn) == said
    # Both addresses are checked.
    said = await refused(DL_DB_DSN=database.dsn, DL_DIRECT_DSN=dsn)
    assert said.startswith(f"DL_DIRECT_DSN: the server rejected the connection ({says}")


async def test_an_address_that_the_driver_can_not_use_is_refused_and_not_waited_for(database, tmp_path):
    (tmp_path / "certificate").write_text("none")
    for query, says in (
        ("sslmode=bogus", "the address is invalid (`sslmode` parameter must be one of: disable, "),
        (f"sslmode=verify-full&sslrootcert={tmp_path}/no", f"the address is invalid (sslrootcert: {tmp_path}/no "),
        (f"sslmode=require&sslcert={tmp_path}/certificate", "the address is invalid (SSLError: "),
        ("keepalives=1", 'the server rejected the connection (unrecognized configuration parameter "keepalives")'),
    ):
        with pytest.raises(ConfigError, match=f"^DL_DB_DSN: {re.escape(says)}"):
            await checked(f"{database.dsn}{'&' if '?' in database.dsn else '?'}{query}")
    # If no such file is needed, the error is only about the server.
    with pytest.raises(StoreUnavailable, match=r"cannot be reached \(ConnectionRefusedError"):
        await checked(f"postgresql://u@127.0.0.1:1/x?sslmode=disable&sslrootcert={tmp_path}/no")


@pytest.mark.slow
async def test_a_database_whose_encoding_is_not_utf8_is_refused(database, raw):
    name = f"{database.name}_latin1"
    await raw.execute(f"""
        CREATE DATABASE {name} ENCODING 'LATIN1' LOCALE_PROVIDER libc LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0""")
    try:
        with pytest.raises(ConfigError, match=r"^DL_DB_DSN: the database's encoding is LATIN1, but must be UTF8"):
            await checked(with_database(database.dsn, name))
    finally:
        await raw.execute(f"DROP DATABASE {name} WITH (FORCE)")


# Locks.


@pytest.mark.requirement("Q7")
async def test_a_server_whose_locks_always_succeed_is_refused(database, raw):
    await raw.execute(f"""
        CREATE FUNCTION pg_try_advisory_lock(bigint) RETURNS boolean LANGUAGE sql AS 'SELECT true';
        ALTER DATABASE {database.name} SET search_path = public, pg_catalog""")
    with pytest.raises(ConfigError, match=r"^DL_DB_DSN: advisory locks do not work between sessions"):
        await checked(database.dsn)


@pytest.mark.requirement("Q7")
@pytest.mark.parametrize("size", [1, 2, 5])
async def test_a_pooler_that_gives_its_connections_out_in_turn_is_refused_for_locks(database, size):
    async with open_pooler(database.dsn, size=size, ignored=IGNORED) as pooler:
        with pytest.raises(ConfigError, match=r"^DL_DB_DSN: advisory locks do not work between sessions"):
            await checked(pooler.dsn)


@pytest.mark.slow
@pytest.mark.requirement("Q7")
@pytest.mark.parametrize("setting", ["DL_DB_DSN", "DL_DIRECT_DSN"])
async def test_pgbouncer_in_transaction_mode_is_refused_for_locks(database, bouncer, refused, setting):
    async with open_bouncer(database.dsn, size=5, ignored=IGNORED, program=bouncer, settings=OLD) as pooler:
        said = await refused(**{"DL_DB_DSN": database.dsn, setting: pooler.dsn})
    assert said.startswith(f"{setting}: advisory locks do not work between sessions")


@pytest.mark.slow
async def test_pgbouncer_in_session_mode_is_taken(database, bouncer):
    async with open_bouncer(
        database.dsn, size=9, ignored=IGNORED, program=bouncer, mode="session", settings=OLD
    ) as pooler:
        assert await checked(pooler.dsn) >= OLDEST
        assert await checked(pooler.dsn, database.dsn) >= OLDEST


# Statements.


async def test_a_pooler_that_does_not_keep_prepared_statements_is_refused(database, bouncer):
    off = "max_prepared_statements = 0" if find_bouncer()[0] else OLD
    async with open_bouncer(database.dsn, size=5, ignored=IGNORED, program=bouncer, settings=off) as pooler:
        with pytest.raises(ConfigError, match=r"^DL_DB_DSN: the pooler does not keep prepared statements; .* 1\.21 or"):
            await checked(pooler.dsn, database.dsn)


async def test_a_statement_that_a_pooler_has_lost_later_names_what_the_pooler_needs(database, bouncer):
    async def ask(connection):
        return await connection.fetchval("SELECT $1::int", 1)

    off = "max_prepared_statements = 0" if find_bouncer()[0] else OLD
    async with (
        open_bouncer(database.dsn, size=5, ignored=IGNORED, program=bouncer, settings=off) as pooler,
        open_database(DatabaseOptions(dsn=pooler.dsn)) as store,
    ):
        one, other = Session(store, "one"), Session(store, "other")
        await one.run(ask)
        await other.run(lambda connection: connection.execute("BEGIN"))
        with pytest.raises(StoreError, match=r"does not keep prepared statements .* use PgBouncer 1\.21 or later with"):
            await one.run(ask)
        await one.close()
        await other.close()


async def test_a_pooler_that_keeps_them_is_taken(database, new_bouncer):
    async with open_bouncer(database.dsn, size=5, ignored=IGNORED, program=new_bouncer) as pooler:
        assert await checked(pooler.dsn, database.dsn) >= OLDEST


async def test_a_pooler_of_ours_that_keeps_them_is_taken(database):
    async with open_pooler(database.dsn, size=2, ignored=IGNORED) as pooler:
        assert await checked(pooler.dsn, database.dsn) >= OLDEST


async def test_a_pooler_that_refuses_what_a_connection_asks_for_is_no_database_to_wait_for(database, bouncer):
    async with open_bouncer(database.dsn, size=5, ignored=frozenset({"jit"}), program=bouncer, settings=OLD) as pooler:
        with pytest.raises(ConfigError, match=r"^DL_DB_DSN: the pooler rejected the connection .*unsupported startup"):
            await checked(pooler.dsn, database.dsn)

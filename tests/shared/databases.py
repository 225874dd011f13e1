"""PostgreSQL for the tests: a server for each session, a database for each test.

conftest.py makes fixtures of these. Tests import `raw_connection` for SQL that must not use our store (statements of
another service, or checks of the test). Servers are started by plain subprocesses, outside Trio. Durability is switched
off, since these machines never crash; tests/store/embedded/test_postgres.py starts its own servers.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final, LiteralString, cast

import asyncpg
import attrs
import psycopg
import trio
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import ExecStatus

from dataloader.store.connection.bridge import open_database
from dataloader.store.connection.loop import Loop, open_loop
from dataloader.store.connection.options import DatabaseOptions
from dataloader.store.embedded.postgres import EmbeddedPostgres, embedded_postgres
from dataloader.store.migrations import function_set, migrate

EMBEDDED: Final = (16, 18)
"""Versions in the embedded package."""
SETTINGS: Final = {
    "fsync": "off",
    "full_page_writes": "off",
    "max_connections": "200",
    "shared_buffers": "64MB",
    "max_wal_size": "256MB",
    # A test that holds a transaction open by mistake fails instead of blocking all later tests.
    "idle_in_transaction_session_timeout": "60s",
    # The log line of a deadlock names its database.
    "log_line_prefix": "%m [%p] %d: ",
}
_numbers = itertools.count(1)


@attrs.frozen
class Database:
    """Database for one test."""

    name: str
    server: EmbeddedPostgres

    @property
    def dsn(self) -> str:
        return self.server.dsn_of(self.name)

    def psql(self, sql: str) -> str:
        """Run statements, each separately; return the rows as psql's unaligned text, without a final newline."""
        if ";" not in sql.strip().removesuffix(";"):
            return self._one_statement(sql)
        arguments, environment = self.server.psql("-XqAt", "-v", "ON_ERROR_STOP=1", database=self.name)
        result = subprocess.run(
            arguments, env=environment, input=sql, capture_output=True, text=True, check=False, timeout=60
        )
        assert result.returncode == 0, result.stderr
        return result.stdout.removesuffix("\n")

    def _one_statement(self, sql: str) -> str:
        # The same result as psql, whose start takes longer than most statements.
        with psycopg.connect(self.dsn, autocommit=True, options="-c statement_timeout=60s") as connection:
            result = connection.pgconn.exec_(sql.encode())
            assert result.status in {ExecStatus.COMMAND_OK, ExecStatus.TUPLES_OK, ExecStatus.EMPTY_QUERY}, (
                result.error_message.decode()
            )
            rows = [
                [result.get_value(row, column) for column in range(result.nfields)] for row in range(result.ntuples)
            ]
        return "\n".join("|".join((value or b"").decode() for value in row) for row in rows)

    def deadlocks(self) -> str:
        """Return the server's log lines about deadlocks in this database, with the statements involved."""
        log = self.server.log_path.read_text(errors="replace")
        report = rf"^.* {self.name}: .*deadlock detected\n(?:(?!.*(?:LOG|ERROR|FATAL): ).*\n)*"
        return "\n".join(re.findall(report, log, re.MULTILINE))


@attrs.define
class PostgresServer:
    """Server of one version, with the templates from which the tests' databases are copied."""

    embedded: EmbeddedPostgres
    _templates: dict[str, Database] = attrs.field(factory=dict)
    # Dropped when the next one is created: by then it has no sessions, and no drop has to wait (100 ms each).
    _done_with: list[Database] = attrs.field(factory=list)
    _connection: psycopg.Connection[Any] | None = None

    @property
    def version(self) -> int:
        return self.embedded.version

    @contextlib.contextmanager
    def database(self, template: str) -> Iterator[Database]:
        """Yield a fresh copy of the template `empty` or `migrated`, which is dropped later even if it has sessions."""
        database = self._create(_new_name(), self.template(template).name)
        try:
            yield database
        finally:
            self._done_with.append(database)

    def template(self, template: str) -> Database:
        """Return the template `empty` or `migrated`; create it if the server does not have it yet.

        Another process may have created it. The name of `migrated` has the hash of the schema's functions, so that a
        run that changes them gets its own.
        """
        if template not in self._templates:
            name = f"template_{template}" + (f"_{function_set.digest()[:16]}" if template == "migrated" else "")
            self._templates[template] = database = Database(name, self.embedded)
            if name not in self._databases():
                self._create_template(template, database)
        return self._templates[template]

    def _create_template(self, template: str, database: Database) -> None:
        # It gets its name when it is complete.
        unnamed = self._create(_new_name(), "template0")
        try:
            if template == "migrated":
                trio.run(migrate_template, unnamed.dsn)
        except BaseException:
            self._administer(_dropped(unnamed))
            raise
        self._administer(f"alter database {unnamed.name} rename to {database.name}")

    def drop_all_but_templates(self) -> None:
        """Drop the databases of other processes on this server. Their sessions end."""
        self._done_with.clear()
        kept = {database.name for database in self._templates.values()}
        others = [Database(name, self.embedded) for name in self._databases() if name not in kept]
        self._administer(*map(_dropped, others))

    def _databases(self) -> list[str]:
        """Return the names of the tests' databases."""
        rows = self._connected().execute("select datname from pg_database where datname ~ '^(test|template)_'")
        return [name for (name,) in rows]

    def _create(self, name: str, template: str) -> Database:
        # Copying files (a reflink where the file system can) is faster than writing each page to the log.
        clone = ["set file_copy_method = clone"] if self.version >= 18 else []
        copy = f"create database {name} template {template} strategy file_copy"
        self._administer(*clone, copy, *map(_dropped, self._done_with))
        self._done_with.clear()
        return Database(name, self.embedded)

    def _administer(self, *statements: str) -> None:
        for statement in statements:
            self._connected().execute(cast("LiteralString", statement))

    def _connected(self) -> psycopg.Connection[Any]:
        # One connection for all: to start psql takes as long as the copy.
        if self._connection is None:
            self._connection = psycopg.connect(self.embedded.dsn_of("postgres"), autocommit=True)
        return self._connection

    def shorten_logins(self) -> None:
        """Hash the password once instead of 4,096 times. Both sides of each connection then save a millisecond."""
        password = conninfo_to_dict(self.embedded.dsn_of("postgres"))["password"]
        change = sql.SQL("ALTER ROLE postgres PASSWORD {}").format(sql.Literal(password))
        self._administer("SET scram_iterations = 1", change.as_string())

    def close(self) -> None:
        """Close the connection to the server."""
        if self._connection:
            self._connection.close()


async def migrate_template(dsn: str) -> None:
    """Migrate the template to the current schema."""
    async with open_database(DatabaseOptions(dsn=dsn)) as database:
        await migrate(database)


def programs_of(version: int) -> Path | None:
    """Return the folder of this version's programs.

    `POSTGRES_BIN_15` or Debian's package; None for the embedded ones.
    """
    if version in EMBEDDED:
        return None
    return Path(os.environ.get(f"POSTGRES_BIN_{version}", f"/usr/lib/postgresql/{version}/bin"))


def is_at_hand(version: int) -> bool:
    """Return True if programs of this version exist."""
    programs = programs_of(version)
    return programs is None or (programs / "initdb").exists()


@contextlib.contextmanager
def postgres_server(version: int, data_dir: Path) -> Iterator[PostgresServer]:
    """Run a server without durability in `data_dir` for the duration of a block. A running one is joined."""
    programs = programs_of(version)
    with (
        embedded_postgres(data_dir, version=version, extra_settings=SETTINGS, bin_dir=programs) as embedded,
        contextlib.closing(PostgresServer(embedded)) as server,
    ):
        if version >= 16:
            server.shorten_logins()
        yield server


def _new_name() -> str:
    # Several processes may use one server.
    return f"test_{os.getpid()}_{next(_numbers)}"


def _dropped(database: Database) -> str:
    return f"drop database {database.name} with (force)"


@attrs.frozen
class RawConnection:
    """asyncpg connection for Trio tests: the same methods, awaited from Trio."""

    asyncpg: asyncpg.Connection[Any]
    _loop: Loop

    async def execute(self, sql: str, *args: object) -> str:
        return await self._cross(self.asyncpg.execute, sql, *args)

    async def fetch(self, sql: str, *args: object) -> list[asyncpg.Record]:
        return await self._cross(self.asyncpg.fetch, sql, *args)

    async def fetchrow(self, sql: str, *args: object) -> asyncpg.Record | None:
        return await self._cross(self.asyncpg.fetchrow, sql, *args)

    async def fetchval(self, sql: str, *args: object) -> Any:
        return await self._cross(self.asyncpg.fetchval, sql, *args)

    async def run(self, operation: Any, *args: object) -> Any:
        """Run an asyncio operation with the connection as its first argument."""
        return await self._cross(operation, self.asyncpg, *args)

    async def _cross(self, operation: Any, *args: object) -> Any:
        return await self._loop.run(operation, *args)


@contextlib.asynccontextmanager
async def raw_connection(dsn: str) -> AsyncIterator[RawConnection]:
    """Open a connection outside our store, on a separate asyncio loop, isolated from other connections."""
    async with open_loop() as loop:
        connection = await loop.run(_connected, dsn)
        try:
            yield RawConnection(connection, loop)
        finally:
            with trio.move_on_after(5, shield=True):
                await loop.run(connection.close, timeout=3)


async def _connected(dsn: str) -> asyncpg.Connection[Any]:
    return await asyncpg.connect(dsn, timeout=10, command_timeout=30)

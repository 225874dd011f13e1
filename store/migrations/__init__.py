"""Brings a database to the schema that this version needs: numbered SQL files, each once, under an advisory lock.

`serve` calls `migrate` at its start, `dataloader migrate` by hand, `--sql` prints what the owner of the tables should
run when that is somebody else (`render`). A file is one transaction, unless its first line says `-- outside a
transaction`: then its statements run one by one, each may be repeated after an interruption, and `-- repeat while rows
change` marks a back-fill. Statements wait two seconds for a lock and try again, so that a waiting ALTER never holds up
everybody's heartbeats; but an index that is built concurrently holds up nobody, and waits for all older transactions.

Rejected: alembic (brings SQLAlchemy; our files are plain SQL that an owner can read and run).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from importlib.resources import files
from typing import Any, Final

import asyncpg
import attrs

from dataloader.jobs.errors import SchemaError
from dataloader.store.database import Database, connect

LOCK_KEY: Final = 0x646C_6D69_6772
"""The advisory lock of migrations: 'dlmigr'."""
LOCK_TRIES: Final = 30
LOCK_TIMEOUT: Final = "2s"
_LEDGER: Final = """CREATE TABLE IF NOT EXISTS dl_migrations (
  number int PRIMARY KEY,
  name text NOT NULL,
  applied_at timestamptz NOT NULL DEFAULT now()
)"""
_INDEX: Final = re.compile(r"CREATE INDEX CONCURRENTLY IF NOT EXISTS (\w+)")


@attrs.frozen
class Migration:
    """One file: its number, its name and its SQL, with `{schema}` to be filled in."""

    number: int
    name: str
    sql: str

    @property
    def full_name(self) -> str:
        """Number and name."""
        return f"{self.number:04} {self.name}"

    @property
    def is_transactional(self) -> bool:
        """False when its statements run one by one."""
        return not self.sql.startswith("-- outside a transaction")

    def statements(self) -> Iterator[tuple[str, bool]]:
        """The statements of a file outside a transaction, each with whether it is repeated while it changes rows."""
        for part in self.sql.split(";\n"):
            code = "\n".join(line for line in part.splitlines() if line and not line.startswith("--"))
            if code:
                yield code, "-- repeat while rows change" in part


def migrations() -> list[Migration]:
    """All of them, in order."""
    found = []
    for entry in files(__package__).iterdir():
        match = re.fullmatch(r"(\d{4})_(\w+)\.sql", entry.name)
        if match:
            found.append(Migration(int(match[1]), match[2], entry.read_text()))
    return sorted(found, key=lambda migration: migration.number)


LATEST: Final = len(migrations())
_INDEXES: Final = [name for migration in migrations() for name in _INDEX.findall(migration.sql)]
"""Those that are built concurrently, so that an interruption can leave half of one."""
_DROP_HALF: Final = """SELECT 'DROP INDEX CONCURRENTLY {name}' FROM pg_index
WHERE indexrelid = to_regclass('{name}') AND NOT indisvalid \\gexec"""


def render() -> str:
    """Every migration as one script for psql, for tables whose owner is not our role (run in the tables' schema)."""
    parts = [
        "-- The schema of the dataloader queue; run with psql as the owner of the tables.",
        "\\set ON_ERROR_STOP on",
        "SELECT quote_ident(current_schema()) AS schema \\gset",
        f"{_LEDGER};",
    ]
    for migration in migrations():
        parts.append(f"\n-- {migration.full_name}")
        sql = migration.sql.replace("{schema}", ":schema").strip()
        parts.append(f"BEGIN;\n{sql}\nCOMMIT;" if migration.is_transactional else "\n".join(_lines_of(migration)))
        # The values are the file's own name: digits and word characters.
        ledger = f"INSERT INTO dl_migrations (number, name) VALUES ({migration.number}, '{migration.name}')"
        parts.append(f"{ledger} ON CONFLICT DO NOTHING;")
    return "\n".join(parts) + "\n"


def _lines_of(migration: Migration) -> Iterator[str]:
    """The statements of a file outside a transaction, as psql runs them: also a second time, after an interruption."""
    for statement, repeated in migration.statements():
        sql = statement.removesuffix(";")
        if index := _INDEX.match(sql):
            yield _DROP_HALF.format(name=index[1])
        if repeated:
            yield f"DO $$ BEGIN LOOP\n{sql};\nEXIT WHEN NOT FOUND;\nCOMMIT;\nEND LOOP; END $$;"
        else:
            yield f"{sql};"


async def migrate(database: Database, *, tell: Callable[[str], object] | None = None) -> list[str]:
    """Apply what is missing; the names of the files applied come back. Safe to call from many processes at once.

    `tell` hears of each before it is applied, which may take long.

    Raises `SchemaError` when the database is newer than this program, or its tables belong to another role.
    """
    return await database.crossing.run(_aio_migrate, database, tell)


async def check(database: Database) -> None:
    """Raise `SchemaError` when a migration is missing or half done, for processes that were told not to migrate."""
    number = await database.run(_aio_number)
    if number == LATEST and await database.run(_aio_invalid):
        raise SchemaError("an index of the queue was left half made by an interruption; run `dataloader migrate`")
    if number < LATEST:
        message = f"the database's schema is at {number}, this version needs {LATEST}; run `dataloader migrate`"
        raise SchemaError(message)


async def _aio_number(connection: asyncpg.Connection[Any]) -> int:
    if await connection.fetchval("SELECT to_regclass('dl_migrations')") is None:
        return 0
    return int(await connection.fetchval("SELECT coalesce(max(number), 0) FROM dl_migrations"))


async def _aio_invalid(connection: asyncpg.Connection[Any]) -> bool:
    """Whether one of our own indexes was left half made; somebody else's is their affair."""
    return bool(
        await connection.fetchval(
            "SELECT count(*) FROM pg_index JOIN unnest($1::text[]) AS name ON indexrelid = to_regclass(name)"
            " WHERE NOT indisvalid",
            _INDEXES,
        )
    )


async def _aio_migrate(database: Database, tell: Callable[[str], object] | None) -> list[str]:
    connection = await connect(database.options, direct=True, role="migrate", planner={})
    try:
        # A back-fill or an index of a large table takes as long as it takes.
        await connection.execute(f"SET statement_timeout = 0; SET lock_timeout = '{LOCK_TIMEOUT}'")
        number = await _aio_number(connection)
        if number > LATEST:
            message = f"the database's schema is at {number}, newer than this version ({LATEST}); upgrade dataloader"
            raise SchemaError(message)
        if number == LATEST and not await _aio_invalid(connection):
            return []
        # Asked again and again: a session that waits for the lock inside the server would hold up another's
        # CONCURRENTLY.
        while not await connection.fetchval("SELECT pg_try_advisory_lock($1)", LOCK_KEY):  # noqa: ASYNC110
            await asyncio.sleep(0.2)
        await connection.execute(_LEDGER)
        number = await _aio_number(connection)
        # What runs outside a transaction may be repeated, and has to be when an interruption left half an index.
        broken = await _aio_invalid(connection)
        missing = [m for m in migrations() if m.number > number or (broken and not m.is_transactional)]
        schema = await connection.fetchval("SELECT quote_ident(current_schema())")
        for migration in missing:
            if tell is not None:
                tell(migration.full_name)
            try:
                await _aio_apply(connection, migration, schema)
            except asyncpg.InsufficientPrivilegeError as error:
                message = (
                    f"migration {migration.full_name} was refused ({error}): the tables belong to another role. "
                    "Let their owner run the output of `dataloader migrate --sql`, then start again"
                )
                raise SchemaError(message) from error
        return [migration.full_name for migration in missing]
    finally:
        connection.terminate()


async def _aio_apply(connection: asyncpg.Connection[Any], migration: Migration, schema: str) -> None:
    if migration.is_transactional:
        sql = migration.sql.replace("{schema}", schema)
        await _aio_patiently(connection, sql, transaction=True)
    else:
        for statement, repeated in migration.statements():
            tag = await _aio_patiently(connection, statement)
            while repeated and not tag.endswith(" 0"):
                tag = await _aio_patiently(connection, statement)
    await connection.execute(
        "INSERT INTO dl_migrations (number, name) VALUES ($1, $2) ON CONFLICT DO NOTHING",
        migration.number,
        migration.name,
    )


async def _aio_patiently(connection: asyncpg.Connection[Any], sql: str, *, transaction: bool = False) -> str:
    """Run `sql`, again after each lock timeout, with a pause in which the others get their turn."""
    index = _INDEX.match(sql)
    for attempt in range(LOCK_TRIES):
        if index is not None:
            await _aio_drop_invalid(connection, index[1])
        try:
            # Whoever waits for its turn with a concurrent index begins anew after each timeout, and is never done where
            # some transaction is always older than two seconds.
            waits = not transaction and " CONCURRENTLY " in sql
            await connection.execute(f"SET lock_timeout = '{'0' if waits else LOCK_TIMEOUT}'")
            if transaction:
                async with connection.transaction():
                    return await connection.execute(sql, timeout=3600)
            return await connection.execute(sql, timeout=86_400)
        except (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError):
            if attempt == LOCK_TRIES - 1:
                raise
            await asyncio.sleep(0.5)
    raise AssertionError  # pragma: no cover - the loop returns or raises


async def _aio_drop_invalid(connection: asyncpg.Connection[Any], name: str) -> None:
    """An interrupted CREATE INDEX CONCURRENTLY leaves an index that serves nobody and must be made again."""
    invalid = await connection.fetchval(
        "SELECT true FROM pg_index WHERE indexrelid = to_regclass($1) AND NOT indisvalid", name
    )
    if invalid:
        await _aio_patiently(connection, f"DROP INDEX CONCURRENTLY IF EXISTS {name}")

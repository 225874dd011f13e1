"""Migration of a database to the schema of this version: numbered SQL files, and the functions as a set.

`serve` calls `migrate` when it starts, and so does `dataloader migrate`. `dataloader migrate --sql` prints the script
for the owner of the tables, if that is another role (`render`). Everything runs under an advisory lock, in this order:

1. the files that are one transaction each;
2. the functions and triggers, in one transaction (function_set.py);
3. the files whose first line is `-- outside a transaction`: back-fills, and indexes that are built concurrently.

The statements of step 3 run one by one, and each can be repeated after an interruption. `-- repeat while rows change`
marks a back-fill. It runs after the triggers exist, which fill the rows that are written meanwhile.

A file never changes after its release. If older programs cannot work with it, it has a line `-- oldest program: NNNN`
with the number of the last file that a program must know to work with this one. An older program changes nothing in a
newer database: it continues, or refuses to start if the files or the functions require a newer program.

A database from before the first release is converted first (conversion.py).

Statements wait two seconds for a lock and then try again, so that a waiting ALTER never blocks all heartbeats. An index
that is built concurrently has no such limit: it blocks no other session, and must wait for all older transactions.

Alembic was rejected: it requires SQLAlchemy, and an owner can read and run plain SQL files.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Iterator
from importlib.resources import files
from typing import Any, Final

import asyncpg
import attrs

from dataloader.jobs.errors import SchemaError, StoreUnavailable
from dataloader.jobs.logger import get_logger
from dataloader.store.connection.bridge import Database
from dataloader.store.connection.command_tag import row_count
from dataloader.store.connection.connect import connect
from dataloader.store.connection.driver_errors import missing_right, said
from dataloader.store.connection.error_meanings import LOCKED, NO_RIGHT, ROLLED_BACK
from dataloader.store.migrations import conversion, function_set
from dataloader.store.migrations.lock import aio_lock, aio_who_migrates

log = get_logger(__name__)

LOCK_TRIES: Final = 30
LOCK_TIMEOUT: Final = "2s"
_LEDGERS: Final = """CREATE TABLE IF NOT EXISTS dl_migrations (
  number int PRIMARY KEY,
  name text NOT NULL,
  applied_at timestamptz NOT NULL DEFAULT now(),
  oldest int NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS dl_function_sets (
  number int PRIMARY KEY,
  hash text NOT NULL,
  oldest int NOT NULL DEFAULT 0,
  applied_at timestamptz NOT NULL DEFAULT now()
)"""
_OLDEST: Final = re.compile(r"^-- oldest program: (\d{4})$", re.MULTILINE)
_INDEX: Final = re.compile(r"CREATE (?:UNIQUE )?INDEX CONCURRENTLY IF NOT EXISTS (?P<name>\w+)")
_PLAIN_SCHEMA: Final = re.compile(r"\w+|\"[^'\"$%\\{}:]+\"")


@attrs.frozen
class Migration:
    """Migration file: its number, its name and its SQL."""

    number: int
    name: str
    sql: str

    @property
    def full_name(self) -> str:
        """Number and name."""
        return f"{self.number:04} {self.name}"

    @property
    def is_transactional(self) -> bool:
        """Whether the file is one transaction; otherwise its statements run one by one."""
        return not self.sql.startswith("-- outside a transaction")

    @property
    def oldest(self) -> int:
        """Number of the last file that a program must know to work with this one; 0 if every program can."""
        match = _OLDEST.search(self.sql)
        return int(match[1]) if match else 0

    @property
    def note(self) -> str:
        """Statement that records the file; number and name consist of digits and word characters and need no quotes."""
        return (
            f"INSERT INTO dl_migrations (number, name, oldest) VALUES ({self.number}, '{self.name}', {self.oldest})"
            " ON CONFLICT DO NOTHING"
        )

    def statements(self) -> Iterator[tuple[str, bool]]:
        """Yield the statements of the file; True for one that is repeated until it changes no row."""
        for part in self.sql.split(";\n"):
            code = "\n".join(line for line in part.splitlines() if line and not line.startswith("--"))
            if code:
                yield code, "-- repeat while rows change" in part


def migrations() -> list[Migration]:
    """Return all migrations in the order of their numbers, which may have gaps."""
    found = []
    for entry in files(__package__).iterdir():
        match = re.fullmatch(r"(\d{4})_(\w+)\.sql", entry.name)
        if match:
            found.append(Migration(int(match[1]), match[2], entry.read_text()))
    return sorted(found, key=lambda migration: migration.number)


LATEST: Final = max(migration.number for migration in migrations())
_INDEXES: Final = [name for migration in migrations() for name in _INDEX.findall(migration.sql)]
"""Indexes that are built concurrently; an interruption can leave one of them invalid."""
_CONVERSION: Final = conversion.conversion_script(
    [migration.note for migration in migrations() if migration.number <= conversion.CONVERTED_TO]
)
_DROP_HALF: Final = """SELECT 'DROP INDEX CONCURRENTLY {name}' FROM pg_index
WHERE indexrelid = to_regclass('{name}') AND NOT indisvalid \\gexec"""


def render() -> str:
    """Return everything as one script for psql, for the owner of the tables if that is another role than ours."""
    parts = [
        "-- The schema of the dataloader queue; run with psql as the owner of the tables.",
        "\\set ON_ERROR_STOP on",
        "SELECT quote_ident(current_schema()) AS schema \\gset",
        f"{_LEDGERS};",
        f"\n-- {conversion.NAME.capitalize()}.\n{_CONVERSION};",
    ]
    at_once = [migration for migration in migrations() if migration.is_transactional]
    one_by_one = [migration for migration in migrations() if not migration.is_transactional]
    parts.extend(f"\n-- {one.full_name}\nBEGIN;\n{one.sql.strip()}\n{one.note};\nCOMMIT;" for one in at_once)
    parts.append(
        "\n-- Functions and triggers, unless newer ones are there.\nBEGIN;\n"
        f"SELECT replace($script${function_set.script()}$script$, '{{schema}}', :'schema')\n"
        f"WHERE NOT EXISTS (SELECT FROM dl_function_sets WHERE number > {function_set.NUMBER}) \\gexec\nCOMMIT;"
    )
    parts.extend("\n".join((f"\n-- {one.full_name}", *_lines_of(one), f"{one.note};")) for one in one_by_one)
    return "\n".join(parts) + "\n"


def _lines_of(migration: Migration) -> Iterator[str]:
    """Return the statements of a file outside a transaction as psql runs them, also again after an interruption."""
    for statement, repeated in migration.statements():
        sql = statement.removesuffix(";")
        if index := _INDEX.match(sql):
            yield _DROP_HALF.format(name=index["name"])
        if repeated:
            yield f"DO $$ BEGIN LOOP\n{sql};\nEXIT WHEN NOT FOUND;\nCOMMIT;\nEND LOOP; END $$;"
        else:
            yield f"{sql};"


@attrs.frozen
class _State:
    """Files of a database (names by numbers), number of its functions, and the oldest programs that they allow."""

    files: dict[int, str]
    oldest: int
    functions: int
    functions_hash: str
    functions_oldest: int
    has_half_an_index: bool
    schema: str | None
    anybody_creates: bool
    role: str

    @property
    def file(self) -> int:
        return max(self.files, default=0)

    @property
    def is_former(self) -> bool:
        return conversion.is_former(self.files)

    @property
    def lacks_functions(self) -> bool:
        return self.functions < function_set.NUMBER or (
            self.functions == function_set.NUMBER and self.functions_hash != function_set.digest()
        )

    def missing(self) -> list[Migration]:
        """Return the files to apply; none if the tables are newer than this program's files.

        All files outside a transaction are applied again if an index is invalid.
        """
        if self.file > LATEST:
            return []
        return [
            migration
            for migration in migrations()
            if migration.number not in self.files or (self.has_half_an_index and not migration.is_transactional)
        ]

    def goes_with_this_program(self) -> bool:
        """Return whether nothing has to be applied. Raises `SchemaError` if the schema is too new for this program."""
        if self.oldest > LATEST or self.functions_oldest > function_set.NUMBER:
            message = f"the database's schema is at {self}, too new for this version ({_OURS}); upgrade dataloader"
            raise SchemaError(message)
        if self.is_former:
            conversion.check_convertible(self.files, str(self))
            return False
        return not self.missing() and not self.lacks_functions

    def warnings(self) -> Iterator[str]:
        """Return sentences that the operator of the database should read."""
        if self.file > LATEST or self.functions > function_set.NUMBER:
            yield f"the database's schema is at {self}, newer than this version ({_OURS}), which remains compatible"
        if self.anybody_creates:
            yield (
                f"all roles may create functions in the schema {self.schema}, which could then run with the rights of "
                f"this role; the schema's owner should run: REVOKE CREATE ON SCHEMA {self.schema} FROM PUBLIC"
            )

    def __str__(self) -> str:
        before = ", from before the first release" if self.is_former else ""
        return f"{_place_of_schema(self.file, self.functions)}{before}"


def _place_of_schema(file: int, functions: int) -> str:
    return f"{file:04} with functions {functions}"


_OURS: Final = _place_of_schema(LATEST, function_set.NUMBER)


async def migrate(
    database: Database,
    *,
    tell: Callable[[str], object] | None = None,
    warn: Callable[[str], object] = log.warning,
    wait_s: float = math.inf,
) -> list[str]:
    """Apply the missing files and functions; return their names. Many processes may call this concurrently.

    A newer database stays as it is.

    Args:
        database: the database that has, or will have, the tables.
        tell: called with the name of each migration before it is applied, which may take long.
        warn: called with a sentence on everything that the operator should change, and, once a minute, on a wait.
        wait_s: seconds to wait for the migration of another process.

    Raises:
        SchemaError: the database is newer than this program can work with, or its tables belong to another role.
        StoreUnavailable: another process still migrates after `wait_s`, or the database does not answer.
    """
    applied, state = await database.crossing.run(_aio_migrate, database, tell, warn, wait_s)
    for warning in state.warnings():
        warn(warning)
    return applied


async def schema_place(database: Database) -> str:
    """Return the newest migration and the number of the functions that the database has, for a message."""
    return str(await database.run(_aio_schema_state))


async def check(database: Database) -> None:
    """Check whether the schema is complete, for processes that must not migrate (`DL_MIGRATE`).

    Raises:
        SchemaError: a part is missing or incomplete.
        StoreUnavailable: the same, but another session is migrating; or the database does not answer.
    """
    who, state = await database.run(_aio_checked)
    if state.goes_with_this_program():
        for warning in state.warnings():
            log.warning(warning)
        return
    if who is not None:
        raise StoreUnavailable(f"{who} is migrating the schema; wait until it ends")
    _fit(state.schema)
    if state.has_half_an_index:
        raise SchemaError("an index of the queue is invalid after an interruption; run `dataloader migrate`")
    raise SchemaError(f"the database's schema is at {state}, but this version needs {_OURS}; run `dataloader migrate`")


async def _aio_checked(connection: asyncpg.Connection[Any]) -> tuple[str | None, _State]:
    # In this order: if a migration ends between the two reads, the second one finds its result.
    return await aio_who_migrates(connection, _INDEXES), await _aio_schema_state(connection)


async def _aio_schema_state(connection: asyncpg.Connection[Any]) -> _State:
    known: dict[int, str] = {}
    oldest, functions = 0, None
    if await connection.fetchval("SELECT to_regclass('dl_migrations')") is not None:
        # Some databases from before the first release have no column `oldest`.
        rows = await connection.fetch(
            "SELECT number, name, (to_jsonb(m) ->> 'oldest')::int AS oldest FROM dl_migrations m"
        )
        known = {row["number"]: row["name"] for row in rows}
        oldest = max((row["oldest"] or 0 for row in rows), default=0)
    if await connection.fetchval("SELECT to_regclass('dl_function_sets')") is not None:
        functions = await connection.fetchrow("SELECT * FROM dl_function_sets ORDER BY number DESC LIMIT 1")
    # Only our own indexes count.
    half = await connection.fetchval(
        "SELECT count(*) FROM pg_index JOIN unnest($1::text[]) AS name ON indexrelid = to_regclass(name)"
        " WHERE NOT indisvalid",
        _INDEXES,
    )
    schema: Any = await connection.fetchrow(
        "SELECT quote_ident(current_schema()) AS name, quote_ident(current_user) AS role,"
        " coalesce(has_schema_privilege('public', current_schema(), 'CREATE'), false) AS is_open"
    )
    return _State(
        files=known,
        oldest=oldest,
        functions=functions["number"] if functions else 0,
        functions_hash=functions["hash"] if functions else "",
        functions_oldest=functions["oldest"] if functions else 0,
        has_half_an_index=half > 0,
        schema=schema["name"],
        anybody_creates=schema["is_open"],
        role=schema["role"],
    )


async def _aio_migrate(
    database: Database, tell: Callable[[str], object] | None, warn: Callable[[str], object], wait_s: float
) -> tuple[list[str], _State]:
    connection = await connect(database.options, direct=True, role="migrate", planner={})
    try:
        # A back-fill or an index of a large table has no time limit.
        await connection.execute(f"SET statement_timeout = 0; SET lock_timeout = '{LOCK_TIMEOUT}'")
        state = await _aio_schema_state(connection)
        if state.goes_with_this_program():
            return [], state
        await aio_lock(connection, wait_s=wait_s, warn=warn)
        state = await _aio_schema_state(connection)
        if state.goes_with_this_program():
            return [], state
        applied: list[str] = []

        def begin(name: str) -> None:
            applied.append(name)
            if tell is not None:
                tell(name)

        try:
            if state.is_former:
                begin(conversion.NAME)
                await _aio_patiently(connection, _CONVERSION, transaction=True)
                state = await _aio_schema_state(connection)
            await _aio_apply_missing(connection, state, begin)
        except NO_RIGHT as error:
            first = "an upgrade of the schema" if state.files else "the first migration"
            at = f"migration {applied[-1]}" if applied else first
            # Changes of existing tables need their owner, even if the role has other rights in the schema.
            if "for schema" in str(error) and not state.files:
                raise SchemaError(f"{at} was refused: {missing_right(said(error), state.role)}") from error
            message = (
                f"{at} was refused ({error}): the tables do not belong to the role {state.role}. Let their owner run "
                "the output of `dataloader migrate --sql`, then start again"
            )
            raise SchemaError(message) from error
        return applied, await _aio_schema_state(connection)
    finally:
        connection.terminate()


async def _aio_apply_missing(connection: asyncpg.Connection[Any], state: _State, begin: Callable[[str], None]) -> None:
    schema = _fit(state.schema)
    await _aio_patiently(connection, _LEDGERS, transaction=True)
    missing = state.missing()
    for migration in missing:
        if migration.is_transactional:
            begin(migration.full_name)
            await _aio_patiently(connection, f"{migration.sql};\n{migration.note}", transaction=True)
    if state.lacks_functions:
        begin(f"functions {function_set.NUMBER}")
        await _aio_patiently(connection, function_set.script().replace("{schema}", schema), transaction=True)
    for migration in missing:
        if not migration.is_transactional:
            begin(migration.full_name)
            await _aio_one_by_one(connection, migration)


async def _aio_one_by_one(connection: asyncpg.Connection[Any], migration: Migration) -> None:
    for statement, repeated in migration.statements():
        tag = await _aio_patiently(connection, statement)
        while repeated and row_count(tag):
            tag = await _aio_patiently(connection, statement)
    await connection.execute(migration.note)


def _fit(schema: str | None) -> str:
    """Return the name of the schema of the tables, existing or new, quoted if necessary, for the functions' text."""
    if schema is None:
        raise SchemaError(
            "the role's search_path names no schema that exists and that it may use; create one, or GRANT USAGE on it"
        )
    if not _PLAIN_SCHEMA.fullmatch(schema):
        raise SchemaError(f"the schema's name {schema} must not contain any of ' \" $ % \\ {{ }} :; use another schema")
    return schema


async def _aio_patiently(connection: asyncpg.Connection[Any], sql: str, *, transaction: bool = False) -> str:
    """Run `sql`, and again after each lock timeout, with a pause in which other sessions can take the lock."""
    index = _INDEX.match(sql)
    for attempt in range(LOCK_TRIES):
        if index is not None:
            await _aio_drop_invalid(connection, index["name"])
        try:
            # A concurrent index build would begin again after each timeout, and never finish where some transaction is
            # always older than two seconds.
            waits = not transaction and " CONCURRENTLY " in sql
            await connection.execute(f"SET lock_timeout = '{'0' if waits else LOCK_TIMEOUT}'")
            if transaction:
                async with connection.transaction():
                    return await connection.execute(sql, timeout=3600)
            return await connection.execute(sql, timeout=86_400)
        except (LOCKED, *ROLLED_BACK):
            if attempt == LOCK_TRIES - 1:
                raise
            await asyncio.sleep(0.5)
    raise AssertionError  # pragma: no cover - the loop returns or raises


async def _aio_drop_invalid(connection: asyncpg.Connection[Any], name: str) -> None:
    """Drop the invalid index that an interrupted CREATE INDEX CONCURRENTLY has left, so that it can be built again."""
    invalid = await connection.fetchval(
        "SELECT true FROM pg_index WHERE indexrelid = to_regclass($1) AND NOT indisvalid", name
    )
    if invalid:
        await _aio_patiently(connection, f"DROP INDEX CONCURRENTLY IF EXISTS {name}")

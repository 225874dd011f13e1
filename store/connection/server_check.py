"""Checks at the start of a process whether the server, and the connection to it, can support a queue.

If not, the process ends with a one-line error. Two things look like PostgreSQL but break the queue. One is a server
whose advisory locks always succeed. The other is a pooler in transaction mode, which gives a session's locks and
prepared statements to the connection's next client. With either, two jobs of one `lock_key` would run concurrently
without any error. The server's version is checked for every connection (connect.py).
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from dataloader.jobs.errors import AccessDenied, ConfigError
from dataloader.store.connection.bridge import Database, aio_close
from dataloader.store.connection.connect import connect, setting_of
from dataloader.store.connection.error_meanings import LOST_STATEMENTS
from dataloader.store.connection.options import DatabaseOptions

TESTED: Final = 18
"""Newest major version of PostgreSQL that the tests run on."""
MOST_IDLE: Final = 5
"""Maximum number of idle server connections of a pooler for which the check works: it may use them in rotation."""
SECOND_CONNECTION_S: Final = 2.0
"""Seconds in which a pooler must give a statement a second connection."""

_LOCK: Final = "SELECT pg_try_advisory_lock($1) AS got, pg_backend_pid() AS pid"
_HOLDS: Final = """
SELECT pg_backend_pid() AS pid, EXISTS (
  SELECT FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid() AND objsubid = 1
    AND classid::bigint << 32 | objid::bigint = $1) AS holds
"""
_DATABASE: Final = """
SELECT oid, datname AS name, pg_postmaster_start_time() AS server FROM pg_database WHERE datname = current_database()
"""
"""Query that identifies a database by columns that every role may read."""
_PID: Final = "SELECT pg_backend_pid()"


async def check_server(database: Database) -> int:
    """Check the server and the connection to it; return its major version.

    Raises:
        ConfigError: it cannot support a queue, or refuses the connection; the text names the setting.
        StoreUnavailable: it does not answer now.
    """
    try:
        return await database.crossing.run(_aio_check, database.options)
    except AccessDenied as error:
        raise ConfigError(str(error)) from error


async def _aio_check(options: DatabaseOptions) -> int:
    async with _aio_open_for_check(options, direct=True) as session:
        try:
            excludes = await _aio_excludes(session, options)
        except LOST_STATEMENTS:  # a pooler that loses a session's statements loses its locks, too
            excludes = False
        if not excludes:
            raise ConfigError(
                f"{setting_of(options, direct=True)}: advisory locks do not work between sessions, but lock_key"
                " needs them; connect directly to PostgreSQL, not through a pooler in transaction mode"
            )
        encoding = await session.fetchval("SHOW server_encoding")
        if encoding != "UTF8":
            raise ConfigError(
                f"{setting_of(options, direct=True)}: the database's encoding is {encoding}, but must be UTF8;"
                " create the database with ENCODING 'UTF8' TEMPLATE template0"
            )
        version = int(session.get_server_version().major)
        database = await session.fetchrow(_DATABASE)
    if options.has_pooler:
        try:
            async with _aio_open_for_check(options, direct=False) as session:
                await _aio_use_statement(session, options)
                other = await session.fetchrow(_DATABASE)
        except LOST_STATEMENTS as error:
            raise ConfigError(
                f"{setting_of(options, direct=False)}: the pooler does not keep prepared statements; use PgBouncer 1.21"
                " or later with max_prepared_statements of 100 or more"
            ) from error
        if other != database:
            raise ConfigError(
                f"DL_DIRECT_DSN: refers to the database {database['name']!r}, and DL_DB_DSN to {other['name']!r} or"
                " another server; both must refer to the same database"
            )
    return version


async def _aio_excludes(session: Any, options: DatabaseOptions) -> bool:
    """Return whether an advisory lock excludes other sessions, and stays with its session after the transaction."""
    key = secrets.randbits(62)
    mine = await session.fetchrow(_LOCK, key)
    for _ in range(_looks(session, mine["pid"])):
        async with _aio_open_for_check(options, direct=True) as other:
            # While this transaction is open, a pooler must give the first session's next statement another connection.
            await other.execute("BEGIN")
            theirs: Any = await other.fetchrow(_LOCK, key)
            if theirs["got"] or theirs["pid"] == mine["pid"]:
                return False
    after = await session.fetchrow(_HOLDS, key)
    return bool(mine["got"] and after["holds"] and after["pid"] == mine["pid"])


async def _aio_use_statement(session: Any, options: DatabaseOptions) -> None:
    """Use a prepared statement on another server connection than it was prepared on, if there is one."""
    statement = await session.prepare(_PID)
    pid = await statement.fetchval()
    for _ in range(_looks(session, pid) - 1):
        async with _aio_open_for_check(options, direct=False) as other:
            await other.execute("BEGIN")
            if await other.fetchval(_PID) == pid:
                # A pooler with a single connection would wait for it; then no statement can be lost.
                with contextlib.suppress(TimeoutError):
                    await statement.fetchval(timeout=SECOND_CONNECTION_S)
                return


def _looks(session: Any, pid: int) -> int:
    """Return the number of other sessions to try: if the PID differs from the server's, there is a pooler between."""
    return 1 if session.get_server_pid() == pid else MOST_IDLE


@asynccontextmanager
async def _aio_open_for_check(options: DatabaseOptions, *, direct: bool) -> AsyncIterator[Any]:
    connection = await connect(options, direct=direct, role="check")
    try:
        yield connection
    finally:
        await aio_close(connection)  # noqa: ASYNC102 - asyncio's, and it has its own bound

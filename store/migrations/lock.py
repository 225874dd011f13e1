"""The lock for changes of the schema: its holder, and the wait for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final

import asyncpg

from dataloader.jobs.errors import StoreUnavailable

KEY: Final = 0x646C_6D69_6772
"""Advisory lock of migrations: 'dlmigr'."""
TELL_AFTER_S: Final = 5.0
TELL_EVERY_S: Final = 60.0

# An owner's script builds indexes without the lock. Roles with fewer rights cannot see a session's statement, but they
# can see its locks, its name, and that it builds an index.
_MIGRATING: Final = f"""
SELECT pid, application_name FROM pg_stat_activity
WHERE datname = current_database() AND pid IN (
  SELECT pid FROM pg_locks
  WHERE locktype = 'advisory' AND granted AND objsubid = 1 AND classid::bigint << 32 | objid::bigint = {KEY}
  UNION ALL
  SELECT pid FROM pg_stat_progress_create_index JOIN pg_locks USING (pid)
  JOIN pg_index ON indrelid = relation AND NOT indisvalid
  WHERE mode = 'ShareUpdateExclusiveLock' AND granted AND indexrelid IN (SELECT to_regclass(unnest($1::text[])))
) LIMIT 1"""


async def aio_who_migrates(connection: asyncpg.Connection[Any], indexes: list[str]) -> str | None:
    """Return a description of the session that changes the schema or builds one of these indexes, or None."""
    row = await connection.fetchrow(_MIGRATING, indexes)
    return row and f"server process {row['pid']} ({row['application_name'] or 'without a name'})"


async def aio_lock(
    connection: asyncpg.Connection[Any],
    *,
    wait_s: float,
    warn: Callable[[str], object],
    tell_after_s: float = TELL_AFTER_S,
) -> None:
    """Take the lock; call `warn` after `tell_after_s`, and then every minute, with the session that holds it.

    Raises `StoreUnavailable` if another session still holds it after `wait_s` seconds.
    """
    began = time.monotonic()
    next_word = tell_after_s
    # Polled: a session that waits for the lock inside the server would block the CONCURRENTLY of another session.
    while not await connection.fetchval("SELECT pg_try_advisory_lock($1)", KEY):
        waited = time.monotonic() - began
        if waited >= min(wait_s, next_word):
            who = await aio_who_migrates(connection, []) or "another session"
            if waited >= wait_s:
                raise StoreUnavailable(f"{who} has held the migration lock for {waited:.0f} s; wait until it ends")
            warn(f"waiting for {who}, which is migrating the schema: {waited:.0f} s so far")
            next_word = waited + TELL_EVERY_S
        await asyncio.sleep(0.2)

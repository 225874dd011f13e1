"""Make waiting jobs ready: jobs that are due, whose key is free, or whose predecessors have ended.

Jobs become ready oldest first and in batches, so that many jobs that fall due together starve no other job. Jobs parked
for a key are checked by key, not by row: for ten thousand jobs with one key, a sweep needs one probe and wakes one of
them. It also wakes the jobs of queues that no worker claims from, so that jobs of other queues do not wait behind them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import attrs

from dataloader.store.connection.bridge import Database

BATCH: Final = 2_000
KEYS: Final = 500
"""Number of keys checked in one statement; each takes a place in the server's lock table meanwhile."""
IDLE: Final = 500
"""Number of parked jobs of idle queues woken together for a key.

A later worker parks them again, with an event each.
"""
JUDGED: Final = 500
"""Number of jobs that run after others and are evaluated in one transaction."""
_FIRST_KEY: Final = -(2**31) - 1

# The IDs as an array: one scan of the primary key instead of one lookup for each. The next due job is the first one
# behind as many as were taken, in the same snapshot and order. If some due jobs were locked, it is one of those or one
# of the taken, which is due as well.
_READY: Final = """
WITH due AS MATERIALIZED (
  SELECT job_id FROM dl_jobs WHERE status = 'queued' AND waits_for = 'time' AND available_at <= now()
  ORDER BY available_at LIMIT $1 FOR NO KEY UPDATE SKIP LOCKED
), readied AS (
  UPDATE dl_jobs SET waits_for = NULL WHERE job_id = ANY (ARRAY(SELECT job_id FROM due)) RETURNING job_id
)
SELECT (SELECT count(*) FROM readied) AS readied,
       (SELECT CASE WHEN available_at = 'infinity' THEN NULL
                    WHEN available_at > now()
                    THEN greatest(extract(epoch FROM available_at - clock_timestamp())::float8, 0.001) ELSE 0 END
        FROM dl_jobs WHERE status = 'queued' AND waits_for = 'time'
        ORDER BY available_at OFFSET (SELECT count(*) FROM due) LIMIT 1) AS next_due_s
"""


@attrs.frozen
class Staged:
    """Number of jobs that became ready, and seconds until the next one falls due.

    `next_due_s` is 0 if more jobs are due than a batch has, or if some are locked, and None if no job waits for its
    time.
    """

    readied: int
    next_due_s: float | None


async def ready_due(database: Database, *, most: int = BATCH) -> Staged:
    """Make one batch of at most `most` due jobs ready, oldest first (S, Q2: `available_at`)."""
    return await database.write(_aio_ready_due, most)


async def _aio_ready_due(connection: Any, most: int) -> Staged:
    [record] = await connection.fetch(_READY, most)
    return Staged(record["readied"], record["next_due_s"])


@attrs.frozen
class Judged:
    """Number of evaluated jobs, and whether others are left because of the batch size or a lock."""

    jobs: int
    more: bool


async def ready_after(database: Database, *, added: bool = True) -> Judged:
    """Make jobs ready, or cancel them, if all their predecessors have ended; at most a batch.

    With `added`, also check jobs that were added or queued again since: the more were added together, the slower is
    this check until the next vacuum.
    """
    return await database.write(_aio_ready_after, JUDGED, added)


async def _aio_ready_after(connection: Any, *limit_and_added: object) -> Judged:
    record = await connection.fetchrow("SELECT judged, more FROM dl_judge_after($1, $2)", *limit_and_added)
    return Judged(record["judged"], record["more"])


async def ready_free(database: Database, *, most_keys: int = KEYS) -> int:
    """Wake the next job of every free key that jobs wait for; one statement checks `most_keys` keys.

    This is the fallback for lost wake-ups by the holders. It also wakes the jobs of queues that no worker claims from,
    if they are ahead of other jobs with their key.
    """
    return await database.write(_aio_ready_free, most_keys)


async def _aio_ready_free(connection: Any, most_keys: int) -> int:
    readied = 0
    after = _FIRST_KEY
    while True:
        records = await connection.fetch("SELECT dl_parked_keys($1::bigint, $2) AS h", after, most_keys)
        keys = [record["h"] for record in records]
        if keys:
            readied += await connection.fetchval("SELECT dl_sweep_parked($1, $2)", keys, IDLE)
        if len(keys) < most_keys:
            return readied
        after = keys[-1]


async def unpark(database: Database, hashes: Sequence[int]) -> int:
    """Wake the next job of each of these keys that is free; return the number of jobs that were woken.

    Call it after the commit of the change that may have freed a key or parked a job for it: the key has to be checked
    in a new snapshot.
    """
    return await database.write(aio_unpark, hashes) if hashes else 0


async def aio_unpark(connection: Any, hashes: Sequence[int]) -> int:
    """Do the same as `unpark`, outside a transaction (asyncio-flavored)."""
    return int(await connection.fetchval("SELECT dl_unpark($1::int[])", hashes))

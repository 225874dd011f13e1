"""Queue of a lock key: its holder, the waiting jobs in order, and the jobs that ended last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import attrs

from dataloader.jobs.model import MAX_INT, check_text
from dataloader.jobs.wait_reasons import LockingSession
from dataloader.store.connection.bridge import Database
from dataloader.store.queue.job_rows import COLUMNS, MOST_COUNTED, JobRow, row_of_list
from dataloader.store.queue.why import SESSION_OF, session_of

MOST_WAITING: Final = 50
MOST_ENDED: Final = 10

# Keys are compared by their hash, as the locks are: keys with one hash wait together. Each part scans an index.
_ROWS: Final = f"""
(SELECT 'holds' AS part, {COLUMNS} FROM dl_jobs
 WHERE status = 'running' AND keyed AND hashtext(lock_key) = hashtext($1) ORDER BY hashtext(lock_key), job_id LIMIT 10)
UNION ALL
(SELECT 'waits', {COLUMNS} FROM dl_jobs
 WHERE status = 'queued' AND waits_for = 'lock' AND hashtext(lock_key) = hashtext($1)
 ORDER BY hashtext(lock_key), priority, created_at, job_id LIMIT {MOST_WAITING})
UNION ALL
(SELECT 'ended', {COLUMNS} FROM dl_jobs
 WHERE status IN ('succeeded', 'failed', 'canceled', 'lost') AND keyed AND hashtext(lock_key) = hashtext($1)
   AND lock_key = $1
 ORDER BY hashtext(lock_key) DESC, created_at DESC, job_id DESC LIMIT {MOST_ENDED})
"""
# In the order of the index, so that no plan scans all running jobs.
_NOBODY: Final = """
  (SELECT true FROM dl_jobs j WHERE j.status = 'running' AND j.keyed AND hashtext(j.lock_key) = hashtext($1)
   ORDER BY hashtext(j.lock_key), j.job_id LIMIT 1) IS NULL
"""
_COUNT: Final = f"""
SELECT c.waiting, s.* FROM (
  SELECT count(*) AS waiting FROM (
    SELECT FROM dl_jobs WHERE status = 'queued' AND waits_for = 'lock' AND hashtext(lock_key) = hashtext($1)
    LIMIT {MOST_COUNTED}) AS line
) AS c LEFT JOIN LATERAL ({SESSION_OF.format(hash="hashtext($1)", when=_NOBODY)}) AS s ON true
"""


@attrs.frozen(kw_only=True)
class KeyLine:
    """Queue of a lock key.

    `waiting` has the first `MOST_WAITING` of `count` jobs, best first; `ended` has the latest. `session` is the holder
    if no running job holds the key.
    """

    holders: Sequence[JobRow]
    session: LockingSession | None
    waiting: Sequence[JobRow]
    count: int
    ended: Sequence[JobRow]


async def key_line(database: Database, key: str) -> KeyLine:
    """Return the queue of a key. Raises `BadRequest` if it is not a valid key."""
    check_text("k", key, MAX_INT)
    return await database.run(_aio_line, key)


async def _aio_line(connection: Any, key: str) -> KeyLine:
    parts: dict[str, list[JobRow]] = {"holds": [], "waits": [], "ended": []}
    for record in await connection.fetch(_ROWS, key):
        parts[record["part"]].append(row_of_list(record))
    counted = await connection.fetchrow(_COUNT, key)
    is_free = counted["pid"] is None or bool(parts["holds"])
    return KeyLine(
        holders=parts["holds"],
        session=None if is_free else session_of(counted),
        waiting=parts["waits"],
        count=counted["waiting"],
        ended=parts["ended"],
    )

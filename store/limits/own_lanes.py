"""Lanes for worker entries that take only jobs of some tasks: each of these tasks has a lane for its jobs.

A claim of such an entry checks only its own lanes, however many other jobs wait in the queue. All programs of this
project add jobs of a task with a lane to that lane. Services that write rows themselves do not: their jobs are among
the ready ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final
from uuid import UUID

import attrs

from dataloader.store.connection.bridge import Database
from dataloader.store.limits.limit_rows import TELL, aio_open_lane

LOOK: Final = 10_000
"""Maximum ready jobs that one statement examines: about 20 ms of the server's time."""
_FIRST: Final = (-1, "-infinity", UUID(int=0))

_TASK: Final = "SELECT limited FROM dl_tasks WHERE task = $1 FOR NO KEY UPDATE"
# Timestamps as text: the driver's type changes infinite times.
_FILE: Final = """
WITH looked AS MATERIALIZED (
  SELECT job_id, task, priority, created_at FROM dl_jobs
  WHERE queue = $1 AND status = 'queued' AND waits_for IS NULL
    AND (priority, created_at, job_id) > ($3, $4::text::timestamptz, $5)
  ORDER BY priority, created_at, job_id LIMIT $6
), ours AS MATERIALIZED (
  SELECT j.job_id FROM looked l JOIN dl_jobs j ON j.job_id = ANY (ARRAY[l.job_id])
  WHERE l.task = ANY ($2::text[]) AND (j.status = 'queued') IS TRUE AND j.waits_for IS NULL
  FOR NO KEY UPDATE OF j SKIP LOCKED
), filed AS (
  UPDATE dl_jobs j SET lane = j.task, waits_for = 'limit' FROM ours o WHERE j.job_id = ANY (ARRAY[o.job_id])
  RETURNING j.job_id
)
SELECT (SELECT count(*) FROM looked) AS looked, (SELECT count(*) FROM filed) AS filed,
       l.priority, l.created_at::text AS created_at, l.job_id
FROM (VALUES (1)) AS one (n)
LEFT JOIN (SELECT * FROM looked ORDER BY priority DESC, created_at DESC, job_id DESC LIMIT 1) AS l ON true
"""


@attrs.frozen
class Filed:
    """Number of jobs that were examined, and of those that were moved to their lanes.

    The next statement continues after `last`; None at the end.
    """

    looked: int
    jobs: int
    last: tuple[int, str, UUID] | None


async def file_ready(
    database: Database, queue: str, tasks: Sequence[str], after: tuple[int, str, UUID] | None = None
) -> Filed:
    """Move jobs of these tasks to their lanes, among the first `LOOK` ready jobs after `after`."""
    return await database.write(_aio_file, queue, list(tasks), after or _FIRST)


async def _aio_file(connection: Any, queue: str, tasks: list[str], after: tuple[int, str, UUID]) -> Filed:
    row = await connection.fetchrow(_FILE, queue, tasks, *after, LOOK)
    last = (row["priority"], row["created_at"], row["job_id"]) if row["looked"] == LOOK else None
    return Filed(row["looked"], row["filed"], last)


async def aio_open_lanes(connection: Any, tasks: Sequence[str]) -> None:
    """Open a lane for each declared task among these (asyncio-flavored), and notify all processes."""
    async with connection.transaction():
        for task in sorted(tasks):
            if await connection.fetchrow(_TASK, task) is not None:
                await aio_open_lane(connection, task)
        await connection.execute(TELL)

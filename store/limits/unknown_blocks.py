"""Blocks of ready jobs whose tasks a process does not know, and the lanes to which they are moved.

A lane for such jobs has `unknown_at`, the last time at which a live worker of the queue did not know the task.
`close_lanes` closes it when all workers have known the task for `KNOWN_S`: new jobs are plain ready jobs again, and
workers still take the jobs in the lane. `CLOSING_S` later it is dropped if it is empty.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final
from uuid import UUID

import attrs

from dataloader.store.connection.bridge import Database
from dataloader.store.connection.command_tag import row_count
from dataloader.store.limits.limit_rows import TELL, aio_open_lane
from dataloader.store.queue.worker_rows import ALIVE_WITHIN_S

LOOK: Final = 2_000
"""Maximum ready jobs that one statement examines."""
LEAST: Final = 500
"""Minimum number of unknown jobs among them that form a block. One statement moves this number."""
KNOWN_S: Final = 3_600.0
CLOSING_S: Final = 3_600.0

_FIRST: Final = (-1, "-infinity", UUID(int=0))
_READY: Final = "queue = $1 AND status = 'queued' AND waits_for IS NULL AND NOT cancel_requested"
_PLACE: Final = "(priority, created_at, job_id)"
# Timestamps as text: the driver's type rounds infinite times. Names that are too long for an index, which only other
# services write, stay unmoved.
_LOOK: Final = f"""
WITH first AS MATERIALIZED (
  SELECT task, priority, created_at, job_id FROM (
    SELECT task, priority, created_at, job_id FROM dl_jobs
    WHERE {_READY} AND {_PLACE} > ($3, $4::text::timestamptz, $5)
    ORDER BY priority, created_at, job_id LIMIT $6
  ) AS looked
  WHERE task <> ALL ($2::text[]) AND octet_length(task) <= 800 ORDER BY priority, created_at, job_id LIMIT $7
)
SELECT (SELECT count(*) FROM first) AS unknown, ARRAY(SELECT DISTINCT task FROM first ORDER BY task) AS tasks,
       l.priority, l.created_at::text AS created_at, l.job_id
FROM first l ORDER BY l.priority DESC, l.created_at DESC, l.job_id DESC LIMIT 1
"""
_OPEN: Final = """
SELECT l.lane FROM dl_lanes l LEFT JOIN dl_tasks t ON t.task = l.lane
WHERE l.lane = ANY ($1::text[]) AND coalesce(t.limited, true) AND (l.unknown_at IS NULL OR $2 = ANY (l.queues))
"""
_TASK: Final = "SELECT FROM dl_tasks WHERE task = $1 FOR NO KEY UPDATE"
_IS_LANE: Final = "SELECT true FROM dl_lanes WHERE lane = $1 AND unknown_at IS NULL"
_UNKNOWN: Final = """
UPDATE dl_lanes SET unknown_at = now(), closing_at = NULL, queues = array_remove(queues, $2) || $2::text WHERE lane = $1
"""
_FILE: Final = f"""
WITH picked AS MATERIALIZED (
  SELECT job_id FROM dl_jobs
  WHERE {_READY} AND task = ANY ($2::text[]) AND {_PLACE} > ($3, $4::text::timestamptz, $5)
    AND {_PLACE} <= ($6, $7::text::timestamptz, $8)
  ORDER BY priority, created_at, job_id FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE dl_jobs j SET lane = j.task, waits_for = 'limit' FROM picked p WHERE j.job_id = ANY (ARRAY[p.job_id])
"""
_HAS_LIMITS: Final = """
(t.paused OR num_nonnulls(t.periods, t.max_running, t.batch_size, t.supplier, t.max_running_per_partition) > 0)
"""
# A worker that takes only jobs of the task needs the lane, and so do limits.
_STILL_NEEDED: Final = f"""
UPDATE dl_lanes l SET unknown_at = now()
WHERE l.unknown_at < now() - interval '1 min' AND (
  EXISTS (SELECT FROM dl_workers w
          WHERE w.seen_at > now() - make_interval(secs => {ALIVE_WITHIN_S})
            AND (w.queues ?| l.queues AND l.lane <> ALL (w.tasks)
                 OR EXISTS (SELECT FROM jsonb_each(w.only_tasks) AS o WHERE o.value ? l.lane)))
  OR EXISTS (SELECT FROM dl_tasks t WHERE t.task = l.lane AND {_HAS_LIMITS}))
"""
_IS_KNOWN: Final = "l.unknown_at < now() - make_interval(secs => $1) AND l.closing_at IS NULL"
_UNLIMIT: Final = f"""
UPDATE dl_tasks t SET limited = false FROM dl_lanes l
WHERE l.lane = t.task AND t.limited AND {_IS_KNOWN} AND NOT {_HAS_LIMITS}
"""
# Limits may be set between these statements. A task that has a lane then keeps it.
_NOT_LIMITED: Final = "NOT EXISTS (SELECT FROM dl_tasks t WHERE t.task = l.lane AND t.limited)"
_CLOSE: Final = f"UPDATE dl_lanes l SET closing_at = now() WHERE {_IS_KNOWN} AND {_NOT_LIMITED}"
_DROP: Final = f"""
DELETE FROM dl_lanes l WHERE l.closing_at < now() - make_interval(secs => $1) AND {_NOT_LIMITED} AND
  (SELECT j.lane FROM dl_jobs j
   WHERE j.lane BETWEEN l.lane AND l.lane AND j.status = 'queued' AND j.waits_for = 'limit'
   ORDER BY j.lane LIMIT 1) IS NULL
"""
# A job may have entered its lane while that was dropped.
_WITHOUT_LANE: Final = """
WITH RECURSIVE waiting AS (
  (SELECT lane FROM dl_jobs WHERE status = 'queued' AND waits_for = 'limit' ORDER BY lane LIMIT 1)
  UNION ALL
  SELECT (SELECT j.lane FROM dl_jobs j
          WHERE j.status = 'queued' AND j.waits_for = 'limit' AND j.lane > w.lane ORDER BY j.lane LIMIT 1)
  FROM waiting w WHERE w.lane IS NOT NULL
)
INSERT INTO dl_lanes (lane, unknown_at, closing_at) SELECT lane, now(), now() FROM waiting WHERE lane IS NOT NULL
ON CONFLICT DO NOTHING
"""


@attrs.frozen
class FiledBlock:
    """Number of jobs that were moved, and the place after which the next search begins.

    `is_block` is false if there were too few unknown jobs, in which case nothing was moved.
    """

    is_block: bool
    jobs: int = 0
    last: tuple[int, str, UUID] | None = None


async def file_block(
    database: Database,
    queue: str,
    known: Collection[str],
    after: tuple[int, str, UUID] | None = None,
    *,
    look: int = LOOK,
    least: int = LEAST,
) -> FiledBlock:
    """Move ready jobs of `queue` after `after` whose tasks are not `known`, the first `least` ones, to their lanes.

    Nothing is moved if there are fewer than these among the first `look` ready jobs.
    """
    return await database.write(_aio_file_block, queue, list(known), after or _FIRST, look=look, least=least)


async def _aio_file_block(
    connection: Any, queue: str, known: list[str], after: tuple[int, str, UUID], *, look: int, least: int
) -> FiledBlock:
    found = await connection.fetchrow(_LOOK, queue, known, *after, look, least)
    if found is None or found["unknown"] < least:
        return FiledBlock(is_block=False)
    tasks = found["tasks"]
    are_open = {row["lane"] for row in await connection.fetch(_OPEN, tasks, queue)}
    if missing := [task for task in tasks if task not in are_open]:
        await _aio_open_lanes(connection, missing, queue)
    last = found["priority"], found["created_at"], found["job_id"]
    moved = row_count(await connection.execute(_FILE, queue, tasks, *after, *last))
    return FiledBlock(is_block=True, jobs=moved, last=last)


async def _aio_open_lanes(connection: Any, tasks: Sequence[str], queue: str) -> None:
    """Open lanes for tasks that are unknown in `queue`, and notify the workers that know them."""
    async with connection.transaction():
        for task in tasks:
            await connection.fetchrow(_TASK, task)
            is_lane = await connection.fetchval(_IS_LANE, task)
            await aio_open_lane(connection, task, for_unknown=True)
            if not is_lane:
                await connection.execute(_UNKNOWN, task, queue)
        await connection.execute(TELL)


async def close_lanes(database: Database, *, known_s: float = KNOWN_S, closing_s: float = CLOSING_S) -> int:
    """Close and drop lanes that unknown tasks no longer need; return the number of changes.

    Args:
        database: database of the lanes.
        known_s: seconds for which all live workers of a lane's queues must have known its task.
        closing_s: seconds for which workers still take jobs from a closed lane.
    """
    return await database.write(_aio_close_lanes, known_s, closing_s)


async def _aio_close_lanes(connection: Any, known_s: float, closing_s: float) -> int:
    await connection.execute(_STILL_NEEDED)
    async with connection.transaction():
        await connection.execute(_UNLIMIT, known_s)
        changes = [(_CLOSE, known_s), (_DROP, closing_s), (_WITHOUT_LANE,)]
        changed = sum([row_count(await connection.execute(*change)) for change in changes])
        if changed:
            await connection.execute(TELL)
    return changed

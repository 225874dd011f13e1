"""Maintenance of processes: replaces wake-up jobs that were ended externally, and deletes old rows.

Removed processes are deleted a day later, because their idempotency keys are valid until then. A walk over all live
processes, page by page, finds missing jobs and old rows.
"""

from __future__ import annotations

from typing import Any, Final

import attrs

from dataloader.store.connection.bridge import Database, set_local
from dataloader.store.connection.command_tag import row_count
from dataloader.store.queue.control import aio_short_transaction

PAGE: Final = 1_000
MOST: Final = 10_000
"""Maximum rows of a table that are deleted with one page. A later walk deletes the rest."""
MOVED: Final = 1_000
"""Maximum processes that one statement moves to another version."""

# There are few ended jobs: the end of a run leaves no row, unlike an external end.
_ENDED: Final = """
WITH RECURSIVE types AS (
  (SELECT type FROM dl_processes WHERE removed_at IS NULL ORDER BY type LIMIT 1)
  UNION ALL
  SELECT (SELECT p.type FROM dl_processes p WHERE p.removed_at IS NULL AND p.type > t.type ORDER BY p.type LIMIT 1)
  FROM types t WHERE t.type IS NOT NULL
), ended AS MATERIALIZED (
  SELECT j.job_id, j.key
  FROM types t
  CROSS JOIN unnest('{succeeded,failed,canceled,lost}'::dl_status[]) AS s (status)
  CROSS JOIN LATERAL (
    -- OFFSET: a look at the index for each of them, whatever is estimated.
    SELECT j.job_id, j.args ->> 'key' AS key FROM dl_jobs j
    WHERE j.status = s.status AND j.queue = 'process.' || t.type OFFSET 0
  ) AS j
)
SELECT array_agg(p.key) FROM ended e
JOIN dl_processes p ON p.key = CASE WHEN e.key ~ '^[0-9]{1,18}$' THEN e.key::bigint END AND p.job_id = e.job_id
"""
_PAGE: Final = """
WITH page AS MATERIALIZED (
  SELECT p.key, p.job_id, p.running_task IS NOT NULL OR p.timer_task IS NOT NULL AS busy,
         -- Without a condition on the status, for which all open jobs would be looked through.
         coalesce((SELECT j.status IN ('queued', 'running') FROM dl_jobs j WHERE j.job_id = p.job_id), false) AS has_job
  FROM dl_processes p WHERE p.key > $1 AND p.removed_at IS NULL ORDER BY p.key LIMIT $2
)
SELECT array_agg(key) AS keys, array_agg(job_id) FILTER (WHERE has_job) AS jobs,
       array_agg(key) FILTER (WHERE NOT has_job AND (busy OR EXISTS (
         SELECT FROM dl_process_tasks t WHERE t.key = page.key AND t.status = 'waiting'))) AS without_job
FROM page
"""
# Use only the indexes: no table may be read completely each minute, whatever the estimates.
_PLAN: Final = set_local(dict.fromkeys(("enable_seqscan", "enable_hashjoin", "enable_mergejoin"), "off"))
_MEND: Final = "SELECT dl_process_mend($1, $2)"
_JOURNAL: Final = """
DELETE FROM dl_job_events WHERE event_id = ANY (ARRAY(
  SELECT e.event_id FROM unnest($1::uuid[]) AS j (job_id) CROSS JOIN LATERAL (
    SELECT event_id FROM dl_job_events WHERE job_id = j.job_id AND ts < now() - interval '1 day'
    ORDER BY event_id LIMIT 100) AS e
  LIMIT $2))
"""
# Events of a process with pending deliveries stay until these are delivered.
_EVENTS: Final = """
DELETE FROM dl_process_events d USING (
  SELECT e.key, e.event_id FROM unnest($1::bigint[]) AS k (key) JOIN dl_processes p USING (key) CROSS JOIN LATERAL (
    SELECT * FROM dl_process_events e WHERE e.key = p.key AND e.event_id <= p.last_event_id - $3
    ORDER BY e.event_id LIMIT $2) AS e
  WHERE NOT EXISTS (SELECT FROM dl_process_outbox o WHERE o.key = p.key)
  LIMIT $2) AS old
WHERE d.key = old.key AND d.event_id = old.event_id
"""
# The task by which a process has failed stays, because a resume tries it again.
_TASKS: Final = """
DELETE FROM dl_process_tasks WHERE task_id = ANY (ARRAY(
  SELECT t.task_id FROM unnest($1::bigint[]) AS k (key) JOIN dl_processes p USING (key) CROSS JOIN LATERAL (
    SELECT * FROM dl_process_tasks t WHERE t.key = p.key ORDER BY t.task_id LIMIT 100) AS t
  WHERE t.status <> 'waiting' AND t.finished_at < now() - make_interval(days => $3)
    AND t.task_id IS DISTINCT FROM p.corrupted_by
  LIMIT $2))
"""


@attrs.frozen
class Tended:
    """Result of a page: the key after which the next one begins (0: from the start), and the numbers of changes."""

    after: int
    mended: int = 0
    deleted: int = 0


async def mend_ended(database: Database, lease_s: int) -> int:
    """Replace wake-up jobs that were ended externally; return their number."""
    return await database.write(_aio_mend_ended, lease_s)


async def move_unserved(database: Database) -> int:
    """Move processes that have not begun from versions without a worker to the newest version with one."""
    return await database.write(_aio_move, MOVED)


async def tend(database: Database, after: int, *, lease_s: int, keep_events: int, task_days: int) -> Tended:
    """Repair a page of processes, and delete their old rows.

    Args:
        database: database of the processes.
        after: key of the last process of the previous page.
        lease_s: lease of a wake-up job, in seconds.
        keep_events: number of newest events that a process keeps; 0 for all.
        task_days: days after which an ended task is deleted; 0 for never.
    """
    return await database.write(_aio_tend, after, lease_s, keep_events, task_days)


async def _aio_mend_ended(connection: Any, lease_s: int) -> int:
    async with aio_short_transaction(connection):
        await connection.execute(_PLAN)
        keys = await connection.fetchval(_ENDED)
        return await connection.fetchval(_MEND, keys, lease_s) if keys else 0


async def _aio_move(connection: Any, limit: int) -> int:
    async with aio_short_transaction(connection):
        return int(await connection.fetchval("SELECT dl_process_move_some($1)", limit))


async def _aio_tend(connection: Any, after: int, lease_s: int, keep_events: int, task_days: int) -> Tended:
    async with connection.transaction(readonly=True):
        await connection.execute(_PLAN)
        page = await connection.fetchrow(_PAGE, after, PAGE)
    keys, deleted = page["keys"] or [], 0
    mended = await connection.fetchval(_MEND, page["without_job"], lease_s) if page["without_job"] else 0
    if page["jobs"]:
        deleted += row_count(await connection.execute(_JOURNAL, page["jobs"], MOST))
    if keys and keep_events:
        deleted += row_count(await connection.execute(_EVENTS, keys, MOST, keep_events))
    if keys and task_days:
        deleted += row_count(await connection.execute(_TASKS, keys, MOST, task_days))
    return Tended(keys[-1] if len(keys) == PAGE else 0, mended, deleted)

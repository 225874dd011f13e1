"""Find and cancel duplicates: waiting jobs with the same task and args, from any source (S6).

Jobs whose args are not their only input are left out: those of schedules, which have a planned time, of later stages,
and those that run after others. Jobs of unique tasks are left out, too: they have no duplicates. A job that another one
waits for is never canceled.
"""

from __future__ import annotations

from typing import Any, Final
from uuid import UUID

from dataloader.jobs.contract import MAX_BULK, Operator
from dataloader.jobs.duplicates import DuplicateGroup
from dataloader.jobs.listings import MAX_PAGE
from dataloader.jobs.model import MAX_NAME, check_between, check_text
from dataloader.jobs.text import shown_json
from dataloader.store.connection.bridge import Database
from dataloader.store.queue.control import aio_audit
from dataloader.store.queue.make_ready import unpark
from dataloader.store.queue.reads import shown

# Equal JSON values have equal hashes, also 1 and 1.0.
_GROUPED: Final = """
SELECT queue, task, partition_key, count(*) AS jobs, min(created_at) AS oldest_at,
       array_agg(job_id ORDER BY awaited DESC, priority, created_at, job_id) AS ids
FROM dl_jobs
WHERE status = 'queued' AND waits_on IS NULL AND schedule IS NULL AND unique_key IS NULL AND previous IS NULL
  AND ($1::text[] IS NULL OR task = ANY ($1)) AND ($2::text IS NULL OR queue = $2)
GROUP BY queue, task, partition_key, jsonb_hash_extended(args, 0) HAVING count(*) > 1
ORDER BY count(*) DESC, min(created_at), queue, task LIMIT $3
"""
_GROUPS: Final = f"""
SELECT g.queue, g.task, g.partition_key, g.jobs, g.ids[1] AS best, b.args, g.oldest_at
FROM ({_GROUPED}) AS g
CROSS JOIN LATERAL (SELECT {shown("args")} FROM dl_jobs WHERE job_id = ANY (ARRAY[g.ids[1]])) AS b
"""
# All rows are locked in one order, so that sessions do not deadlock. A group is changed only if its best job is there.
_CANCEL: Final = """
WITH asked AS MATERIALIZED (
  SELECT * FROM unnest($1::uuid[], $2::uuid[]) AS u (job_id, best)
), kept AS MATERIALIZED (
  SELECT j.job_id, j.args FROM dl_jobs j
  WHERE j.job_id = ANY ($2::uuid[]) AND (j.status = 'queued') IS TRUE AND NOT j.cancel_requested
  ORDER BY j.job_id FOR NO KEY UPDATE SKIP LOCKED
), spare AS MATERIALIZED (
  SELECT j.job_id, a.best, j.waits_for IS NULL AND j.keyed AS may_block FROM asked a
  JOIN dl_jobs j ON j.job_id = ANY (ARRAY[a.job_id]) JOIN kept k ON k.job_id = a.best AND k.args = j.args
  WHERE (j.status = 'queued') IS TRUE AND NOT j.awaited
  FOR NO KEY UPDATE OF j SKIP LOCKED
), canceled AS (
  UPDATE dl_jobs j SET status = 'canceled', waits_for = NULL, finished_at = now(),
                       error = format('a duplicate of job %s', s.best)
  FROM spare s WHERE j.job_id = ANY (ARRAY[s.job_id])
  RETURNING j.job_id, j.queue, s.best, CASE WHEN s.may_block THEN hashtext(j.lock_key) END AS lock_hash
), journal AS (
  INSERT INTO dl_job_events (job_id, queue, kind, payload)
  SELECT job_id, queue, 'canceled', jsonb_build_object('reason', 'duplicate', 'of', best) FROM canceled
)
SELECT lock_hash FROM canceled
"""


async def list_duplicates(
    database: Database, *, task: str | None = None, queue: str | None = None, limit: int = 50
) -> list[DuplicateGroup]:
    """Return at most `limit` (1 to 1,000) groups, the largest first. Reads all waiting jobs.

    Raises `BadRequest` if `limit` is not allowed.
    """
    check_between("limit", limit, 1, MAX_PAGE)
    _check_names(task=task, queue=queue)
    tasks = None if task is None else [task]
    records = await database.run(_aio_duplicate_groups, tasks, queue, limit)
    return [DuplicateGroup(**record | {"args": shown_json(record["args"])}) for record in records]


async def cancel_duplicates(
    database: Database, tasks: list[str], operator: Operator | None, *, queue: str | None = None, limit: int = 1_000
) -> int:
    """Cancel at most `limit` duplicates of the tasks, except the best job of each group; return their number.

    With an `operator`, the action is audited. Raises `BadRequest` if `limit` is not allowed.
    """
    check_between("limit", limit, 1, MAX_BULK)
    _check_names(queue=queue)
    for task in tasks:
        _check_names(task=task)
    count, hashes = await database.write(_aio_cancel_duplicates, tasks, queue, limit, operator)
    await unpark(database, hashes)
    return count


def _check_names(**names: str | None) -> None:
    """Raise `BadRequest` for names that cannot be in the database. Names of other services are allowed."""
    for name, value in names.items():
        if value is not None:
            check_text(name, value, MAX_NAME)


async def _aio_duplicate_groups(
    connection: Any, tasks: list[str] | None, queue: str | None, limit: int
) -> list[dict[str, Any]]:
    return [dict(record) for record in await connection.fetch(_GROUPS, tasks, queue, limit)]


async def _aio_cancel_duplicates(
    connection: Any, tasks: list[str], queue: str | None, limit: int, operator: Operator | None
) -> tuple[int, list[int]]:
    async with connection.transaction():
        ids: list[UUID] = []
        bests: list[UUID] = []
        for record in await connection.fetch(_GROUPED, tasks, queue, limit):
            best, *others = record["ids"]
            ids += others[: limit - len(ids)]
            bests += [best] * (len(ids) - len(bests))
        canceled = await connection.fetch(_CANCEL, ids, bests) if ids else []
        if operator is not None:
            detail = {"tasks": tasks, "queue": queue, "limit": limit, "canceled": len(canceled)}
            await aio_audit(connection, operator, "cancel_duplicates", None, detail)
    return len(canceled), sorted({record["lock_hash"] for record in canceled if record["lock_hash"] is not None})

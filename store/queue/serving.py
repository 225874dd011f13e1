"""Workers and activity of a queue, and processes with their activity: for pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Final
from uuid import UUID

import attrs

from dataloader.jobs.secrets.record_masks import Public, Sensitive
from dataloader.jobs.text import listed_json
from dataloader.store.connection.bridge import Database
from dataloader.store.connection.fetching import aio_fetch
from dataloader.store.queue.depths import READ, Depths, aio_depths_of, readable
from dataloader.store.queue.worker_rows import ALIVE_WITHIN_S

ROWS: Final = 20
"""Maximum number of jobs and tasks of a queue that are shown."""
PROCESSES: Final = 200
_MOST_RUNNING: Final = 10_000

_WORKERS: Final = f"""
SELECT w.worker, w.host, w.pid, w.version, w.started_at, w.seen_at, w.queues, w.only_tasks,
       coalesce(cardinality(w.tasks), 0) AS tasks, w.seen_at <= now() - make_interval(secs => {ALIVE_WITHIN_S}) AS gone,
       r.running
FROM dl_workers w LEFT JOIN LATERAL (
  SELECT jsonb_object_agg(u.queue, u.number) AS running FROM (
    SELECT queue, count(*) AS number FROM running WHERE claimed_by = w.worker GROUP BY queue) AS u
) AS r ON true
"""
_RUNNING: Final = f"""
WITH running AS MATERIALIZED (
  SELECT queue, claimed_by FROM dl_jobs WHERE status = 'running' {{of_queue}} LIMIT {_MOST_RUNNING}
)
"""
_PROCESSES: Final = f"""
{_RUNNING.format(of_queue="")} {_WORKERS} ORDER BY gone, w.worker LIMIT {PROCESSES}
"""
_QUEUE: Final = f"""
{_RUNNING.format(of_queue="AND queue = $1")}
SELECT depths.*,
  (SELECT coalesce(json_agg(x), '[]') FROM ({_WORKERS} WHERE w.queues ? $1 ORDER BY gone, w.worker LIMIT {PROCESSES}
   ) AS x)::text AS workers,
  (SELECT coalesce(json_agg(x), '[]') FROM (
    SELECT job_id, task, attempt, claimed_by AS worker, {readable("coalesce(run_started_at, started_at)")} AS since
    FROM dl_jobs
    WHERE status = 'running' AND queue = $1 ORDER BY coalesce(run_started_at, started_at) LIMIT {ROWS}
   ) AS x)::text AS running,
  (SELECT coalesce(json_agg(x), '[]') FROM (
    SELECT job_id, task, attempt, NULL AS worker, {readable("available_at")} AS since FROM dl_jobs
    WHERE queue = $1 AND status = 'queued' AND waits_for IS NULL
    ORDER BY queue, priority, created_at, job_id LIMIT {ROWS}
   ) AS x)::text AS next,
  (SELECT coalesce(json_agg(x), '[]') FROM (
    SELECT task, paused FROM dl_tasks WHERE queue = $1 ORDER BY task LIMIT {ROWS}
   ) AS x)::text AS tasks
FROM ({READ}) AS depths
"""


@attrs.frozen(kw_only=True)
class ServingProcess:
    """Process that serves queues.

    Attributes:
        queues: its slots, by queue.
        running: number of slots in use, by queue.
        gone: whether it has stopped showing process heartbeats; `seen_at` is the last one.
        tasks: number of tasks that it knows.
        only_tasks: by queue, the tasks to which it is restricted there.
    """

    worker: Sensitive[str]
    host: Sensitive[str]
    pid: int
    version: Annotated[str, Public("a version number")]
    started_at: datetime
    seen_at: datetime
    gone: bool
    queues: Sensitive[Mapping[str, int]]
    running: Sensitive[Mapping[str, int] | None]
    tasks: int
    only_tasks: Sensitive[Mapping[str, Sequence[str]] | None]


@attrs.frozen(kw_only=True)
class JobInQueue:
    """Job that has run, or has been ready, since `since`."""

    job_id: UUID
    task: Sensitive[str]
    attempt: int
    worker: Sensitive[str | None]
    since: datetime | None


@attrs.frozen
class TaskOfQueue:
    """Task whose jobs are enqueued in the queue by default."""

    task: Sensitive[str]
    paused: bool


@attrs.frozen(kw_only=True)
class QueueDetail:
    """Workers of a queue, the jobs that have run longest, the jobs that start next, and its tasks."""

    workers: list[ServingProcess]
    running: list[JobInQueue]
    next: list[JobInQueue]
    tasks: list[TaskOfQueue]


async def read_processes(database: Database) -> list[ServingProcess]:
    """Return the first `PROCESSES` processes by name, those that are gone last; these are deleted a day later."""
    return [ServingProcess(**row) for row in await database.run(aio_fetch, _PROCESSES)]


async def read_queue(database: Database, queue: str) -> tuple[Depths, QueueDetail]:
    """Return the activity of a queue and its depths. Old depths are counted again. The queue need not exist."""
    depths, row = await database.run(_aio_queue, queue)
    return depths, QueueDetail(
        workers=listed_json(row["workers"], ServingProcess),
        running=listed_json(row["running"], JobInQueue),
        next=listed_json(row["next"], JobInQueue),
        tasks=listed_json(row["tasks"], TaskOfQueue),
    )


async def _aio_queue(connection: Any, queue: str) -> tuple[Depths, Any]:
    row = await connection.fetchrow(_QUEUE, queue)
    return await aio_depths_of(connection, row), row

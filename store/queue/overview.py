"""Data of the first page, read by one statement: depths, problems, running jobs, and runs ended per hour.

Each part is bounded: it reads the newest rows of a log, or a maximum number of jobs.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Final
from uuid import UUID

import attrs

from dataloader.jobs.failures import group_id
from dataloader.jobs.secrets.record_masks import FIXED_WORD, Sensitive
from dataloader.jobs.text import listed_json
from dataloader.store.connection.bridge import Database
from dataloader.store.queue.depths import READ, Depths, aio_depths_of, readable
from dataloader.store.queue.worker_rows import ALIVE_WITHIN_S

LONG_S: Final = 60.0
"""Seconds after which a job of an unknown task that waits, or a late schedule, is shown."""
HOURS: Final = 24
RUNNING: Final = 10
EACH: Final = 10
"""Maximum number of lines of one kind."""
NEXT: Final = 5
"""Number of next schedules, and of running loads and flows."""
RUNS: Final = 200
"""Number of the newest runs among which running ones are searched."""
PROGRESS: Final = 4_000
"""Longer progress, in bytes, is not read."""
MOST: Final = 10_000
"""Maximum number of jobs counted for one line."""
ERRORS: Final = 5_000
"""Number of rows of the error log that are read."""

PROCESSES: Final = f"""
WITH RECURSIVE types AS (
  (SELECT type FROM dl_processes WHERE removed_at IS NULL ORDER BY type LIMIT 1)
  UNION ALL
  SELECT (SELECT p.type FROM dl_processes p
          WHERE p.removed_at IS NULL AND p.type > t.type ORDER BY p.type LIMIT 1)
  FROM types t WHERE t.type IS NOT NULL
)
SELECT s.status, c.processes FROM unnest('{{init,running,error}}'::text[]) AS s (status) CROSS JOIN LATERAL (
  SELECT count(*) AS processes FROM (
    SELECT FROM types t CROSS JOIN LATERAL (
      SELECT FROM dl_processes p
      WHERE p.removed_at IS NULL AND p.type = t.type AND p.status = s.status LIMIT {MOST}
    ) AS k LIMIT {MOST}
  ) AS those
) AS c WHERE c.processes > 0
"""
"""Query for the numbers of durable processes by status, each counted up to `MOST`."""
_LIST: Final = "(SELECT coalesce(json_agg(x), '[]') FROM ({sql}) AS x)::text AS {name}"
_PARTS: Final = {
    "paused_tasks": f"""
        SELECT t.task, t.paused_at AS since, t.paused_by AS by, w.jobs FROM dl_tasks t CROSS JOIN LATERAL (
          SELECT count(*) AS jobs FROM (
            SELECT FROM dl_jobs j WHERE j.lane = t.task AND j.status = 'queued' AND j.waits_for = 'limit' LIMIT {MOST}
          ) AS lane) AS w
        WHERE t.paused AND w.jobs > 0 ORDER BY w.jobs DESC, t.task LIMIT {EACH}
        """,
    "schedules": f"""
        SELECT name, CASE WHEN paused THEN 'paused' ELSE 'late' END AS what, paused_why AS why, next_at AS since,
               0 AS times
        FROM dl_schedules
        WHERE retired_at IS NULL AND (paused AND paused_why NOT LIKE 'by %'
          OR NOT paused AND next_at < now() - make_interval(secs => {LONG_S}))
        UNION ALL
        (SELECT name, 'missed', min(payload->>'why'), max(at),
                sum(CASE WHEN payload->>'times' ~ '^[0-9]{{1,9}}$' THEN (payload->>'times')::int ELSE 1 END)
         FROM (SELECT name, kind, at, payload FROM dl_schedule_events ORDER BY event_id DESC LIMIT 500) AS newest
         WHERE kind = 'left_out' AND at > now() - interval '1 day' AND payload->>'why' = 'missed'
         GROUP BY name ORDER BY max(at) DESC LIMIT {EACH})
        """,
    "errors": f"""
        SELECT g.error_group AS number, g.failures, g.since, e.task, left(dl_error_line(e.error), 400) AS error
        FROM (SELECT error_group, count(*) AS failures, max(at) AS since, max(error_id) AS error_id FROM (
                SELECT error_id, error_group, at, status FROM dl_errors ORDER BY error_id DESC LIMIT {ERRORS}) AS newest
              WHERE at > now() - interval '1 hour' AND status IN ('failed', 'lost')
              GROUP BY error_group ORDER BY failures DESC, error_group LIMIT {EACH}) AS g
        JOIN dl_errors e ON e.error_id = ANY (ARRAY[g.error_id]) ORDER BY g.failures DESC, g.error_group
        """,
    "gone": f"""
        SELECT worker, seen_at AS since FROM dl_workers WHERE seen_at <= now() - make_interval(secs => {ALIVE_WITHIN_S})
        ORDER BY seen_at DESC LIMIT {EACH}
        """,
    "processes": PROCESSES,
    "running": f"""
        SELECT job_id, queue, task, claimed_by AS worker, attempt, {readable("since")} AS since,
               EXISTS (SELECT FROM dl_tasks t WHERE t.task = those.task) AS is_declared FROM (
          SELECT job_id, queue, task, claimed_by, attempt, coalesce(run_started_at, started_at) AS since
          FROM dl_jobs WHERE status = 'running' LIMIT {MOST}
        ) AS those ORDER BY since, job_id LIMIT {RUNNING}
        """,
    "next_schedules": f"""
        SELECT name, {readable("next_at")} AS at FROM dl_schedules
        WHERE retired_at IS NULL AND NOT paused AND next_at > now() ORDER BY next_at, name LIMIT {NEXT}
        """,
    "runs": f"""
        SELECT r.run_id, r.name, r.started_at AS since,
               CASE WHEN octet_length(j.progress::text) <= {PROGRESS} THEN j.progress END AS progress
        FROM (SELECT run_id, name, started_at FROM dl_etl_runs
              ORDER BY started_at DESC, run_id DESC LIMIT {RUNS}) AS r
        JOIN dl_jobs j ON j.job_id = r.run_id AND j.status = 'running' ORDER BY r.started_at DESC LIMIT {NEXT}
        """,
    "hours": f"""
        SELECT h.hour, coalesce(sum(s.runs) FILTER (WHERE s.outcome = 'succeeded'), 0)::bigint AS succeeded,
               coalesce(sum(s.runs) FILTER (WHERE s.outcome IN ('failed', 'lost')), 0)::bigint AS failed,
               coalesce(sum(s.runs) FILTER (WHERE s.outcome = 'canceled'), 0)::bigint AS canceled
        FROM generate_series(date_trunc('hour', now(), 'UTC') - interval '{HOURS - 1} hours',
                             date_trunc('hour', now(), 'UTC'), interval '1 hour') AS h (hour)
        LEFT JOIN (
          SELECT hour, outcome, runs FROM dl_run_stats WHERE hour >= now() - interval '{HOURS} hours'
          UNION ALL
          SELECT date_trunc('hour', at, 'UTC'), outcome, runs FROM dl_run_stats_new
          WHERE at >= now() - interval '{HOURS} hours'
        ) AS s ON s.hour = h.hour
        GROUP BY h.hour ORDER BY h.hour
        """,
}
_OVERVIEW: Final = f"""
SELECT depths.*, {", ".join(_LIST.format(sql=sql, name=name) for name, sql in _PARTS.items())},
  (SELECT count(*) FROM (SELECT at, status FROM dl_errors ORDER BY error_id DESC LIMIT {ERRORS}) AS newest
   WHERE at > now() - interval '1 hour' AND status IN ('failed', 'lost')) AS failed
FROM ({READ}) AS depths
"""


@attrs.frozen
class PausedTask:
    """Paused task with waiting jobs; start and operator of the pause, as far as known."""

    task: Sensitive[str]
    since: datetime | None
    by: Sensitive[str | None]
    jobs: int


@attrs.frozen
class TroubledSchedule:
    """Schedule that was `paused` by a failure, is `late`, or has `missed` `times` runs since yesterday."""

    name: Sensitive[str]
    what: Annotated[str, FIXED_WORD]
    why: Sensitive[str | None]
    since: datetime | None
    times: int


@attrs.frozen
class RecentError:
    """Failures of the last hour with one error: their number, and the time of the last one."""

    number: int
    failures: int
    since: datetime
    task: Sensitive[str]
    error: Sensitive[str]

    @property
    def group(self) -> str:
        """ID of their group."""
        return group_id(self.number, None)


@attrs.frozen
class GoneProcess:
    """Process that has ended without signing off, and the time of its last process heartbeat."""

    worker: Sensitive[str]
    since: datetime


@attrs.frozen
class ProcessCount:
    """Durable processes with a status, counted up to `MOST`."""

    status: str
    processes: int


@attrs.frozen
class RunningJob:
    """Job that has run since `since`; without a `worker`, another service runs it.

    `is_declared`: this service has its task.
    """

    job_id: UUID
    queue: Sensitive[str]
    task: Sensitive[str]
    worker: Sensitive[str | None]
    attempt: int
    since: datetime | None
    is_declared: bool


@attrs.frozen
class Hour:
    """Numbers of runs that ended in an hour, by the status of their jobs."""

    hour: datetime
    succeeded: int
    failed: int
    canceled: int


@attrs.frozen
class NextSchedule:
    """Schedule whose next planned time is `at`."""

    name: str
    at: datetime | None


@attrs.frozen
class RunningRun:
    """Running load or flow, with the progress that it has reported."""

    run_id: UUID
    name: str
    since: datetime
    progress: Any


@attrs.frozen(kw_only=True)
class Overview:
    """Data of the first page. `failed`: failures of the last hour, up to `ERRORS`; `running`: the longest first."""

    paused_tasks: list[PausedTask]
    schedules: list[TroubledSchedule]
    errors: list[RecentError]
    gone: list[GoneProcess]
    processes: list[ProcessCount]
    running: list[RunningJob]
    next_schedules: list[NextSchedule]
    runs: list[RunningRun]
    hours: list[Hour]
    failed: int


async def read_overview(database: Database) -> tuple[Depths, Overview]:
    """Read all of it by one statement; the depths are counted again if they are old."""
    depths, row = await database.run(_aio_overview)
    lists: dict[str, Any] = {name: listed_json(row[name], kind) for name, kind in _KINDS.items()}
    return depths, Overview(**lists, failed=row["failed"])


_KINDS: Final = {
    "paused_tasks": PausedTask,
    "schedules": TroubledSchedule,
    "errors": RecentError,
    "gone": GoneProcess,
    "processes": ProcessCount,
    "running": RunningJob,
    "next_schedules": NextSchedule,
    "runs": RunningRun,
    "hours": Hour,
}


async def _aio_overview(connection: Any) -> tuple[Depths, Any]:
    async with connection.transaction(readonly=True):
        # The statement reads the newest rows of each table, and sorts little.
        await connection.execute("SET LOCAL enable_sort = on; SET LOCAL enable_seqscan = on")
        row = await connection.fetchrow(_OVERVIEW)
    return await aio_depths_of(connection, row), row

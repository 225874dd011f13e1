"""Poll for everything that notifications announce, in case some were lost; an idle process sends little else.

Each part is one probe of the index that the work itself uses, so its cost does not depend on the backlog.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import attrs

from dataloader.jobs.model import UNCHOSEN
from dataloader.store.connection.bridge import Database

_AFTER: Final = f"""
(SELECT e.job_id FROM dl_jobs e
 WHERE e.awaited AND e.status IN ('succeeded', 'failed', 'canceled', 'lost') ORDER BY e.job_id LIMIT 1) IS NOT NULL
OR (SELECT j.job_id FROM dl_jobs j
    WHERE j.status = 'queued' AND j.waits_for = 'after' AND j.waits_on BETWEEN '{UNCHOSEN}' AND '{UNCHOSEN}'
    ORDER BY j.waits_on, j.created_at, j.job_id LIMIT 1) IS NOT NULL
"""
_POLL: Final = f"""
SELECT
  (SELECT CASE WHEN isfinite(j.available_at) THEN extract(epoch FROM j.available_at - clock_timestamp())::float8 END
   FROM dl_jobs j WHERE j.status = 'queued' AND j.waits_for = 'time' ORDER BY j.available_at LIMIT 1) AS job_in_s,
  (SELECT CASE WHEN isfinite(s.next_at) THEN extract(epoch FROM s.next_at - clock_timestamp())::float8
               WHEN s.next_at < now() THEN 0 END
   FROM dl_schedules s WHERE NOT s.paused AND s.retired_at IS NULL ORDER BY s.next_at LIMIT 1) AS schedule_in_s,
  (SELECT b.bulk_id FROM dl_bulk b WHERE b.ended_at IS NULL ORDER BY b.worked_at LIMIT 1) IS NOT NULL AS bulk,
  {_AFTER} AS to_judge,
  ARRAY(
    SELECT q.queue FROM unnest($1::text[]) AS q (queue)
    WHERE (SELECT j.job_id FROM dl_jobs j
           WHERE j.queue BETWEEN q.queue AND q.queue AND j.status = 'queued' AND j.waits_for IS NULL
           ORDER BY j.queue, j.priority, j.created_at, j.job_id LIMIT 1) IS NOT NULL) AS ready,
  ARRAY(
    SELECT ARRAY[q.queue, l.lane] FROM unnest($1::text[]) AS q (queue) CROSS JOIN unnest($2::text[]) AS l (lane)
    WHERE (SELECT j.job_id FROM dl_jobs j
           WHERE j.lane BETWEEN l.lane AND l.lane AND j.queue BETWEEN q.queue AND q.queue
             AND j.status = 'queued' AND j.waits_for = 'limit'
           ORDER BY j.lane, j.queue, j.priority, j.created_at, j.job_id LIMIT 1) IS NOT NULL) AS lanes,
  (SELECT hashtextextended(string_agg(
     ROW(t.task, t.limited, t.override ->> 'retry_delay_s', t.at_period_end, t.periods, t.zone,
         s.periods, s.zone, s.margin_s)::text, '' ORDER BY t.task), 0)
   FROM dl_tasks t LEFT JOIN dl_sources s ON s.source = t.supplier WHERE t.task = ANY ($3::text[])) AS limits
"""
_PARKED: Final = f"""
SELECT
  (SELECT j.job_id FROM dl_jobs j WHERE j.status = 'queued' AND j.waits_for = 'lock'
   ORDER BY hashtext(j.lock_key), j.priority, j.created_at, j.job_id LIMIT 1) IS NOT NULL AS for_keys,
  {_AFTER} AS to_judge
"""


@attrs.frozen
class Polled:
    """Work found by a poll.

    Attributes:
        job_in_s: seconds until the next job that waits for its time falls due; 0 or less if it is due, None if none
            waits.
        schedule_in_s: the same for the next schedule.
        bulk: whether a bulk operation is open.
        to_judge: whether a job has ended that others run after, or a job was added that runs after others.
        ready: queues with a job that can be claimed.
        lanes: queues and lanes in which a job waits.
        limits: a number that changes with everything that a process keeps in memory of the tasks' limits: which tasks
            exist and have a lane, their retry delays, and their work periods.
    """

    job_in_s: float | None
    schedule_in_s: float | None
    bulk: bool
    to_judge: bool
    ready: frozenset[str]
    lanes: frozenset[tuple[str, str]]
    limits: int | None


@attrs.frozen
class Parked:
    """Whether jobs are parked for keys, and whether some that run after others must be evaluated."""

    for_keys: bool
    to_judge: bool


async def poll(database: Database, queues: Sequence[str], lanes: Sequence[str], tasks: Sequence[str]) -> Polled:
    """Poll once: for ready jobs of `queues`, for jobs in `lanes`, and for the limits of `tasks`."""
    return await database.run(_aio_poll, queues, lanes, tasks)


async def _aio_poll(connection: Any, *queues_lanes_and_tasks: Sequence[str]) -> Polled:
    [record] = await connection.fetch(_POLL, *map(list, queues_lanes_and_tasks))
    return Polled(
        record["job_in_s"],
        record["schedule_in_s"],
        record["bulk"],
        record["to_judge"],
        frozenset(record["ready"]),
        frozenset((queue, lane) for queue, lane in record["lanes"]),
        record["limits"],
    )


async def look_for_parked(database: Database) -> Parked:
    """Check whether jobs are parked that a wake-up may have missed; only then must a sweep continue."""
    return await database.run(_aio_look_for_parked)


async def _aio_look_for_parked(connection: Any) -> Parked:
    [record] = await connection.fetch(_PARKED)
    return Parked(record["for_keys"], record["to_judge"])

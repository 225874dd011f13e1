"""Numbers beside a list of jobs: its jobs by status, the queues and tasks of the newest ones, and served queues.

All of it is bounded: statuses are counted up to `MOST_COUNTED` jobs, and queues and tasks are those of the `SAMPLED`
newest jobs. A slow count is given up, and the list is shown without numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs

from dataloader.jobs.listings import JobFilter
from dataloader.jobs.states import Status
from dataloader.jobs.text import listed_json
from dataloader.store.connection.bridge import Database
from dataloader.store.connection.error_meanings import TIMED_OUT
from dataloader.store.queue.job_filters import condition
from dataloader.store.queue.job_rows import MOST_COUNTED
from dataloader.store.queue.reads import PLAN_OF_A_LIST
from dataloader.store.queue.worker_rows import ALIVE_WITHIN_S

SAMPLED: Final = 1_000
NAMED: Final = 8
"""Number of queues and of tasks that are named."""
_PATIENCE_MS: Final = 150

_SERVED: Final = f"""
SELECT ARRAY(SELECT queue FROM dl_queues WHERE paused) AS paused,
       ARRAY(SELECT DISTINCT k.queue FROM dl_workers w CROSS JOIN LATERAL jsonb_object_keys(w.queues) AS k (queue)
             WHERE w.seen_at > now() - make_interval(secs => {ALIVE_WITHIN_S})) AS served
"""


@attrs.frozen
class NamedCount:
    """Name of a queue or a task, and its number of jobs."""

    name: str
    jobs: int


@attrs.frozen
class JobFacets:
    """Numbers beside a list.

    Attributes:
        statuses: jobs by status, at most `MOST_COUNTED` each; empty if counting takes too long.
        queues, tasks: those with the most of the newest jobs.
    """

    statuses: Mapping[Status, int] = attrs.field(factory=dict)
    queues: Sequence[NamedCount] = ()
    tasks: Sequence[NamedCount] = ()


@attrs.frozen
class QueueService:
    """Paused queues, and queues that a live worker serves."""

    paused: frozenset[str]
    served: frozenset[str]


async def read_facets(database: Database, wanted: JobFilter) -> JobFacets:
    """Read the numbers beside a list. The statuses are counted as if the filter had none."""
    return await database.run(_aio_read_facets, wanted)


async def _aio_read_facets(connection: Any, wanted: JobFilter) -> JobFacets:
    anyway, values = condition(attrs.evolve(wanted, status=None))
    where, more = condition(wanted, first=len(values) + 1)
    sql = f"""
    WITH newest AS MATERIALIZED (
      SELECT queue, task FROM dl_jobs WHERE {where} ORDER BY created_at DESC, job_id DESC LIMIT {SAMPLED})
    SELECT (SELECT json_object_agg(s.status, c.jobs)::text
            FROM unnest(enum_range(NULL::dl_status)) AS s (status) CROSS JOIN LATERAL (
              SELECT count(*) AS jobs
              FROM (SELECT FROM dl_jobs WHERE status = s.status AND ({anyway}) LIMIT {MOST_COUNTED}) AS counted) AS c
           ) AS statuses,
           ({_most_of("queue")}) AS queues, ({_most_of("task")}) AS tasks
    """
    try:
        async with connection.transaction(readonly=True):
            await connection.execute(f"{PLAN_OF_A_LIST}; SET LOCAL statement_timeout = {_PATIENCE_MS}")
            row = await connection.fetchrow(sql, *values, *more)
    except TIMED_OUT:
        return JobFacets()
    [statuses] = listed_json(f"[{row['statuses']}]", dict[str, int])
    return JobFacets(
        {Status(status): jobs for status, jobs in statuses.items() if status in set(Status)},
        listed_json(row["queues"], NamedCount),
        listed_json(row["tasks"], NamedCount),
    )


def _most_of(column: str) -> str:
    return f"""SELECT coalesce(json_agg(m), '[]')::text FROM (
      SELECT {column} AS name, count(*) AS jobs FROM newest
      GROUP BY {column} ORDER BY count(*) DESC, {column} LIMIT {NAMED}
    ) AS m"""


async def read_queue_service(database: Database) -> QueueService:
    """Read which queues are paused, and which are served."""
    row = await database.run(_aio_read_queue_service)
    return QueueService(frozenset(row["paused"]), frozenset(row["served"]))


async def _aio_read_queue_service(connection: Any) -> Any:
    return await connection.fetchrow(_SERVED)

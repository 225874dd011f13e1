"""One error group and its jobs, for its page, and the times at which the jobs of several groups were added (R2).

Each statement reads a bounded part of `ix_dl_jobs_failing`, in the order of the index.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final
from uuid import UUID

import attrs

from dataloader.jobs.failures import ErrorGroup, ErrorGroupNotFound, group_id, group_key, group_number
from dataloader.jobs.listings import MAX_PAGE
from dataloader.jobs.model import check_between
from dataloader.jobs.page_cursor import BY_INSTANT, After
from dataloader.jobs.secrets.record_masks import Sensitive
from dataloader.jobs.states import Status
from dataloader.store.connection.bridge import Database
from dataloader.store.connection.fetching import aio_fetch
from dataloader.store.queue.job_filters import EXACT_LINE, FAILING

MAX_COUNTED: Final = 10_000
"""Maximum number of jobs counted in a group; this number means "this many or more"."""
BARS: Final = 12
DATED: Final = 1_000
"""Number of the newest jobs of each group in the chart."""

# BETWEEN instead of =: no other index has this order. Only `exact` reads the jobs; otherwise the index is enough.
_OF_GROUP: Final = f"error_group BETWEEN $1 AND $1 AND {FAILING} {{exact}}"
_EXACT: Final = f"AND {EXACT_LINE} = ${{number}}"
_HEAD: Final = f"""
WITH counted AS MATERIALIZED (
  SELECT job_id, status, created_at FROM dl_jobs WHERE {_OF_GROUP}
  ORDER BY error_group DESC, created_at DESC, job_id DESC LIMIT {MAX_COUNTED}
), sums AS (
  SELECT count(*) AS jobs, count(*) FILTER (WHERE status = 'queued') AS waiting,
         min(created_at) AS first_created_at, max(created_at) AS last_created_at
  FROM counted
)
SELECT s.*, e.job_id AS example, e.task, e.error FROM sums s CROSS JOIN LATERAL (
  SELECT job_id, task, {{shown}}(error) AS error
  FROM dl_jobs WHERE job_id = (SELECT job_id FROM counted ORDER BY created_at DESC, job_id DESC LIMIT 1)
) AS e
"""
_OF_LOG: Final = """
SELECT task, dl_error_group(error) AS error, job_id, at FROM dl_errors
WHERE error_group = $1 ORDER BY error_id DESC LIMIT 1
"""
_JOBS: Final = f"""
SELECT job_id, status::text AS status, queue, attempt, max_attempts, created_at, available_at, finished_at
FROM dl_jobs WHERE {_OF_GROUP} AND (error_group, created_at, job_id) < ($1, $2::timestamptz, $3::uuid)
ORDER BY error_group DESC, created_at DESC, job_id DESC LIMIT $4
"""
HEAD: Final = _HEAD.format(exact="", shown="dl_error_group")
_EXACT_HEAD: Final = _HEAD.format(exact=_EXACT.format(number=2), shown="dl_error_line")
JOBS: Final = _JOBS.format(exact="")
_EXACT_JOBS: Final = _JOBS.format(exact=_EXACT.format(number=5))
_BARS: Final = f"""
SELECT g.error_group, b.bar, count(*) AS jobs FROM unnest($1::bigint[]) AS g (error_group) CROSS JOIN LATERAL (
  SELECT width_bucket(s, min(s) OVER (), max(s) OVER () + 1, {BARS}) AS bar FROM (
    SELECT extract(epoch FROM created_at)::float8 AS s FROM dl_jobs
    WHERE error_group BETWEEN g.error_group AND g.error_group AND {FAILING}
    ORDER BY error_group DESC, created_at DESC LIMIT {DATED}
  ) AS newest
) AS b GROUP BY 1, 2
"""
_NEWEST: Final = (datetime(9999, 12, 31, tzinfo=UTC), UUID(int=2**128 - 1))


@attrs.frozen(kw_only=True)
class FailingJob:
    """Job of an error group."""

    job_id: UUID
    status: Status
    queue: Sensitive[str]
    attempt: int
    max_attempts: int
    created_at: datetime
    available_at: datetime
    finished_at: datetime | None


@attrs.frozen
class FailingJobs:
    """Page of a group's jobs, newest first."""

    jobs: list[FailingJob]
    next: str | None


async def get_error_group(database: Database, group: str) -> ErrorGroup:
    """Return a group as it is now, with its jobs counted up to `MAX_COUNTED`: 0 if all of them are being retried.

    Raises `ErrorGroupNotFound`, `BadRequest`.
    """
    number, exact = group_key("group", group)
    return await database.run(aio_head, number, exact)


async def aio_head(connection: Any, number: int, exact: int | None) -> ErrorGroup:
    """Return the result of `get_error_group` inside another operation (asyncio-flavored)."""
    if exact is None:
        row = await connection.fetchrow(HEAD, number)
    else:
        row = await connection.fetchrow(_EXACT_HEAD, number, exact)
    name = group_id(number, exact)
    if row is not None:
        return ErrorGroup(group=name, **row)
    logged = await connection.fetchrow(_OF_LOG, number)
    if logged is None:
        raise ErrorGroupNotFound(f"the error log has no job with the error {name!r}")
    return ErrorGroup(
        group=name,
        task=logged["task"],
        error=logged["error"],
        jobs=0,
        waiting=0,
        first_created_at=logged["at"],
        last_created_at=logged["at"],
        example=logged["job_id"],
    )


async def list_failing_jobs(database: Database, group: str, *, limit: int = 50, after: After = None) -> FailingJobs:
    """Return at most `limit` (1 to 1,000) jobs of a group, newest first, behind `after`. Raises `BadRequest`."""
    check_between("limit", limit, 1, MAX_PAGE)
    number, exact = group_key("group", group)
    behind = _NEWEST if after is None else BY_INSTANT.key(after)
    values = (number, *behind, limit + 1)
    if exact is None:
        rows = await database.run(aio_fetch, JOBS, *values)
    else:
        rows = await database.run(aio_fetch, _EXACT_JOBS, *values, exact)
    jobs = [FailingJob(**dict(row) | {"status": Status(row["status"])}) for row in rows]
    return FailingJobs(*BY_INSTANT.page(jobs, limit, lambda job: (job.created_at, job.job_id)))


async def bars_of_groups(database: Database, groups: Sequence[str]) -> dict[str, list[int]]:
    """Return for each group the number of its newest `DATED` jobs added in each twelfth of the time, oldest first."""
    rows = await database.run(aio_fetch, _BARS, [group_number("group", group) for group in groups])
    bars: dict[str, list[int]] = {}
    for row in rows:
        bars.setdefault(group_id(row["error_group"], None), [0] * BARS)[row["bar"] - 1] = row["jobs"]
    return bars

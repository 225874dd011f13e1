"""Failures in the tables (R2, S6): error groups, the retry of a group, and the error log.

A trigger gives each failed job the number of its group and writes the log, for jobs of every service. Counting the jobs
of all groups is one scan of `ix_dl_jobs_failing`, in its order. It reads one job of each group that is shown, and only
for these groups the times at which their first and last jobs were added. Exact groups read a bounded number of jobs.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Final
from uuid import UUID

import attrs
from msgspec import Meta

from dataloader.jobs.contract import MAX_BULK, Operator
from dataloader.jobs.failures import (
    STATUSES,
    ErrorGroup,
    ErrorGroupPage,
    ErrorPage,
    ErrorRecord,
    FailureState,
    GroupRetried,
    GroupRetry,
    check_state,
    group_id,
    group_key,
    group_number,
)
from dataloader.jobs.listings import MAX_PAGE
from dataloader.jobs.model import MAX_INT, check_between, check_text
from dataloader.jobs.page_cursor import BY_INSTANT, BY_NUMBER, After, PageCursor
from dataloader.jobs.states import Status
from dataloader.store.connection.bridge import Database
from dataloader.store.queue.control import (
    TO_RETRY,
    aio_audit,
    aio_revive_jobs,
    aio_short_transaction,
    newest_of_keys,
)
from dataloader.store.queue.failing_jobs import aio_head
from dataloader.store.queue.job_filters import EXACT_LINE, FAILING
from dataloader.store.queue.make_ready import unpark

_Big = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
_BY_SIZE: Final = PageCursor(tuple[_Big, _Big, _Big])
"""Order of the groups: the negative number of jobs, then the group's numbers."""
_FIRST: Final = (-(2**63), 0, 0)

MOST_WALKED: Final = 20_000
"""Maximum number of groups read for a list of one task, the largest first, and of jobs read for an exact list."""
MOST_OF_KIND: Final = 1_000
"""Maximum number of jobs of one kind of error that an exact list reads, the newest first."""

_OF_STATE: Final = "AND (status = ANY ($1::dl_status[])) IS TRUE"
_OF_GROUP: Final = f"FROM dl_jobs WHERE error_group BETWEEN p.error_group AND p.error_group AND {FAILING} {_OF_STATE}"
_OLDEST: Final = "ORDER BY error_group, created_at, job_id LIMIT 1"
_NEWEST: Final = "ORDER BY error_group DESC, created_at DESC, job_id DESC LIMIT"
# All jobs of a group have the same task, so the newest job gives the task.
_GROUPS: Final = f"""
WITH counted AS MATERIALIZED (
  SELECT error_group, NULL::bigint AS exact, count(*) AS jobs, count(*) FILTER (WHERE status = 'queued') AS waiting
  FROM dl_jobs WHERE error_group IS NOT NULL AND {FAILING} {{of_state}} GROUP BY error_group
), page AS MATERIALIZED (
  SELECT p.*, l.created_at AS last_created_at, l.job_id AS example FROM (
    SELECT * FROM counted WHERE (-jobs, error_group, 0) > ($2::bigint, $3::bigint, $4::bigint)
    ORDER BY jobs DESC, error_group LIMIT {{most}}
  ) AS p CROSS JOIN LATERAL (SELECT job_id, created_at, task {_OF_GROUP} {_NEWEST} 1) AS l
  {{of_task}} ORDER BY p.jobs DESC, p.error_group LIMIT $5
)
SELECT p.*, f.created_at AS first_created_at, e.task, dl_error_group(e.error) AS error
FROM page p
CROSS JOIN LATERAL (SELECT created_at {_OF_GROUP} {_OLDEST}) AS f
JOIN dl_jobs e ON e.job_id = ANY (ARRAY[p.example])
ORDER BY p.jobs DESC, p.error_group
"""
# Only the jobs have the whole first line, so jobs are read, up to the bounds, the kinds with the most jobs first.
_EXACT_GROUPS: Final = f"""
WITH kinds AS MATERIALIZED (
  SELECT error_group FROM dl_jobs WHERE error_group IS NOT NULL AND {FAILING} {_OF_STATE}
  GROUP BY error_group ORDER BY count(*) DESC, error_group LIMIT {MOST_WALKED}
), read AS MATERIALIZED (
  SELECT p.error_group, j.* FROM kinds p CROSS JOIN LATERAL (
    SELECT job_id, status, created_at, error {_OF_GROUP} {_NEWEST} {MOST_OF_KIND}
  ) AS j
  WHERE $6::text IS NULL OR $6 = (
    SELECT task FROM dl_jobs WHERE error_group BETWEEN p.error_group AND p.error_group AND {FAILING} {_NEWEST} 1)
  LIMIT {MOST_WALKED}
), counted AS MATERIALIZED (
  SELECT error_group, {EXACT_LINE} AS exact, count(*) AS jobs, count(*) FILTER (WHERE status = 'queued') AS waiting,
         min(created_at) AS first_created_at, max(created_at) AS last_created_at,
         (array_agg(job_id ORDER BY created_at DESC, job_id DESC))[1] AS example
  FROM read GROUP BY 1, 2
), page AS MATERIALIZED (
  SELECT * FROM counted WHERE (-jobs, error_group, exact) > ($2::bigint, $3::bigint, $4::bigint)
  ORDER BY jobs DESC, error_group, exact LIMIT $5
)
SELECT p.*, e.task, dl_error_line(e.error) AS error
FROM page p JOIN dl_jobs e ON e.job_id = ANY (ARRAY[p.example])
ORDER BY p.jobs DESC, p.error_group, p.exact
"""

# BETWEEN instead of =: no other index has this order.
_NEXT_OF_GROUP: Final = f"""
SELECT job_id, created_at FROM dl_jobs
WHERE error_group BETWEEN $1 AND $1 AND {FAILING} AND (error_group, created_at, job_id) > ($1, $2, $3)
ORDER BY error_group, created_at, job_id LIMIT $4
"""
# The newest version of each row is checked again once it is locked: a job that has begun meanwhile is skipped.
_LOCK_GROUP: Final = f"""
SELECT job_id, status, unique_key,
       CASE WHEN keyed AND status = 'queued' AND waits_for IS NULL THEN hashtext(lock_key) END AS hash
FROM dl_jobs
WHERE job_id = ANY ($1::uuid[]) AND (error_group = $2) IS TRUE AND (status = ANY ($3::dl_status[])) IS TRUE
  AND ($4::bigint IS NULL OR {EXACT_LINE} = $4) AND (status = 'queued' OR {TO_RETRY})
ORDER BY job_id FOR NO KEY UPDATE
"""
# A job that waits for its key or for other jobs continues to wait; the triggers handle postponed jobs.
_MOVE: Final = """
WITH due AS MATERIALIZED (
  SELECT id, greatest($2::timestamptz, now())
             + make_interval(secs => $3::float8 * (hashtextextended(id::text, 0) & 1048575) / 1048576) AS at
  FROM unnest($1::uuid[]) AS u (id)
)
UPDATE dl_jobs j SET available_at = CASE WHEN d.at <= now() THEN least(j.available_at, now()) ELSE d.at END,
                     waits_for = CASE WHEN j.waits_for IN ('lock', 'after') THEN j.waits_for END
FROM due d WHERE j.job_id = ANY (ARRAY[d.id])
"""
_EARLIEST: Final = datetime(1, 1, 1, tzinfo=UTC)
_BEFORE_ALL: Final = (_EARLIEST, UUID(int=0))

_LOG: Final = """
SELECT error_id, at, job_id, task, queue, attempt, worker, status::text AS status, error_group, error FROM dl_errors
WHERE error_id < $1 {where} ORDER BY error_id DESC LIMIT $2
"""


async def list_error_groups(
    database: Database,
    *,
    task: str | None = None,
    state: FailureState | None = None,
    exact: bool = False,
    limit: int = 50,
    after: After = None,
) -> ErrorGroupPage:
    """Return a page of at most `limit` (1 to 1,000) groups behind `after`, those with the most jobs first.

    With `exact`, groups differ by the whole first line: the newest `MOST_OF_KIND` jobs of each kind of error are read,
    and at most `MOST_WALKED` in total. With a `task`, the largest `MOST_WALKED` groups are read. Raises `BadRequest`.
    """
    check_between("limit", limit, 1, MAX_PAGE)
    check_state(state)
    if task is not None:
        check_text("task", task, MAX_INT, empty=True)
    values = [sorted(STATUSES[state]), *(_FIRST if after is None else _BY_SIZE.key(after)), limit + 1]
    if exact:
        sql = _EXACT_GROUPS
        values.append(task)
    else:
        sql = _GROUPS.format(
            of_state="" if state is None else _OF_STATE,
            most="$5" if task is None else MOST_WALKED,
            of_task="" if task is None else "WHERE l.task = $6",
        )
        values += [] if task is None else [task]
    rows, following = _BY_SIZE.page(
        await database.run(_aio_error_groups, sql, values),
        limit,
        lambda row: (-row["jobs"], row["error_group"], row["exact"] or 0),
    )
    return ErrorGroupPage([_group_of(row) for row in rows], following)


async def _aio_error_groups(connection: Any, sql: str, values: list[Any]) -> list[Any]:
    async with connection.transaction(readonly=True):
        # The plan must follow the order of the index, whatever the statistics say: groups are contiguous there.
        await connection.execute(
            "SET LOCAL plan_cache_mode = force_custom_plan; SET LOCAL enable_bitmapscan = off;"
            " SET LOCAL enable_hashagg = off; SET LOCAL max_parallel_workers_per_gather = 0"
        )
        return list(await connection.fetch(sql, *values))


def _group_of(row: Any) -> ErrorGroup:
    fields = dict(row)
    return ErrorGroup(group=group_id(fields.pop("error_group"), fields.pop("exact")), **fields)


async def retry_group(
    database: Database, wanted: GroupRetry, operator: Operator, *, limit: int = 1_000, after: After = None
) -> GroupRetried:
    """Retry at most `limit` (1 to 10,000) jobs of a group behind `after`, oldest first, in one transaction.

    Jobs that have failed finally are queued as if they were new. For jobs that wait for a retry, the next attempt is
    moved. A job that has begun meanwhile is skipped. Raises `ErrorGroupNotFound`, and `BadRequest`.
    """
    check_between("limit", limit, 1, MAX_BULK)
    behind = _BEFORE_ALL if after is None else BY_INSTANT.key(after)
    retried, lock_hashes = await database.write(_aio_retry_group, wanted, operator, limit, behind)
    await unpark(database, lock_hashes)
    return retried


async def _aio_retry_group(
    connection: Any, wanted: GroupRetry, operator: Operator, limit: int, behind: tuple[datetime, UUID]
) -> tuple[GroupRetried, list[int]]:
    group, exact = group_key("group", wanted.group)
    async with aio_short_transaction(connection):
        found = await connection.fetch(_NEXT_OF_GROUP, group, *behind, limit)
        if not found and behind == _BEFORE_ALL:
            await aio_head(connection, group, exact)
        ids = [row["job_id"] for row in found]
        rows = await connection.fetch(_LOCK_GROUP, ids, group, sorted(STATUSES[wanted.state]), exact)
        ended = newest_of_keys([row for row in rows if row["status"] != Status.QUEUED])
        rows = [row for row in rows if row["status"] == Status.QUEUED] + ended
        if ended:
            await aio_revive_jobs(connection, ended, operator)
        # Jobs that were queued again are due now.
        is_later = wanted.at is not None or wanted.spread_s > 0
        moved = [row["job_id"] for row in rows if is_later or row["status"] == Status.QUEUED]
        await connection.execute(_MOVE, moved, wanted.at or _EARLIEST, wanted.spread_s)
        given = {name: value for name, value in attrs.asdict(wanted).items() if value}
        detail = given | {"limit": limit, "retried": len(rows)}
        await aio_audit(connection, operator, "retry_group", None, detail)
    following = None
    if len(found) == limit:
        following = BY_INSTANT.text((found[-1]["created_at"], found[-1]["job_id"]))
    return GroupRetried(len(rows), following), sorted({row["hash"] for row in rows if row["hash"] is not None})


async def list_errors(
    database: Database,
    *,
    task: str | None = None,
    queue: str | None = None,
    group: str | None = None,
    job_id: UUID | None = None,
    limit: int = 100,
    after: After = None,
) -> ErrorPage:
    """Return a page of the error log, latest first: at most `limit` (1 to 1,000) rows behind `after`.

    Raises `BadRequest`.
    """
    check_between("limit", limit, 1, MAX_PAGE)
    given: dict[str, Any] = {"task": task, "queue": queue, "error_group": group, "job_id": job_id}
    for name in ("task", "queue"):
        if given[name] is not None:
            check_text(name, given[name], MAX_INT, empty=True)
    if group is not None:
        given["error_group"] = group_number("group", group)
    given = {name: value for name, value in given.items() if value is not None}
    where = "".join(f" AND {name} = ${number}" for number, name in enumerate(given, 3))
    newest = 2**63 - 1 if after is None else BY_NUMBER.key(after)
    rows = await database.run(_aio_errors, _LOG.format(where=where), newest, limit + 1, *given.values())
    return ErrorPage(*BY_NUMBER.page(rows, limit, lambda row: row.error_id))


async def _aio_errors(connection: Any, sql: str, *values: Any) -> list[ErrorRecord]:
    return list(map(error_of, await connection.fetch(sql, *values)))


def error_of(row: Any) -> ErrorRecord:
    """Return the record of a row of the log, with its status as text."""
    fields = dict(row)
    group = group_id(fields.pop("error_group"), None)
    return ErrorRecord(**fields | {"group": group, "status": Status(fields["status"])})

"""Lists of jobs for pages: a row each, without args and results, which may have megabytes.

A page is a scan of an index, newest first, as in `reads.list_jobs`. Filters without an index (a task alone, text in
args) may exceed the page's deadline: the statement ends after `PATIENCE_S`, and the page says so.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final
from uuid import UUID

import attrs
import trio

from dataloader.jobs.args_pattern import ArgsPattern
from dataloader.jobs.listings import JobFilter
from dataloader.jobs.page_cursor import BY_INSTANT, After
from dataloader.jobs.secrets.record_masks import Sensitive
from dataloader.jobs.states import Status, WaitsFor
from dataloader.jobs.text import shown_json
from dataloader.store.connection.bridge import Database
from dataloader.store.connection.error_meanings import TIMED_OUT
from dataloader.store.queue.job_filters import condition
from dataloader.store.queue.reads import PLAN_OF_A_LIST, list_statement

PATIENCE_S: Final = 2.0
MOST_COUNTED: Final = 10_000
SEARCHED: Final = 20_000
"""Number of jobs whose args one request reads."""
_COUNT_MS: Final = 100
"""Maximum duration of a count; a slower one is not shown."""
_READ: Final = 200
"""Number of jobs whose args are read and masked together."""
_MAX_ARGS: Final = 100_000
"""Longer args, in bytes, are not searched."""
_MAX_LINE: Final = 2_000
"""Number of characters read of an error's first line; mask the line before it is cut further."""

COLUMNS: Final = f"""
job_id, queue, task, status, waits_for, CASE WHEN keyed THEN left(lock_key, 600) END AS lock_key, priority, attempt,
max_attempts, cancel_requested, schedule, claimed_by, created_at,
CASE WHEN isfinite(available_at) THEN available_at END AS available_at,
coalesce(run_started_at, started_at) AS started_at, finished_at,
left(split_part(error, E'\\n', 1), {_MAX_LINE}) AS error,
CASE WHEN status = 'running' AND octet_length(progress::text) <= {_MAX_LINE} THEN progress::text END AS progress
"""
_SELECT: Final = f"SELECT {COLUMNS} FROM dl_jobs"
_SEARCH: Final = """
SELECT count(*) AS searched, min(created_at) AS begin, (array_agg(job_id ORDER BY created_at, job_id))[1] AS last,
       coalesce(array_agg(job_id ORDER BY created_at DESC, job_id DESC) FILTER (WHERE fits), '{{}}') AS found
FROM (SELECT created_at, job_id, args @> ANY (${pattern}::text[]::jsonb[]) AS fits FROM ({rows}) AS rows) AS scanned
"""
_OF_IDS: Final = f"""
SELECT {COLUMNS}, CASE WHEN octet_length(args::text) <= {_MAX_ARGS} THEN args::text END AS args
FROM dl_jobs WHERE job_id = ANY ($1::uuid[]) ORDER BY created_at DESC, job_id DESC
"""


@attrs.frozen(kw_only=True)
class JobRow:
    """Job in a list.

    `error` is the beginning of its first line; `started_at` is the start of its last run. `progress` is what a running
    job has reported, unless it is long.
    """

    job_id: UUID
    queue: Sensitive[str]
    task: Sensitive[str]
    status: Status
    waits_for: WaitsFor | None
    lock_key: Sensitive[str | None]
    priority: int
    attempt: int
    max_attempts: int
    cancel_requested: bool
    schedule: Sensitive[str | None]
    claimed_by: Sensitive[str | None]
    created_at: datetime
    available_at: datetime | None
    started_at: datetime | None
    finished_at: datetime | None
    error: Sensitive[str | None]
    progress: Sensitive[Any] = None

    @property
    def took(self) -> timedelta | None:
        """Duration of its last run; None if it has not ended, or never ran."""
        if self.started_at is None or self.finished_at is None or not self.status.is_final:
            return None
        return max(self.finished_at - self.started_at, timedelta())


InThread = Callable[[Callable[[], list[JobRow]]], Awaitable[list[JobRow]]]
"""Function that runs another one in a thread and returns its result."""


@attrs.frozen(kw_only=True)
class JobRows:
    """Page of a list.

    Attributes:
        rows: the jobs of the page.
        next: the position of the next page.
        count: number of jobs that match the filter, at most `MOST_COUNTED`; None if counting takes too long.
        searched: number of jobs whose args were read; None without a search.
        is_whole: whether the search ended within `PATIENCE_S`.
    """

    rows: Sequence[JobRow] = ()
    next: str | None = None
    count: int | None = None
    searched: int | None = None
    is_whole: bool = True


def row_of_list(record: Mapping[str, Any]) -> JobRow:
    """Return the row of a record with `COLUMNS`."""
    values = {field.name: record[field.name] for field in attrs.fields(JobRow)}
    waits_for = record["waits_for"]
    values["status"] = Status(record["status"])
    values["progress"] = None if record["progress"] is None else shown_json(record["progress"])
    values["waits_for"] = WaitsFor(waits_for) if waits_for in set(WaitsFor) else None
    return JobRow(**values)


def _place_in_list(row: JobRow) -> str:
    return BY_INSTANT.text((row.created_at, row.job_id))


async def list_job_rows(
    database: Database, wanted: JobFilter, *, limit: int, after: After = None, count: bool = False
) -> JobRows:
    """Return a page of at most `limit` jobs, newest first; with `count`, also their number, if counting is quick."""
    key = None if after is None else BY_INSTANT.key(after)
    return await database.run(_aio_list_job_rows, wanted, limit, key, count=count)


async def _aio_list_job_rows(
    connection: Any, wanted: JobFilter, limit: int, key: tuple[datetime, UUID] | None, *, count: bool
) -> JobRows:
    sql, values = list_statement(_SELECT, wanted, limit + 1, key)
    try:
        async with connection.transaction(readonly=True):
            await connection.execute(f"{PLAN_OF_A_LIST}; SET LOCAL statement_timeout = {PATIENCE_S * 1000:.0f}")
            rows = list(map(row_of_list, await connection.fetch(sql, *values)))
            number = await _aio_count_job_rows(connection, wanted) if count else None
    except TIMED_OUT:
        return JobRows(is_whole=False)
    more = len(rows) > limit
    return JobRows(rows=rows[:limit], next=_place_in_list(rows[limit - 1]) if more else None, count=number)


async def _aio_count_job_rows(connection: Any, wanted: JobFilter) -> int | None:
    where, values = condition(wanted)
    try:
        async with connection.transaction():
            await connection.execute(f"SET LOCAL statement_timeout = {_COUNT_MS}")
            sql = f"SELECT count(*) FROM (SELECT FROM dl_jobs WHERE {where} LIMIT {MOST_COUNTED}) AS jobs"
            number: int = await connection.fetchval(sql, *values)
    except TIMED_OUT:
        return None
    return number


async def search_job_rows(
    database: Database,
    wanted: JobFilter,
    pattern: ArgsPattern,
    *,
    limit: int,
    after: After = None,
    in_thread: InThread,
) -> JobRows:
    """Return a page like `list_job_rows`, filtered by args. Reads the args of at most `SEARCHED` jobs.

    Matches are checked again without their secrets by `in_thread`, so that the end of the search reveals nothing of
    them.
    """
    until = trio.current_time() + PATIENCE_S
    key = None if after is None else BY_INSTANT.key(after)
    found = await database.run(_aio_search_args, wanted, pattern, key)
    if found is None:
        return JobRows(searched=0, is_whole=False)
    rows: list[JobRow] = []
    ids = found["found"]
    for begin in range(0, len(ids), _READ):
        if trio.current_time() > until:
            return JobRows(searched=0, is_whole=False)
        records = await database.run(_aio_of_ids, ids[begin : begin + _READ])
        rows += await in_thread(partial(_showing, records, pattern))
        if len(rows) > limit:
            return JobRows(rows=rows[:limit], next=_place_in_list(rows[limit - 1]), searched=found["searched"])
    goes_on = found["searched"] == SEARCHED
    place = BY_INSTANT.text((found["begin"], found["last"])) if goes_on else None
    return JobRows(rows=rows, next=place, searched=found["searched"])


async def _aio_search_args(
    connection: Any, wanted: JobFilter, pattern: ArgsPattern, key: tuple[datetime, UUID] | None
) -> Mapping[str, Any] | None:
    rows, values = list_statement("SELECT created_at, job_id, args FROM dl_jobs", wanted, SEARCHED, key)
    sql = _SEARCH.format(rows=rows, pattern=len(values) + 1)
    try:
        async with connection.transaction(readonly=True):
            await connection.execute(f"{PLAN_OF_A_LIST}; SET LOCAL statement_timeout = {PATIENCE_S * 1000:.0f}")
            found: Mapping[str, Any] = await connection.fetchrow(sql, *values, pattern.texts)
    except TIMED_OUT:
        return None
    return found


async def _aio_of_ids(connection: Any, ids: Sequence[UUID]) -> list[Mapping[str, Any]]:
    return list(await connection.fetch(_OF_IDS, ids))


def _showing(records: Sequence[Mapping[str, Any]], pattern: ArgsPattern) -> list[JobRow]:
    return [
        row_of_list(record)
        for record in records
        if record["args"] is not None and pattern.shows_in(shown_json(record["args"]))
    ]

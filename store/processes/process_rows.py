"""Processes for the lists of pages: without their states, with the numbers of waiting calls and of processes.

Each read is limited: a page of rows, calls of a process up to `MOST_WAITING`, processes up to `MOST_COUNTED`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Final

import attrs
from msgspec import Meta

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.failures import group_id
from dataloader.jobs.page_cursor import After, PageCursor
from dataloader.jobs.process_listings import ProcessErrorGroup, ProcessFilter, ProcessTimer, RunningStep
from dataloader.jobs.secrets.record_masks import FIXED_WORD, Sensitive
from dataloader.jobs.text import shown_json
from dataloader.store.connection.bridge import Database
from dataloader.store.connection.error_meanings import TIMED_OUT
from dataloader.store.connection.fetching import aio_fetch
from dataloader.store.processes.search import PLAN, TYPES, aio_keys, group_of, statuses_of

MOST_COUNTED: Final = 10_000
"""Maximum count of processes. The actual number may be greater."""
MOST_WAITING: Final = 100
"""Maximum count of the calls of one process."""
PATIENCE_S: Final = 2.0
"""Seconds after which a search is stopped, so that it must be narrowed."""
_MAX_METADATA: Final = 2_000
_MAX_DETAIL: Final = 300
_MOST_TYPES: Final = 100
_BY_KEY: Final = PageCursor(tuple[Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]])


def brief(column: str, most: int) -> str:
    """Return a JSON column for a SELECT, as text, or NULL above `most` bytes; `has_…` is true if there is a value.

    The stored size is checked first, because long values must not be read only for that.
    """
    text = f"{column}::text"
    name = column.rpartition(".")[2]
    return (
        f"CASE WHEN pg_column_size({column}) > {most} THEN NULL WHEN octet_length({text}) <= {most} THEN {text} END"
        f" AS {name}, {column} IS NOT NULL AS has_{name}"
    )


_ROWS: Final = f"""
SELECT p.key, p.type, p.process_id, p.version, p.status, p.status_changed_at, p.created_at,
       left(p.detail, {_MAX_DETAIL}) AS detail, {brief("p.metadata", _MAX_METADATA)}, p.timer_task, p.timer_kind,
       p.timer_at, p.timer_attempt, p.running_task, p.running_kind, p.running_at, w.waiting
FROM dl_processes p
CROSS JOIN LATERAL (
  SELECT count(*) AS waiting FROM (
    SELECT FROM dl_process_tasks t
    WHERE t.key = p.key AND t.status = 'waiting' AND t.task_id IS DISTINCT FROM p.running_task LIMIT {MOST_WAITING}
  ) AS calls
) AS w
WHERE p.key = ANY ($1::bigint[]) AND p.removed_at IS NULL ORDER BY p.key DESC
"""
_COUNT: Final = f"""
WITH {{types}}
SELECT count(*) FROM (
  SELECT FROM types t CROSS JOIN unnest($1::text[]) AS s (status) CROSS JOIN LATERAL (
    SELECT FROM dl_processes
    WHERE removed_at IS NULL AND type = t.type AND status = s.status LIMIT {MOST_COUNTED}
  ) AS k LIMIT {MOST_COUNTED}
) AS processes
"""
_COUNT_OF_GROUP: Final = f"""
WITH {{types}}
SELECT count(*) FROM (
  SELECT FROM types t CROSS JOIN LATERAL (
    SELECT FROM dl_processes
    WHERE removed_at IS NULL AND status = 'error' AND type = t.type AND error_group = $1 LIMIT {MOST_COUNTED}
  ) AS k LIMIT {MOST_COUNTED}
) AS processes
"""
_GROUP: Final = f"""
SELECT c.processes, e.type, e.process_id AS example, e.status_changed_at AS since,
       dl_error_group(e.detail) AS error
FROM (
  SELECT key, type, error_group, process_id, status_changed_at, detail FROM dl_processes
  WHERE removed_at IS NULL AND status = 'error' AND type BETWEEN $1 AND $1 AND error_group BETWEEN $2 AND $2
  ORDER BY type DESC, error_group DESC, key DESC LIMIT 1
) AS e CROSS JOIN LATERAL (
  SELECT count(*) AS processes FROM (
    SELECT FROM dl_processes
    WHERE removed_at IS NULL AND status = 'error' AND type = $1 AND error_group = $2 LIMIT {MOST_COUNTED}
  ) AS those
) AS c
"""
_KNOWN: Final = f"""
WITH {TYPES}
SELECT type FROM (
  SELECT type FROM types WHERE type IS NOT NULL
  UNION SELECT substring(task FROM '^process[.](.*)[.]v[0-9]+$') FROM dl_tasks WHERE starts_with(task, 'process.')
) AS known WHERE type IS NOT NULL ORDER BY type LIMIT {_MOST_TYPES}
"""


@attrs.frozen(kw_only=True)
class ProcessRow:
    """Process in a list. `metadata` is None if it is long. `waiting` counts calls up to `MOST_WAITING`."""

    type: Sensitive[str]
    process_id: Sensitive[str]
    version: int
    status: Annotated[str, FIXED_WORD]
    status_changed_at: datetime
    created_at: datetime
    detail: Sensitive[str | None]
    metadata: Sensitive[dict[str, Any] | None]
    timer: ProcessTimer | None
    running: RunningStep | None
    waiting: int


@attrs.frozen(kw_only=True)
class ProcessRows:
    """Page of a list.

    Attributes:
        count: number of processes that match the filter, `MOST_COUNTED` if there are more; None if they were not
            counted.
        is_whole: whether the search ended within `PATIENCE_S`.
    """

    rows: Sequence[ProcessRow] = ()
    next: str | None = None
    count: int | None = None
    is_whole: bool = True


async def list_process_rows(
    database: Database, wanted: ProcessFilter, *, limit: int, after: After = None, count: bool = False
) -> ProcessRows:
    """Return a page of at most `limit` processes, newest first, with their number if `count`. Raises `BadRequest`."""
    (before,) = (2**63 - 1,) if after is None else _BY_KEY.key(after)
    found = await database.run(_aio_list_process_rows, wanted, limit, before, count=count)
    if found is None:
        return ProcessRows(is_whole=False)
    rows, number = found
    more = len(rows) > limit
    if number is None and after is None and not more:
        number = len(rows)
    return ProcessRows(
        rows=list(map(_row_of, rows[:limit])),
        next=_BY_KEY.text((rows[limit - 1]["key"],)) if more else None,
        count=number,
    )


async def _aio_list_process_rows(
    connection: Any, wanted: ProcessFilter, limit: int, before: int, *, count: bool
) -> tuple[list[Any], int | None] | None:
    try:
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            await connection.execute(f"{PLAN}; SET LOCAL statement_timeout = {PATIENCE_S * 1000:.0f}")
            keys = await aio_keys(connection, wanted, before, limit + 1)
            rows = list(await connection.fetch(_ROWS, keys))
            counts = count and len(keys) > limit and wanted.metadata is None
            return rows, await _aio_count_process_rows(connection, wanted) if counts else None
    except TIMED_OUT:
        return None


async def _aio_count_process_rows(connection: Any, wanted: ProcessFilter) -> int:
    group = group_of(wanted)
    sql = _COUNT if group is None else _COUNT_OF_GROUP
    values: list[Any] = [statuses_of(wanted) if group is None else group]
    types = TYPES
    if wanted.type is not None:
        types = f"types (type) AS (VALUES (${len(values) + 1}::text))"
        values.append(wanted.type)
    number: int = await connection.fetchval(sql.format(types=types), *values)
    return number


def _row_of(row: Mapping[str, Any]) -> ProcessRow:
    names = ("type", "process_id", "version", "status", "status_changed_at", "created_at", "detail", "waiting")
    return ProcessRow(
        **{name: row[name] for name in names},
        metadata=None if row["metadata"] is None else shown_json(row["metadata"]),
        timer=timer_of(row, context=None),
        running=running_of(row),
    )


def timer_of(row: Mapping[str, Any], *, context: Any) -> ProcessTimer | None:
    """Return the timer in a process's row."""
    if row["timer_task"] is None:
        return None
    return ProcessTimer(
        task_id=row["timer_task"],
        kind=row["timer_kind"],
        at=row["timer_at"],
        attempt=row["timer_attempt"],
        context=context,
    )


def running_of(row: Mapping[str, Any]) -> RunningStep | None:
    """Return the running step, by the mark in a process's row."""
    if row["running_task"] is None:
        return None
    return RunningStep(task_id=row["running_task"], kind=row["running_kind"], since=row["running_at"])


async def get_process_error(database: Database, process_type: str, group: str) -> ProcessErrorGroup | None:
    """Return the current group of errors, its processes counted up to `MOST_COUNTED`; None if it has no process.

    Raises `BadRequest`.
    """
    number = group_of(ProcessFilter(type=process_type, error_group=group))
    if number is None:
        raise BadRequest("error_group", "is required")
    row = await database.run(_aio_row, _GROUP, process_type, number)
    if row is None:
        return None
    fields = {name: row[name] for name in ("type", "error", "processes", "example", "since")}
    return ProcessErrorGroup(group=group_id(number, None), **fields)


async def known_types(database: Database) -> list[str]:
    """Return the types that have processes or that workers have declared, by name."""
    return [row["type"] for row in await database.run(aio_fetch, _KNOWN)]


async def _aio_row(connection: Any, sql: str, *values: Any) -> Any:
    return await connection.fetchrow(sql, *values)

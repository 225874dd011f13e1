"""Search of processes by type, status, metadata and error, and counts by error.

A page walks an index from its end: the index of type and status for each type, or the index of errors. A search by
metadata first examines the newest `WALK` processes, which finds common metadata. Rare metadata is found by the index of
metadata.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import trio
from msgspec import Meta

from dataloader.jobs.failures import group_id, group_number
from dataloader.jobs.listings import MAX_PAGE
from dataloader.jobs.model import check_between
from dataloader.jobs.page_cursor import After, PageCursor
from dataloader.jobs.process_listings import (
    PROCESS_STATUSES,
    ProcessErrorGroup,
    ProcessErrorPage,
    ProcessFilter,
    ProcessPage,
)
from dataloader.jobs.processes import check_metadata, check_type
from dataloader.store.connection.bridge import Database
from dataloader.store.connection.fetching import aio_fetch
from dataloader.store.processes.reads import LONG, RECORD, record_of
from dataloader.store.queue.reads import MAX_PAGE_TEXT, aio_fetch_page

WALK: Final = 5_000
"""Processes that a search by metadata examines before it uses the index."""

_Big = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
_BY_KEY: Final = PageCursor(tuple[_Big])
_BY_SIZE: Final = PageCursor(tuple[_Big, str, _Big])
"""Most processes first: their negative number, then their type and the number of the group."""

PLAN: Final = (
    "SET LOCAL plan_cache_mode = force_custom_plan; SET LOCAL enable_hashagg = off;"
    " SET LOCAL max_parallel_workers_per_gather = 0"
)
"""Planner settings for a search: the best index depends on the values of a filter."""
# $1 is the upper limit of the keys, $2 the maximum number. BETWEEN instead of =: no other index has this order.
_NEWEST: Final = "SELECT key FROM dl_processes WHERE removed_at IS NULL AND key < $1 ORDER BY key DESC LIMIT $2"
TYPES: Final = """
RECURSIVE types (type) AS (
  (SELECT type FROM dl_processes WHERE removed_at IS NULL ORDER BY type LIMIT 1)
  UNION ALL
  SELECT (SELECT p.type FROM dl_processes p WHERE p.removed_at IS NULL AND p.type > t.type ORDER BY p.type LIMIT 1)
  FROM types t WHERE t.type IS NOT NULL
)
"""
"""Existing types, each by one index lookup. Follows WITH."""
_NEWEST_OF_EACH: Final = """
WITH {types}
SELECT k.key FROM types t CROSS JOIN unnest({statuses}::text[]) AS s (status) CROSS JOIN LATERAL (
  SELECT key FROM dl_processes
  WHERE removed_at IS NULL AND type BETWEEN t.type AND t.type AND status BETWEEN s.status AND s.status
    AND key < $1
  ORDER BY type DESC, status DESC, key DESC LIMIT $2
) AS k ORDER BY k.key DESC LIMIT $2
"""
# At most one of each type, so finding them needs no order.
_OF_ID: Final = """
WITH {types}
SELECT p.key FROM types t CROSS JOIN LATERAL (
  SELECT key, status, error_group FROM dl_processes
  WHERE type = t.type AND process_id = {id} AND removed_at IS NULL ORDER BY type, process_id LIMIT 1
) AS p
WHERE p.status = ANY ({statuses}::text[]) AND p.key < $1 {more} ORDER BY p.key DESC LIMIT $2
"""
_NEWEST_OF_GROUP: Final = """
WITH {types}
SELECT k.key FROM types t CROSS JOIN LATERAL (
  SELECT key FROM dl_processes
  WHERE removed_at IS NULL AND status = 'error' AND type BETWEEN t.type AND t.type
    AND error_group BETWEEN {group} AND {group} AND key < $1
  ORDER BY type DESC, error_group DESC, key DESC LIMIT $2
) AS k ORDER BY k.key DESC LIMIT $2
"""
_BY_METADATA: Final = """
WITH found AS MATERIALIZED (
  SELECT key, type, status, error_group, process_id FROM dl_processes
  WHERE removed_at IS NULL AND metadata @> $1::text::jsonb
)
SELECT key FROM found
WHERE ($2::text IS NULL OR type = $2) AND status = ANY ($3::text[]) AND ($4::bigint IS NULL OR error_group = $4)
  AND ($5::text IS NULL OR process_id = $5) AND key < $6
ORDER BY key DESC LIMIT $7
"""
# Stops when the wanted number is found.
_FITTING: Final = """
WITH walked AS MATERIALIZED ({walk})
SELECT ARRAY(SELECT p.key FROM dl_processes p
             WHERE p.key = ANY (ARRAY(SELECT w.key FROM walked w)) AND (p.metadata @> {metadata}::text::jsonb) IS TRUE
             ORDER BY p.key DESC LIMIT {most}) AS keys,
       (SELECT count(*) FROM walked) AS looked_at
"""
_ROWS: Final = f"{RECORD} WHERE key = ANY ($1::bigint[]) AND removed_at IS NULL ORDER BY key DESC"

_GROUPS: Final = """
WITH counted AS MATERIALIZED (
  SELECT type, error_group, count(*) AS processes, max(key) AS newest
  FROM dl_processes WHERE removed_at IS NULL AND status = 'error' {of_type}
  GROUP BY type, error_group
), page AS MATERIALIZED (
  SELECT * FROM counted WHERE (-processes, type, error_group) > ($1::bigint, $2::text, $3::bigint)
  ORDER BY processes DESC, type, error_group LIMIT $4
)
SELECT g.type, g.error_group, g.processes, e.process_id AS example, e.status_changed_at AS since,
       dl_error_group(e.detail) AS error
FROM page g
CROSS JOIN LATERAL (SELECT process_id, status_changed_at, detail FROM dl_processes WHERE key = g.newest) AS e
ORDER BY g.processes DESC, g.type, g.error_group
"""


async def find_processes(
    database: Database, wanted: ProcessFilter, *, limit: int = 50, after: After = None
) -> ProcessPage:
    """Return a page of at most `limit` (1 to 1,000) processes, newest first, fewer if their states are long.

    Raises `BadRequest`.
    """
    check_between("limit", limit, 1, MAX_PAGE)
    (before,) = (2**63 - 1,) if after is None else _BY_KEY.key(after)
    rows, more = await database.run(_aio_find_processes, wanted, limit, before)
    found = []
    for row in rows:
        found.append(record_of(row))
        # Each may be long, so other tasks of the event loop must run in between.
        await trio.lowlevel.checkpoint()
    return ProcessPage(found, _BY_KEY.text((rows[-1]["key"],)) if more else None)


async def _aio_find_processes(
    connection: Any, wanted: ProcessFilter, limit: int, before: int
) -> tuple[list[Any], bool]:
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        await connection.execute(PLAN)
        keys = await aio_keys(connection, wanted, before, limit + 1)
        return await aio_fetch_page(connection, _ROWS, (keys,), limit, texts=LONG, most=MAX_PAGE_TEXT)


async def aio_keys(connection: Any, wanted: ProcessFilter, before: int, most: int) -> list[int]:
    """Return the keys of the newest processes that match, newest first (asyncio-flavored)."""
    if wanted.metadata is None:
        sql, values = _walk(wanted, before, most)
        return await _aio_column(connection, sql, *values) if sql else []
    metadata, walk = check_metadata("metadata", wanted.metadata), max(WALK, most)
    sql, values = _walk(wanted, before, walk)
    if not sql:
        return []
    number = len(values)
    fitting = _FITTING.format(walk=sql, metadata=f"${number + 1}", most=f"${number + 2}")
    [found] = await aio_fetch(connection, fitting, *values, metadata, most)
    if len(found["keys"]) == most or found["looked_at"] < walk:
        return list(found["keys"])
    return await _aio_column(
        connection,
        _BY_METADATA,
        metadata,
        wanted.type,
        statuses_of(wanted),
        group_of(wanted),
        wanted.process_id,
        before,
        most,
    )


def _walk(wanted: ProcessFilter, before: int, most: int) -> tuple[str, list[Any]]:
    """Return the statement that ignores the metadata, and its values; an empty statement if nothing can match."""
    values: list[Any] = [before, most]

    def place(value: object) -> str:
        values.append(value)
        return f"${len(values)}"

    if wanted == ProcessFilter(metadata=wanted.metadata):
        return _NEWEST, values
    types = TYPES if wanted.type is None else f"types (type) AS (VALUES ({place(wanted.type)}::text))"
    group = group_of(wanted)
    if wanted.process_id is not None:
        more = "" if group is None else f"AND p.status = 'error' AND p.error_group = {place(group)}"
        sql = _OF_ID.format(types=types, id=place(wanted.process_id), statuses=place(statuses_of(wanted)), more=more)
    elif group is None:
        sql = _NEWEST_OF_EACH.format(types=types, statuses=place(statuses_of(wanted)))
    elif wanted.status in {None, "error"}:
        sql = _NEWEST_OF_GROUP.format(types=types, group=place(group))
    else:
        sql = ""
    return sql, values


def statuses_of(wanted: ProcessFilter) -> list[str]:
    """Return the statuses that a filter allows."""
    return list(PROCESS_STATUSES) if wanted.status is None else [wanted.status]


def group_of(wanted: ProcessFilter) -> int | None:
    """Return the number of a filter's error group."""
    return None if wanted.error_group is None else group_number("error_group", wanted.error_group)


async def _aio_column(connection: Any, sql: str, *values: Any) -> list[int]:
    return [value for (value,) in await aio_fetch(connection, sql, *values)]


async def list_process_error_groups(
    database: Database, *, process_type: str | None = None, limit: int = 50, after: After = None
) -> ProcessErrorPage:
    """Return a page of at most `limit` (1 to 1,000) groups, the largest first. Raises `BadRequest`."""
    check_between("limit", limit, 1, MAX_PAGE)
    if process_type is not None:
        check_type("type", process_type)
    values = [*((-(2**63), "", 0) if after is None else _BY_SIZE.key(after)), limit + 1]
    if process_type is not None:
        values.append(process_type)
    sql = _GROUPS.format(of_type="" if process_type is None else "AND type = $5")
    rows, following = _BY_SIZE.page(
        await database.run(_aio_process_error_groups, sql, values),
        limit,
        lambda row: (-row["processes"], row["type"], row["error_group"]),
    )
    groups = [ProcessErrorGroup(group=group_id(row["error_group"], None), **_without(row)) for row in rows]
    return ProcessErrorPage(groups, following)


def _without(row: Any) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "error_group"}


async def _aio_process_error_groups(connection: Any, sql: str, values: list[Any]) -> list[Any]:
    async with connection.transaction(readonly=True):
        await connection.execute(PLAN)
        return list(await connection.fetch(sql, *values))

"""State of process deliveries: sinks, failed deliveries, and their release by an operator."""

from __future__ import annotations

from typing import Annotated, Any, Final

from msgspec import Meta

from dataloader.jobs.contract import Operator
from dataloader.jobs.listings import MAX_PAGE
from dataloader.jobs.model import check_between
from dataloader.jobs.page_cursor import After, PageCursor
from dataloader.jobs.process_outbox import (
    HeldDelivery,
    HeldDeliveryPage,
    HeldFilter,
    Released,
    SinkRecord,
    check_held,
)
from dataloader.store.connection.bridge import Database
from dataloader.store.connection.fetching import aio_fetch
from dataloader.store.processes.counting import aio_counted
from dataloader.store.processes.outbox_rows import aio_post
from dataloader.store.queue.control import aio_audit, aio_short_transaction

RELEASED: Final = 10_000
"""Maximum processes that one request releases."""
_BY_SINK: Final = PageCursor(tuple[str, Annotated[int, Meta(ge=0, le=2**63 - 1)]])

# Removed sinks may still have rows.
_SINKS: Final = """
WITH RECURSIVE filled AS (
  (SELECT sink FROM dl_process_partitions ORDER BY sink LIMIT 1)
  UNION ALL
  SELECT (SELECT p.sink FROM dl_process_partitions p WHERE p.sink > f.sink ORDER BY p.sink LIMIT 1)
  FROM filled f WHERE f.sink IS NOT NULL
)
SELECT n.sink, s.types, coalesce(s.kinds, '{}') AS kinds, h.held_up, h.held,
  (SELECT min(o.at) FROM (
     (SELECT q.at FROM generate_series(0, 15) AS p (number) CROSS JOIN LATERAL (
        SELECT o.at FROM dl_process_outbox o WHERE o.sink = n.sink AND o.partition = p.number AND NOT o.held_up
        ORDER BY o.sink, o.partition, o.id LIMIT 1) AS q)
     UNION ALL
     (SELECT o.at FROM dl_process_outbox o WHERE o.sink = n.sink AND o.held_up ORDER BY o.sink, o.id LIMIT 1)) AS o
  ) AS oldest_at
FROM (SELECT sink FROM dl_process_sinks UNION SELECT sink FROM filled WHERE sink IS NOT NULL) AS n
LEFT JOIN dl_process_sinks s ON s.sink = n.sink
CROSS JOIN LATERAL (
  SELECT count(*) AS held_up, count(*) FILTER (WHERE b.next_at IS NULL) AS held
  FROM (SELECT h.next_at FROM dl_process_holdups h WHERE h.sink = n.sink LIMIT 10000) AS b) AS h
ORDER BY n.sink LIMIT 1000
"""
_WAITING: Final = "SELECT FROM dl_process_outbox WHERE sink = $1"
_HELD: Final = """
SELECT h.sink, h.key, h.tries, h.since, h.next_at, h.error, p.type, p.process_id, f.kind, f.event_id
FROM dl_process_holdups h JOIN dl_processes p ON p.key = h.key
LEFT JOIN LATERAL (
  SELECT o.kind, o.event_id FROM dl_process_outbox o WHERE o.key = h.key AND o.sink = h.sink
  ORDER BY o.key, o.sink, o.id LIMIT 1) AS f ON true
WHERE (h.sink, h.key) > ($1, $2) {more}
ORDER BY h.sink, h.key LIMIT $3
"""
_RELEASE: Final = """
UPDATE dl_process_holdups u SET next_at = now(), tries = 0
FROM (
  SELECT h.sink, h.key FROM dl_process_holdups h JOIN dl_processes p ON p.key = h.key
  WHERE (h.next_at IS NULL OR h.next_at > now()) {more}
  ORDER BY h.sink, h.key LIMIT $1 FOR UPDATE OF h) AS r
WHERE u.sink = r.sink AND u.key = r.key
RETURNING 1
"""


async def list_sinks(database: Database) -> list[SinkRecord]:
    """Return the named sinks, and those with waiting deliveries, including messages; sorted by name."""
    return await database.run(aio_list_sinks)


async def aio_list_sinks(connection: Any) -> list[SinkRecord]:
    """Return the sinks, see `list_sinks` (asyncio-flavored)."""
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        return [
            SinkRecord(**dict(row) | {"waiting": await aio_counted(connection, _WAITING, row["sink"])})
            for row in await connection.fetch(_SINKS)
        ]


async def list_held(
    database: Database, wanted: HeldFilter, *, limit: int = 50, after: After = None
) -> HeldDeliveryPage:
    """Return a page of at most `limit` (1 to 1,000) processes with failed deliveries, by sink. Raises `BadRequest`."""
    check_between("limit", limit, 1, MAX_PAGE)
    values: list[Any] = [*(("", -1) if after is None else _BY_SINK.key(after)), limit + 1]
    sql = _HELD.format(more=_conditions(wanted, values))
    rows, following = _BY_SINK.page(
        await database.run(aio_fetch, sql, *values), limit, lambda row: (row["sink"], row["key"])
    )
    return HeldDeliveryPage([_held(row) for row in rows], following)


async def release(database: Database, wanted: HeldFilter, *, operator: Operator, lease_s: int) -> Released:
    """Retry the matching deliveries now, as if they had not failed; at most 10,000 processes.

    Raises `BadRequest` for a filter without a criterion.
    """
    check_held(wanted)
    return await database.write(_aio_release, wanted, operator, lease_s)


async def _aio_release(connection: Any, wanted: HeldFilter, operator: Operator, lease_s: int) -> Released:
    values: list[Any] = [RELEASED]
    sql = _RELEASE.format(more=_conditions(wanted, values))
    async with aio_short_transaction(connection):
        released = len(await connection.fetch(sql, *values))
        detail = {name: value for name, value in _criteria(wanted).items() if value} | {"released": released}
        await aio_audit(connection, operator, "release_deliveries", None, detail)
    await aio_post(connection, lease_s)
    return Released(released)


def _criteria(wanted: HeldFilter) -> dict[str, Any]:
    return {
        "sink": wanted.sink,
        "type": wanted.type,
        "process_id": wanted.process_id,
        "held": wanted.held,
    }


def _conditions(wanted: HeldFilter, values: list[Any]) -> str:
    """Return a filter's conditions as SQL. Their values are appended to `values`."""
    said = ["AND h.next_at IS NULL"] if wanted.held else []
    for column, value in (("h.sink", wanted.sink), ("p.type", wanted.type), ("p.process_id", wanted.process_id)):
        if value is not None:
            values.append(value)
            said.append(f"AND {column} = ${len(values)}")
    return " ".join(said)


def _held(row: Any) -> HeldDelivery:
    return HeldDelivery(**{name: value for name, value in row.items() if name != "key"})

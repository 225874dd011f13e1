"""How many jobs wait in which queue, for pages: counted by one process for all, and not more often than is cheap.

Counting walks all that has not ended. Whoever finds the count old counts anew, if nobody else does so at that moment:
the row is locked for it. Of the time a `SHARE` goes into it: a count of 5 ms may be a tenth of a second old, one of a
second 20 s. Which queues are paused is told as it is now.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

import asyncpg
import attrs
import msgspec

from dataloader.jobs.model import QueueRecord
from dataloader.store.connection.bridge import Database
from dataloader.store.queue.reads import DEPTHS
from dataloader.store.queue.worker_rows import ALIVE_WITHIN_S

SHARE: Final = 0.05
"""The part of the time in which somebody counts."""
COUNT_S: Final = 8.0
"""Seconds after which a count is given up; the next one is made much later."""
NAMED: Final = 1_000
"""Queues that are counted by name, those with workers and with the most jobs first."""
OTHERS: Final = ""
"""Stands for all others; no queue of ours has this name."""

_SELDOM: Final = "coalesce(d.next_at > d.at + interval '2 s', false)"
READ: Final = f"""
SELECT d.queues::text AS queues, d.at, {_SELDOM} AS seldom, d.next_at <= statement_timestamp() AS is_old,
  (SELECT coalesce(json_agg(json_build_object('queue', q.queue, 'at', q.changed_at, 'by', q.changed_by)), '[]')::text
   FROM dl_queues q WHERE q.paused) AS paused
FROM dl_depths d
"""
"""The row that `aio_depths_of` takes; a page reads it with its own."""
# What nobody reads is not computed: without a turn the jobs are not looked at.
_COUNT: Final = """
WITH turn AS MATERIALIZED (
  SELECT one FROM dl_depths WHERE next_at <= statement_timestamp() FOR UPDATE SKIP LOCKED
), counted AS MATERIALIZED (
  SELECT coalesce(jsonb_agg(to_jsonb(q) || jsonb_build_object('oldest_ready_at', {oldest})), '[]') AS queues
  FROM ({depths}) AS q
)
UPDATE dl_depths d SET queues = c.queues, at = statement_timestamp(),
  next_at = clock_timestamp() + (clock_timestamp() - statement_timestamp()) / $4::float8
FROM counted c WHERE (SELECT true FROM turn)
RETURNING d.queues::text AS queues, d.at, {seldom} AS seldom
"""
_GIVE_UP: Final = "UPDATE dl_depths SET next_at = clock_timestamp() + make_interval(secs => $1)"


def readable(instant: str) -> str:
    """An expression as SQL, NULL where it is an instant that Python has not: other services write what they like."""
    return f"CASE WHEN {instant} BETWEEN '0001-01-02Z' AND '9999-12-30Z' THEN {instant} END"


@attrs.frozen
class Pause:
    """Since when a queue or a task is paused, and by whom, where that is known."""

    at: datetime | None
    by: str | None


@attrs.frozen
class Depths:
    """The queues as they were counted `at`; None: nobody has come to an end with it yet. `paused` is of now.

    `seldom`: counting takes so long that the numbers may be seconds old, and a reader should be told of when they are.
    """

    queues: list[QueueRecord]
    at: datetime | None
    seldom: bool
    paused: Mapping[str, Pause]


class _Paused(msgspec.Struct):
    queue: str
    at: datetime
    by: str | None


async def read_depths(database: Database) -> Depths:
    """The queues that have work, are served or are paused, by name; counted anew where the last count is old.

    More than `NAMED` queues: the others are one, `OTHERS`.
    """
    return await database.run(_aio_depths)


async def _aio_depths(connection: Any) -> Depths:
    return await aio_depths_of(connection, await connection.fetchrow(READ))


async def aio_depths_of(connection: Any, row: Any) -> Depths:
    """As `read_depths`, of a row with the columns of `READ`, outside of a transaction (asyncio-flavoured)."""
    paused = {one.queue: Pause(one.at, one.by) for one in msgspec.json.decode(row["paused"], type=list[_Paused])}
    counted = (await _aio_count(connection) if row["is_old"] else None) or row
    records = msgspec.json.decode(counted["queues"] or "[]", type=list[QueueRecord])
    known = {record.queue for record in records}
    queues = [attrs.evolve(record, paused=record.queue in paused) for record in records]
    queues += [_empty(queue) for queue in paused.keys() - known]
    return Depths(
        sorted(queues, key=lambda one: (one.queue == OTHERS, one.queue)), counted["at"], counted["seldom"], paused
    )


async def _aio_count(connection: Any) -> Any:
    """What was counted now; None if somebody else counts, or if it takes too long."""
    try:
        async with connection.transaction():
            await connection.execute(f"SET LOCAL statement_timeout = {COUNT_S * 1000:.0f}")
            return await connection.fetchrow(
                _COUNT.format(depths=DEPTHS, seldom=_SELDOM, oldest=readable("q.oldest_ready_at")),
                ALIVE_WITHIN_S,
                NAMED,
                OTHERS,
                SHARE,
            )
    except asyncpg.QueryCanceledError:
        await connection.execute(_GIVE_UP, COUNT_S / SHARE)
        return None


def _empty(queue: str) -> QueueRecord:
    return QueueRecord(
        queue=queue, paused=True, ready=0, delayed=0, blocked=0, unknown_task=0, running=0, oldest_ready_at=None
    )

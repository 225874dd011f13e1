"""Numbers of jobs by queue and state, for pages. One process counts for all, for a limited share of the time.

Counting reads all jobs that have not ended. A reader that finds an old count counts again, unless another one does so:
the row is locked for it. `CountLimits` bounds the share of time spent on counting: a count of 5 ms may be 0.1 s old, a
count of 1 s may be 20 s old. Pauses of queues are always current.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import attrs
import msgspec

from dataloader.jobs.model import QueueRecord
from dataloader.jobs.secrets.record_masks import Sensitive
from dataloader.jobs.text import listed_json
from dataloader.store.connection.bridge import Database
from dataloader.store.connection.error_meanings import TIMED_OUT
from dataloader.store.queue.reads import DEPTHS
from dataloader.store.queue.worker_rows import ALIVE_WITHIN_S

OTHERS: Final = ""
"""Name for all remaining queues together; no queue has this name."""


def readable(instant: str) -> str:
    """Return SQL for `instant` that is NULL for timestamps that Python cannot represent."""
    return f"CASE WHEN {instant} BETWEEN '0001-01-02Z' AND '9999-12-30Z' THEN {instant} END"


_SELDOM: Final = "coalesce(d.next_at > d.at + interval '2 s', false)"
READ: Final = f"""
SELECT d.queues::text AS queues, d.at, {_SELDOM} AS seldom, d.next_at <= statement_timestamp() AS is_old,
  (SELECT coalesce(json_agg(json_build_object(
     'queue', q.queue, 'at', {readable("q.changed_at")}, 'by', q.changed_by)), '[]')::text
   FROM dl_queues q WHERE q.paused) AS paused
FROM dl_depths d
"""
"""Query for the row that `aio_depths_of` expects; a page reads it together with its own rows."""
# PostgreSQL evaluates only what is used: without a turn no jobs are read.
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


@attrs.frozen(kw_only=True)
class CountLimits:
    """Limits of the cost of counting.

    Attributes:
        share: maximum share of the time spent on counting.
        count_s: seconds after which a count is aborted; the next one is made much later.
        named: number of queues that are counted by name, those with workers and with the most jobs first.
    """

    share: float = 0.05
    count_s: float = 8.0
    named: int = 1_000


LIMITS: Final = CountLimits()


@attrs.frozen
class Pause:
    """Start of a pause of a queue or a task, and the operator, as far as known."""

    at: datetime | None
    by: Sensitive[str | None]


@attrs.frozen
class UnknownTask:
    """Number of jobs that wait for a worker that knows their task; the oldest has waited since `since`."""

    task: Sensitive[str]
    queue: Sensitive[str]
    jobs: int
    since: datetime | None


@attrs.frozen
class Depths:
    """Counted queues.

    Attributes:
        queues: the queues, by name.
        at: the time of the count; None if no count has been completed yet.
        seldom: whether a count takes long, so that the numbers may be seconds old and a page should show their time.
        paused: the current pauses by queue.
        unknown_tasks: tasks that no live worker of the queue knows, those with the most jobs first.
    """

    queues: list[QueueRecord]
    at: datetime | None
    seldom: bool
    paused: Mapping[str, Pause]
    unknown_tasks: Sequence[UnknownTask] = ()


class _Unknown(msgspec.Struct):
    task: str
    jobs: int
    since: datetime | None


class _Counted(msgspec.Struct):
    queue: str
    unknown: list[_Unknown] = msgspec.field(default_factory=list)


class _Paused(msgspec.Struct):
    queue: str
    at: datetime | None
    by: str | None


async def read_depths(database: Database, limits: CountLimits = LIMITS) -> Depths:
    """Return the queues that have jobs or workers or are paused; count again if the last count is old.

    If there are more than `limits.named` queues, the others are combined as `OTHERS`.
    """
    return await database.run(_aio_depths, limits)


async def _aio_depths(connection: Any, limits: CountLimits) -> Depths:
    return await aio_depths_of(connection, await connection.fetchrow(READ), limits)


async def aio_depths_of(connection: Any, row: Any, limits: CountLimits = LIMITS) -> Depths:
    """Return the result of `read_depths` for a row of `READ`, outside a transaction (asyncio-flavored)."""
    paused = {one.queue: Pause(one.at, one.by) for one in listed_json(row["paused"], _Paused)}
    counted = (await _aio_count_depths(connection, limits) if row["is_old"] else None) or row
    records = listed_json(counted["queues"] or "[]", QueueRecord)
    unknown = [
        UnknownTask(task=one.task, queue=queue.queue, jobs=one.jobs, since=one.since)
        for queue in listed_json(counted["queues"] or "[]", _Counted)
        for one in queue.unknown
    ]
    known = {record.queue for record in records}
    queues = [attrs.evolve(record, paused=record.queue in paused) for record in records]
    queues += [_empty(queue) for queue in paused.keys() - known]
    return Depths(
        sorted(queues, key=lambda one: (one.queue == OTHERS, one.queue)),
        counted["at"],
        counted["seldom"],
        paused,
        sorted(unknown, key=lambda one: (-one.jobs, one.task, one.queue)),
    )


async def _aio_count_depths(connection: Any, limits: CountLimits) -> Any:
    """Count now; return None if another session counts, or if it takes too long."""
    try:
        async with connection.transaction():
            await connection.execute(f"SET LOCAL statement_timeout = {limits.count_s * 1000:.0f}")
            return await connection.fetchrow(
                _COUNT.format(depths=DEPTHS, seldom=_SELDOM, oldest=readable("q.oldest_ready_at")),
                ALIVE_WITHIN_S,
                limits.named,
                OTHERS,
                limits.share,
            )
    except TIMED_OUT:
        await connection.execute(_GIVE_UP, limits.count_s / limits.share)
        return None


def _empty(queue: str) -> QueueRecord:
    return QueueRecord(
        queue=queue, paused=True, ready=0, delayed=0, blocked=0, unknown_task=0, running=0, oldest_ready_at=None
    )

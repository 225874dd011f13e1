"""Statements for the delivery of processes' events and messages.

A partition's job takes the next rows, sends them, and records the results. Delivered rows are deleted by their IDs and
idents, never by a watermark. A message is delivered by the statement that sends the request to the other process, in
one transaction with the deletion of its row, so that it is delivered once.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, Final
from uuid import UUID

import attrs

from dataloader.jobs.process_outbox import Sink
from dataloader.jobs.process_requests import ProcessRequest
from dataloader.jobs.text import json_or_none
from dataloader.store.connection.bridge import Database
from dataloader.store.connection.fetching import aio_fetchval
from dataloader.store.processes.requests import Asked, aio_ask

TAKEN: Final = 32
"""Maximum rows of one read, and maximum processes whose next try is due."""
KNOWN_S: Final = 7_200
"""Seconds for which a sink is known after it was last named."""
DELIVERED: Final = frozenset({"added", "again", "exists"})
"""Verdicts of a delivered message: a process to start may already exist."""

_PLAN: Final = "SET LOCAL enable_seqscan = off; SET LOCAL enable_sort = on"
_TAKE: Final = """
WITH taken AS MATERIALIZED (
  (SELECT o.*, false AS again FROM dl_process_outbox o
   WHERE o.sink = $1 AND o.partition = $2 AND NOT o.held_up ORDER BY o.sink, o.partition, o.id LIMIT $3)
  UNION ALL
  (SELECT f.*, true FROM (
     SELECT h.key FROM dl_process_holdups h
     WHERE h.sink = $1 AND h.partition = $2 AND h.next_at <= statement_timestamp()
     ORDER BY h.sink, h.partition, h.next_at LIMIT $3) AS h
   CROSS JOIN LATERAL (
     SELECT o.* FROM dl_process_outbox o WHERE o.key = h.key AND o.sink = $1 ORDER BY o.key, o.sink, o.id LIMIT 1) AS f)
)
SELECT t.id, t.key, t.ident, t.kind, t.task_id, t.event_id, t.at, t.body::text AS body, t.again, p.type, p.process_id,
       (SELECT e.payload::text FROM dl_process_events e WHERE e.key = t.key AND e.event_id = t.event_id) AS payload,
       EXISTS (SELECT FROM dl_process_holdups h WHERE h.sink = $1 AND h.key = t.key) AS held_up
FROM taken t LEFT JOIN dl_processes p ON p.key = t.key
ORDER BY t.id
"""
_SETTLE: Final = "SELECT dl_process_settle_rows($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)"
_REST: Final = "SELECT dl_process_rest($1, $2, $3, $4, $5, $6)"
_POST: Final = "SELECT dl_process_post($1)"
_DELIVERED: Final = "DELETE FROM dl_process_outbox WHERE id = $1 AND ident IS NOT DISTINCT FROM $2 RETURNING true"
_KNOW: Final = """
INSERT INTO dl_process_sinks AS s (sink, types, kinds, until)
SELECT k.sink, CASE WHEN k.types <> '' THEN string_to_array(k.types, '/') END, string_to_array(k.kinds, '/'),
       now() + make_interval(secs => $4)
FROM unnest($1::text[], $2::text[], $3::text[]) AS k (sink, types, kinds)
ON CONFLICT (sink) DO UPDATE SET types = excluded.types, kinds = excluded.kinds, until = excluded.until
"""


@attrs.frozen(kw_only=True)
class OutboxRow:
    """Pending delivery. `again`: it has failed before. `held_up`: it or an earlier one of its process has failed.

    `ident` identifies it among all deliveries; None if a program of an earlier release has written it. `type` and
    `process_id` are None if the process was deleted.
    """

    id: int
    key: int
    ident: UUID | None
    kind: str
    task_id: int | None
    event_id: int | None
    at: datetime
    body: Any
    payload: Any
    type: str | None
    process_id: str | None
    again: bool
    held_up: bool


@attrs.frozen
class Partition:
    """Partition of a sink, and the run of the job that delivers it."""

    sink: str
    number: int
    job_id: UUID
    token: int


@attrs.define(eq=False)
class Settled:
    """Results of deliveries: the IDs and idents of delivered rows, and processes by key."""

    done: dict[int, UUID | None] = attrs.field(factory=dict)
    mended: set[int] = attrs.field(factory=set)
    failed: dict[int, str] = attrs.field(factory=dict)
    behind: set[int] = attrs.field(factory=set)


async def know_sinks(database: Database, sinks: Sequence[Sink]) -> None:
    """Make these sinks known to the database for two hours, so that steps write deliveries for them."""
    if not sinks:
        return
    await database.write(_aio_know, sinks)


async def _aio_know(connection: Any, sinks: Sequence[Sink]) -> None:
    await connection.execute(
        _KNOW,
        [sink.name for sink in sinks],
        ["/".join(sink.types or ()) for sink in sinks],
        ["/".join(sink.kinds) for sink in sinks],
        KNOWN_S,
    )


async def post(database: Database, lease_s: int) -> int:
    """Add a job for each partition with pending deliveries; return the number of these partitions."""
    return await database.write(aio_post, lease_s)


async def aio_post(connection: Any, lease_s: int) -> int:
    """Add the jobs, see `post` (asyncio-flavored)."""
    found: int = await connection.fetchval(_POST, lease_s)
    return found


async def take_deliveries(database: Database, partition: Partition) -> list[OutboxRow]:
    """Return the next deliveries, in order."""
    return await database.run(_aio_take_deliveries, partition)


async def _aio_take_deliveries(connection: Any, partition: Partition) -> list[OutboxRow]:
    async with connection.transaction(readonly=True):
        await connection.execute(_PLAN)
        rows = await connection.fetch(_TAKE, partition.sink, partition.number, TAKEN)
    return [OutboxRow(**dict(row) | {name: json_or_none(row[name]) for name in ("body", "payload")}) for row in rows]


async def settle(
    database: Database, partition: Partition, settled: Settled, *, tries: int, base_s: float, cap_s: float
) -> bool:
    """Record the results of deliveries. Return False if the partition belongs to another run, which continues with it.

    After `tries` consecutive failures a process is held. Between two tries there are `base_s` seconds, doubled each
    time, up to `cap_s`.
    """
    ours: bool = await database.write(
        aio_fetchval,
        _SETTLE,
        partition.sink,
        partition.number,
        partition.job_id,
        partition.token,
        list(settled.done),
        list(settled.done.values()),
        list(settled.mended),
        list(settled.failed),
        list(settled.failed.values()),
        list(settled.behind),
        tries,
        base_s,
        cap_s,
    )
    return ours


async def rest(database: Database, partition: Partition, *, yields: bool, lease_s: int) -> str:
    """End the job: `rest`. Or return `more` if a delivery is pending, `void` if the job is another run's."""
    verdict: str = await database.write(
        aio_fetchval, _REST, partition.sink, partition.number, partition.job_id, partition.token, yields, lease_s
    )
    return verdict


async def pass_on(database: Database, row: OutboxRow, request: ProcessRequest, lease_s: int) -> Asked | None:
    """Deliver a message once: send the request and delete the row in one transaction. None if delivered before.

    Nothing is written if the verdict is that the request is not possible now.
    """
    return await database.write(_aio_pass_on, row, request, lease_s)


async def _aio_pass_on(connection: Any, row: OutboxRow, request: ProcessRequest, lease_s: int) -> Asked | None:
    asked: Asked | None = None
    with suppress(_NotNowError):
        async with connection.transaction():
            if await connection.fetchval(_DELIVERED, row.id, row.ident):
                asked = await aio_ask(connection, request, lease_s, ident=row.ident)
                _check_delivered(asked)
    return asked


class _NotNowError(Exception):
    """A message cannot be delivered now; the transaction is rolled back."""


def _check_delivered(asked: Asked) -> None:
    if asked.verdict not in DELIVERED:
        raise _NotNowError

"""Time travel for tests of processes' authors: moves the times in the rows of processes back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from dataloader.jobs.process_outbox import MESSAGES
from dataloader.jobs.process_requests import ProcessRequest
from dataloader.store.connection.bridge import Database
from dataloader.store.connection.fetching import aio_fetchval

_NEXT: Final = """
SELECT extract(epoch FROM min(timer_at) - now())::float8 FROM dl_processes
WHERE type = ANY ($1) AND removed_at IS NULL AND timer_at > now()
"""
_ADVANCE: Final = """
WITH processes AS (
  UPDATE dl_processes SET timer_at = timer_at - make_interval(secs => $2) WHERE type = ANY ($1) AND timer_at IS NOT NULL
), tasks AS (
  UPDATE dl_process_tasks SET expires_at = expires_at - make_interval(secs => $2)
  WHERE type = ANY ($1) AND status = 'waiting' AND expires_at IS NOT NULL
)
UPDATE dl_jobs SET available_at = available_at - make_interval(secs => $2),
  waits_for = CASE WHEN available_at - make_interval(secs => $2) > now() THEN 'time' END
WHERE queue IN (SELECT 'process.' || t FROM unnest($1::text[]) AS t) AND status = 'queued' AND waits_for = 'time'
"""
_BUSY: Final = """
SELECT EXISTS (SELECT FROM dl_jobs WHERE queue IN (SELECT 'process.' || t FROM unnest($1::text[]) AS t)
  AND (status = 'running' OR status = 'queued' AND waits_for IS NULL))
  OR $2 AND (EXISTS (SELECT FROM dl_process_outbox WHERE NOT held_up)
             OR EXISTS (SELECT FROM dl_process_holdups WHERE next_at <= now()))
"""
# Like the reaper for the job of a dead worker.
_LOSE: Final = """
UPDATE dl_jobs SET status = 'queued', available_at = now(), waits_for = NULL, crashes = crashes + 1
WHERE status = 'running' AND job_id = (
  SELECT job_id FROM dl_processes
  WHERE type = $1 AND process_id = $2 AND removed_at IS NULL AND running_task IS NOT NULL)
RETURNING true
"""


_SENT: Final = "SELECT id, body::text FROM dl_process_outbox WHERE sink = $1 ORDER BY id LIMIT 1000"


async def next_timer_s(database: Database, types: Sequence[str]) -> float | None:
    """Return the seconds until the next timer of these types; None if there is no future timer."""
    found: float | None = await database.run(aio_fetchval, _NEXT, list(types))
    return found


async def advance(database: Database, types: Sequence[str], seconds: float) -> None:
    """Advance the time of the processes of these types by `seconds`."""
    await database.write(aio_fetchval, _ADVANCE, list(types), seconds)


async def is_busy(database: Database, types: Sequence[str], *, with_deliveries: bool) -> bool:
    """Return whether a process of these types runs a step, could run one now, or has a delivery that is due."""
    return bool(await database.run(aio_fetchval, _BUSY, list(types), with_deliveries))


async def sent_messages(database: Database) -> list[ProcessRequest]:
    """Return the pending messages to other processes, in the order in which they were sent."""
    return await database.run(_aio_sent)


async def _aio_sent(connection: Any) -> list[ProcessRequest]:
    rows = await connection.fetch(_SENT, MESSAGES)
    return [ProcessRequest.of_message(msgspec.json.decode(row["body"]), str(row["id"])) for row in rows]


async def lose_worker(database: Database, process_type: str, process_id: str) -> bool:
    """Take the running step from its worker, as if that had died; return whether there was one."""
    return bool(await database.write(aio_fetchval, _LOSE, process_type, process_id))

"""Live processes: each one writes a process heartbeat regularly, so that `/status` can list them (Q5)."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import attrs
import trio

ALIVE_WITHIN_S: Final = 60.0
"""Seconds without a process heartbeat after which a process counts as dead, also for `dl_sweep_parked`."""
SHOW_EVERY_S: Final = 20.0
"""Maximum number of seconds between two process heartbeats of a process."""

_SHOW: Final = """
WITH former AS MATERIALIZED (SELECT w.seen_at FROM dl_workers w WHERE w.worker = $1)
INSERT INTO dl_workers (worker, host, pid, version, queues, tasks, only_tasks) VALUES ($1, $2, $3, $4, $5, $6, $7)
ON CONFLICT (worker) DO UPDATE SET
  seen_at = now(), queues = excluded.queues, tasks = excluded.tasks, only_tasks = excluded.only_tasks
RETURNING clock_timestamp() AS shown, seen_at::text AS seen_at,
  $8::text IS NULL OR coalesce((SELECT f.seen_at >= $8::text::timestamptz FROM former f), false) AS is_kept
"""
_LEAVE: Final = "DELETE FROM dl_workers WHERE worker = $1"
_PROCESS_TASK: Final = re.compile(r"(?P<queue>process\.(?P<type>.+))\.v(?P<version>[0-9]{1,9})", re.DOTALL)
# Many workers of a version write its row together, once in 20 s. They write in one order, so that they do not deadlock.
_SERVE: Final = f"""
INSERT INTO dl_process_types (type, version, served_until)
SELECT s.type, s.version, now() + make_interval(secs => {ALIVE_WITHIN_S})
FROM unnest($1::text[], $2::int[]) AS s (type, version) ORDER BY s.type, s.version
ON CONFLICT (type, version) DO UPDATE SET served_until = excluded.served_until
WHERE dl_process_types.served_until < now() + make_interval(secs => {ALIVE_WITHIN_S - SHOW_EVERY_S})
"""
_SERVE_NO_MORE: Final = f"""
UPDATE dl_process_types t SET served_until = now()
FROM unnest($1::text[], $2::int[]) AS s (type, version)
WHERE t.type = s.type AND t.version = s.version AND t.served_until > now() AND NOT EXISTS (
  SELECT FROM dl_workers w
  WHERE w.seen_at > now() - make_interval(secs => {ALIVE_WITHIN_S}) AND w.queues ? ('process.' || s.type)
    AND 'process.' || s.type || '.v' || s.version = ANY (w.tasks))
"""


@attrs.frozen
class WorkerRow:
    """This process.

    Attributes:
        name: a unique name (host, PID and a few random digits), which is also `claimed_by` of its jobs.
        queues: the queues that it serves, with their slots.
        tasks: the names of the tasks that it knows.
        only_tasks: by queue, the tasks to which it is restricted there.
    """

    name: str
    host: str
    pid: int
    version: str
    queues: Mapping[str, int]
    tasks: Collection[str]
    only_tasks: Mapping[str, Sequence[str]] = attrs.field(factory=dict)

    @property
    def process_versions(self) -> list[tuple[str, int]]:
        """Types and versions of durable processes whose steps it runs."""
        names = map(_PROCESS_TASK.fullmatch, self.tasks)
        return sorted(
            {
                (name["type"], int(name["version"]))
                for name in names
                if name is not None and name["queue"] in self.queues
            }
        )


@attrs.frozen
class ClockReading:
    """Time that the database's clock has `shown` at a moment between `asked_at` and `answered_at` of Trio's clock."""

    asked_at: float
    answered_at: float
    shown: datetime


@attrs.frozen
class SignOfLife:
    """The database's answer to a process that writes its process heartbeat.

    Attributes:
        clock: the reading of the database's clock.
        seen_at: the time in its row now, as text.
        is_kept: whether its row had its last process heartbeat; if not, older tables were restored.
    """

    clock: ClockReading
    seen_at: str
    is_kept: bool


async def aio_show(connection: Any, worker: WorkerRow, last_seen_at: str | None = None) -> SignOfLife:
    """Write a process heartbeat of `worker` (asyncio-flavored).

    Its row should still have `last_seen_at`, of the last one.
    """
    if versions := worker.process_versions:
        await connection.execute(_SERVE, *map(list, zip(*versions, strict=True)))
    about = worker.name, worker.host, worker.pid, worker.version, dict(worker.queues), list(worker.tasks)
    asked_at = trio.current_time()
    row = await connection.fetchrow(_SHOW, *about, dict(worker.only_tasks) or None, last_seen_at)
    return SignOfLife(ClockReading(asked_at, trio.current_time(), row["shown"]), row["seen_at"], row["is_kept"])


async def aio_leave(connection: Any, worker: WorkerRow) -> None:
    """Record that `worker` has shut down in good order (asyncio-flavored)."""
    await connection.execute(_LEAVE, worker.name)
    if versions := worker.process_versions:
        await connection.execute(_SERVE_NO_MORE, *map(list, zip(*versions, strict=True)))

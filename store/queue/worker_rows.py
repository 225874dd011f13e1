"""Which processes live: each shows itself once a heartbeat, so that `/status` can name who else is there (Q5)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import attrs
import trio

ALIVE_WITHIN_S: Final = 60.0
"""A process that has not shown itself for so long is taken for dead, by `dl_sweep_parked` too."""
SHOW_EVERY_S: Final = 20.0
"""The longest pause between two times that a process shows itself."""

_SHOW: Final = """
INSERT INTO dl_workers (worker, host, pid, version, queues, tasks, only_tasks) VALUES ($1, $2, $3, $4, $5, $6, $7)
ON CONFLICT (worker) DO UPDATE SET
  seen_at = now(), queues = excluded.queues, tasks = excluded.tasks, only_tasks = excluded.only_tasks
RETURNING clock_timestamp()
"""
_LEAVE: Final = "DELETE FROM dl_workers WHERE worker = $1"


@attrs.frozen
class WorkerRow:
    """This process: `name` is unique (host, pid and a few random digits) and stands as `claimed_by` on its jobs.

    `queues` are those that it serves, with their slots; `tasks` the names of those that it knows; `only_tasks`, by
    queue, those of which alone it takes jobs from there.
    """

    name: str
    host: str
    pid: int
    version: str
    queues: Mapping[str, int]
    tasks: Collection[str]
    only_tasks: Mapping[str, Sequence[str]] = attrs.field(factory=dict)


@attrs.frozen
class ClockReading:
    """What the database's clock has `shown` at some moment from `asked_at` to `answered_at`, by Trio's clock."""

    asked_at: float
    answered_at: float
    shown: datetime


async def aio_show(connection: Any, worker: WorkerRow) -> ClockReading:
    """Say that `worker` lives (asyncio-flavoured), and read the database's clock."""
    about = worker.name, worker.host, worker.pid, worker.version, dict(worker.queues), list(worker.tasks)
    asked_at = trio.current_time()
    shown: datetime = await connection.fetchval(_SHOW, *about, dict(worker.only_tasks) or None)
    return ClockReading(asked_at, trio.current_time(), shown)


async def aio_leave(connection: Any, worker: WorkerRow) -> None:
    """Say that `worker` has ended in good order (asyncio-flavoured)."""
    await connection.execute(_LEAVE, worker.name)

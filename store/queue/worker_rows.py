"""Which processes live: each shows itself once a heartbeat, so that `/status` can name who else is there (Q5)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

import attrs

ALIVE_WITHIN_S: Final = 60.0
"""A process that has not shown itself for so long is taken for dead, by `dl_sweep_parked` too."""
SHOW_EVERY_S: Final = 20.0
"""The longest pause between two times that a process shows itself."""

_SHOW: Final = """
INSERT INTO dl_workers (worker, host, pid, version, queues, tasks) VALUES ($1, $2, $3, $4, $5, $6)
ON CONFLICT (worker) DO UPDATE SET seen_at = now(), queues = excluded.queues, tasks = excluded.tasks
"""
_LEAVE: Final = "DELETE FROM dl_workers WHERE worker = $1"


@attrs.frozen
class WorkerRow:
    """This process: `name` is unique (host, pid and a few random digits) and stands as `claimed_by` on its jobs.

    `queues` are those that it serves, with their slots; `tasks` the names of those that it knows.
    """

    name: str
    host: str
    pid: int
    version: str
    queues: Mapping[str, int]
    tasks: Collection[str]


async def aio_show(connection: Any, worker: WorkerRow) -> None:
    """Say that `worker` lives (asyncio-flavoured)."""
    about = worker.name, worker.host, worker.pid, worker.version, dict(worker.queues), list(worker.tasks)
    await connection.execute(_SHOW, *about)


async def aio_leave(connection: Any, worker: WorkerRow) -> None:
    """Say that `worker` has ended in good order (asyncio-flavoured)."""
    await connection.execute(_LEAVE, worker.name)

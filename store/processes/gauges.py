"""Gauges of processes for `/metrics`: processes, waiting calls, and pending deliveries.

The cost is constant: numbers are counted up to 10,000, and estimated above.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

import attrs

from dataloader.jobs.process_listings import PROCESS_STATUSES
from dataloader.jobs.process_outbox import SinkRecord
from dataloader.store.connection.bridge import Database
from dataloader.store.processes.counting import EXACT, aio_estimated
from dataloader.store.processes.deliveries import aio_list_sinks
from dataloader.store.processes.versions import aio_versions

MOST_TYPES: Final = 50
"""Maximum types that are counted, by name. Each has several series."""

_PLAN: Final = "SET LOCAL enable_seqscan = off; SET LOCAL max_parallel_workers_per_gather = 0; SET LOCAL jit = off"
_OF_ONE: Final = "SELECT FROM dl_processes WHERE removed_at IS NULL AND type = $1 AND version = $2 AND status = $3"
CALLS: Final = f"""
SELECT p.type, count(*) AS waiting, min(w.created_at) AS oldest_at
FROM (SELECT key, task_id, created_at FROM dl_process_tasks WHERE status = 'waiting' LIMIT {EXACT}) AS w
JOIN dl_processes p ON p.key = w.key
WHERE p.running_task IS DISTINCT FROM w.task_id
GROUP BY p.type ORDER BY p.type LIMIT {MOST_TYPES}
"""


@attrs.frozen
class WaitingCalls:
    """Requests of a type that have not begun: starts, calls and repairs."""

    type: str
    waiting: int
    oldest_at: datetime


@attrs.frozen
class ProcessGauges:
    """Gauges of processes at one time: `processes` by type, version and status."""

    processes: dict[tuple[str, int, str], int]
    calls: Sequence[WaitingCalls]
    sinks: Sequence[SinkRecord]


async def read_gauges(database: Database) -> ProcessGauges:
    """Read the gauges, with three statements, and one more for each number above 10,000."""
    return await database.run(_aio_read_gauges)


async def _aio_read_gauges(connection: Any) -> ProcessGauges:
    async with connection.transaction(readonly=True):
        await connection.execute(_PLAN)
        processes: dict[tuple[str, int, str], int] = {}
        for one in await aio_versions(connection, None):
            for status in PROCESS_STATUSES:
                count = getattr(one, status)
                if count >= EXACT:
                    estimated = await aio_estimated(connection, _OF_ONE, one.type, one.version, status)
                    count = max(count, estimated)
                processes[one.type, one.version, status] = count
        calls = [WaitingCalls(**dict(row)) for row in await connection.fetch(CALLS)]
    return ProcessGauges(processes, calls, await aio_list_sinks(connection))

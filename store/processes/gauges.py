"""How many processes there are, how many calls wait, and what is to be delivered: for `/metrics` (P8).

It costs the same however much there is: what is counted is counted up to 10,000, beyond that it is estimated.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

import attrs

from dataloader.jobs.process_outbox import SinkRecord
from dataloader.store.connection.bridge import Database
from dataloader.store.processes.counting import EXACT, aio_estimated
from dataloader.store.processes.deliveries import aio_list_sinks

MOST_TYPES: Final = 50
"""Types that are counted, by name: each is several series."""

_PLAN: Final = "SET LOCAL enable_seqscan = off; SET LOCAL max_parallel_workers_per_gather = 0; SET LOCAL jit = off"
PROCESSES: Final = f"""
WITH RECURSIVE types (type) AS (
  (SELECT type FROM dl_processes WHERE removed_at IS NULL ORDER BY type LIMIT 1)
  UNION ALL
  SELECT (SELECT p.type FROM dl_processes p WHERE p.removed_at IS NULL AND p.type > t.type ORDER BY p.type LIMIT 1)
  FROM types t WHERE t.type IS NOT NULL
)
SELECT t.type, s.status, (SELECT count(*) FROM (
  SELECT FROM dl_processes p WHERE p.removed_at IS NULL AND p.type = t.type AND p.status = s.status LIMIT {EXACT + 1}
) AS c) AS processes
FROM (SELECT type FROM types WHERE type IS NOT NULL LIMIT {MOST_TYPES}) AS t
CROSS JOIN unnest('{{init,running,error}}'::text[]) AS s (status)
"""
_OF_ONE: Final = "SELECT FROM dl_processes WHERE removed_at IS NULL AND type = $1 AND status = $2"
CALLS: Final = f"""
SELECT p.type, count(*) AS waiting, min(w.created_at) AS oldest_at
FROM (SELECT key, task_id, created_at FROM dl_process_tasks WHERE status = 'waiting' LIMIT {EXACT}) AS w
JOIN dl_processes p ON p.key = w.key
WHERE p.running_task IS DISTINCT FROM w.task_id
GROUP BY p.type ORDER BY p.type LIMIT {MOST_TYPES}
"""


@attrs.frozen
class WaitingCalls:
    """Of a type the requests that have not begun: starts, calls and repairs."""

    type: str
    waiting: int
    oldest_at: datetime


@attrs.frozen
class ProcessGauges:
    """The processes at one moment: `processes` by type and status."""

    processes: dict[tuple[str, str], int]
    calls: Sequence[WaitingCalls]
    sinks: Sequence[SinkRecord]


async def read_gauges(database: Database) -> ProcessGauges:
    """Read them, in three statements, and one more for each number beyond 10,000."""
    return await database.run(_aio_read)


async def _aio_read(connection: Any) -> ProcessGauges:
    async with connection.transaction(readonly=True):
        await connection.execute(_PLAN)
        processes = {}
        for row in await connection.fetch(PROCESSES):
            count = row["processes"]
            if count > EXACT:
                count = max(count, await aio_estimated(connection, _OF_ONE, row["type"], row["status"]))
            processes[row["type"], row["status"]] = count
        calls = [WaitingCalls(**dict(row)) for row in await connection.fetch(CALLS)]
    return ProcessGauges(processes, calls, await aio_list_sinks(connection))

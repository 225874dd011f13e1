"""Storage of the declarations of a process's tasks: job defaults, limits, suppliers and schedules.

It is called at the start, and when tasks are added to a running process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dataloader.jobs.logger import get_logger
from dataloader.jobs.schedules import Schedule
from dataloader.jobs.tasks import Tasks
from dataloader.store.connection.bridge import Database
from dataloader.store.limits.limit_rows import aio_declare_limits, aio_lock_suppliers
from dataloader.store.queue.task_rows import aio_declare
from dataloader.store.schedules.rows import aio_declare_schedules, aio_of_unknown_tasks

log = get_logger(__name__)


async def declare(database: Database, tasks: Tasks, worker: str, *, stores_schedules: bool) -> None:
    """Store everything that `tasks` declares, or nothing. Without `stores_schedules`, schedules stay as they are.

    Raises `BadRequest` for limits that contradict each other, and `StoreUnavailable`.
    """
    schedules = tasks.schedules if stores_schedules else None
    told, left, unknown = await database.write(_aio_declare, tasks, worker, schedules)
    for said in told:
        log.warning(said)
    if left:
        log.warning(
            "schedules stored by an operator do not change; delete them to use those of the program", names=left
        )
    for schedule in unknown:
        log.warning(
            "a schedule has a task that no process has declared; check its name",
            schedule=schedule.name,
            task=schedule.task,
        )


async def _aio_declare(
    connection: Any, tasks: Tasks, worker: str, schedules: Sequence[Schedule] | None
) -> tuple[list[str], list[str], list[Schedule]]:
    named = {task.limits.supplier for task in tasks.values() if task.limits.supplier is not None}
    suppliers = named | {supplier.name for supplier in tasks.suppliers}
    async with connection.transaction():
        # Suppliers are locked before tasks, as everywhere.
        await aio_lock_suppliers(connection, sorted(suppliers))
        await aio_declare(connection, tasks.values(), worker)
        told = await aio_declare_limits(connection, tasks.values(), tasks.suppliers)
        if schedules is None:
            return told, [], []
        left = await aio_declare_schedules(connection, schedules, list(tasks), worker)
        return told, left, await aio_of_unknown_tasks(connection, schedules)

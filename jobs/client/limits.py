"""`Limits`: the limits of tasks and suppliers, as programs, commands, pages and HTTP views use them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from dataloader.jobs.client.client_part import ClientPart
from dataloader.jobs.operations import limits as operations
from dataloader.jobs.page_cursor import After, cursor_text
from dataloader.jobs.supplier_listings import SupplierPage, SupplierRecord
from dataloader.jobs.task_listings import OpenJobs, TaskPage, TaskState


@attrs.frozen
class Limits(ClientPart):
    """Limits of tasks and suppliers. `open_client` gives them as `client.limits`, a supervisor as `supervisor.limits`.

    Changes apply from the next claim on, in all processes. Running jobs continue, except at the end of a period for a
    task that stops them then. All methods raise `TaskNotFound` or `SupplierNotFound` for an unknown name, `BadRequest`
    for values that are not allowed, and `StoreUnavailable` if no answer came.
    """

    async def tasks(self, *, limit: int = 200, after: After = None) -> TaskPage:
        """Return a page of at most `limit` (1 to 1,000) tasks by name, after `after`, the previous page's `next`."""
        return await self.performer.perform(operations.ListTasks(limit=limit, after=cursor_text(after)))

    async def task(self, name: str) -> TaskState:
        """Return the task, with its limits and whether its jobs may start now."""
        return await self.performer.perform(operations.GetTask(name))

    async def set_tasks(self, changes: Mapping[str, Mapping[str, Any]]) -> list[TaskState]:
        """Override limits of tasks, all or none: fields of `TaskLimits` by name; None restores the program's value."""
        return (await self.performer.perform(operations.SetTasks.of(changes))).tasks

    async def pause_task(self, name: str) -> TaskState:
        """Pause a task: none of its jobs starts, in any queue. Running jobs continue."""
        return await self.performer.perform(operations.PauseTask(name))

    async def resume_task(self, name: str) -> TaskState:
        """End the pause of a task."""
        return await self.performer.perform(operations.ResumeTask(name))

    async def remove_task(self, name: str, *, jobs: OpenJobs | None = None) -> TaskState:
        """Forget a task and its limits until a process declares it again, and return it as it was.

        Running processes start no more jobs of it. `jobs` says what to do with its open jobs. Without it, `InUse` is
        raised if there are any.
        """
        return await self.performer.perform(operations.RemoveTask(name, jobs))

    async def suppliers(self, *, limit: int = 200, after: After = None) -> SupplierPage:
        """Return a page of suppliers, as `tasks` does."""
        return await self.performer.perform(operations.ListSuppliers(limit=limit, after=cursor_text(after)))

    async def supplier(self, name: str) -> SupplierRecord:
        """Return the supplier, with the current use of its rate limits."""
        return await self.performer.perform(operations.GetSupplier(name))

    async def set_supplier(self, name: str, changes: Mapping[str, Any]) -> SupplierRecord:
        """Override limits of a supplier: fields of `Supplier.spec`; None restores the program's value.

        An unknown supplier is created, so that tasks may name it.
        """
        known = operations.SupplierChanges.check_names(changes)
        return await self.performer.perform(operations.SetSupplier(supplier=name, **known))

    async def pause_supplier(self, name: str) -> SupplierRecord:
        """Pause a supplier: no job of the tasks that name it starts."""
        return await self.performer.perform(operations.PauseSupplier(name))

    async def resume_supplier(self, name: str) -> SupplierRecord:
        """End the pause of a supplier."""
        return await self.performer.perform(operations.ResumeSupplier(name))

    async def remove_supplier(self, name: str) -> SupplierRecord:
        """Forget a supplier until a process declares it again, and return it as it was.

        Raises `InUse` while a task names it, or while a load's request is in progress.
        """
        return await self.performer.perform(operations.RemoveSupplier(name))

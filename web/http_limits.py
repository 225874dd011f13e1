"""`Limits` through a running service, over its HTTP API, on asyncio and on Trio."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import attrs
import msgspec

from dataloader.jobs.limit_contract import Limits, OpenJobs, SupplierNotFound, SupplierPage, SupplierRecord
from dataloader.jobs.model import MAX_NAME, check_name
from dataloader.jobs.page_cursor import After
from dataloader.jobs.task_listings import TaskNotFound, TaskPage, TaskState
from dataloader.web.service_connection import ServiceConnection


class _Tasks(msgspec.Struct):
    tasks: list[TaskState]


@attrs.frozen
class HttpLimits(Limits):
    """Limits through a service."""

    service: ServiceConnection

    async def tasks(self, *, limit: int = 200, after: After = None) -> TaskPage:
        """See `Limits.tasks`."""
        return await self.service.ask(TaskPage, "GET", "/tasks", params={"limit": limit, "after": after})

    async def task(self, name: str) -> TaskState:
        """See `Limits.task`."""
        return await self._task("GET", name)

    async def set_tasks(self, changes: Mapping[str, Mapping[str, Any]]) -> list[TaskState]:
        """See `Limits.set_tasks`."""
        body = {"tasks": [{**changed, "task": name} for name, changed in changes.items()]}
        return (await self.service.ask(_Tasks, "PATCH", "/tasks", body=body, missing=TaskNotFound)).tasks

    async def pause_task(self, name: str) -> TaskState:
        """See `Limits.pause_task`."""
        return await self._task("POST", name, "/pause")

    async def resume_task(self, name: str) -> TaskState:
        """See `Limits.resume_task`."""
        return await self._task("POST", name, "/resume")

    async def remove_task(self, name: str, *, jobs: OpenJobs | None = None) -> TaskState:
        """See `Limits.remove_task`."""
        return await self._task("DELETE", name, params={"jobs": jobs})

    async def suppliers(self, *, limit: int = 200, after: After = None) -> SupplierPage:
        """See `Limits.suppliers`."""
        return await self.service.ask(SupplierPage, "GET", "/suppliers", params={"limit": limit, "after": after})

    async def supplier(self, name: str) -> SupplierRecord:
        """See `Limits.supplier`."""
        return await self._supplier("GET", name)

    async def set_supplier(self, name: str, changes: Mapping[str, Any]) -> SupplierRecord:
        """See `Limits.set_supplier`."""
        return await self._supplier("PATCH", name, body=changes)

    async def pause_supplier(self, name: str) -> SupplierRecord:
        """See `Limits.pause_supplier`."""
        return await self._supplier("POST", name, "/pause")

    async def resume_supplier(self, name: str) -> SupplierRecord:
        """See `Limits.resume_supplier`."""
        return await self._supplier("POST", name, "/resume")

    async def remove_supplier(self, name: str) -> SupplierRecord:
        """See `Limits.remove_supplier`."""
        return await self._supplier("DELETE", name)

    async def _task(self, method: str, name: str, then: str = "", **more: Any) -> TaskState:
        path = _address("task", name, then)
        return await self.service.ask(TaskState, method, path, missing=TaskNotFound, **more)

    async def _supplier(self, method: str, name: str, then: str = "", **more: Any) -> SupplierRecord:
        path = _address("supplier", name, then)
        return await self.service.ask(SupplierRecord, method, path, missing=SupplierNotFound, **more)


def _address(kind: str, name: str, then: str) -> str:
    check_name(kind, name, MAX_NAME)
    return f"/{kind}s/{quote(name, safe='')}{then}"

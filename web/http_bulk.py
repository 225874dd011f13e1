"""`BulkActs` through a running service, over its HTTP API, on asyncio and on Trio."""

from __future__ import annotations

from typing import Any, Final
from uuid import UUID

import attrs
import msgspec

from dataloader.jobs.bulk_contract import (
    BulkActs,
    BulkCount,
    BulkNotFound,
    BulkPage,
    BulkRecord,
    Chosen,
    check_act,
)
from dataloader.jobs.contract import Change
from dataloader.jobs.listings import JobFilter
from dataloader.jobs.page_cursor import After
from dataloader.web.service_connection import ServiceConnection

START_S: Final = 50.0
"""Seconds for the answer to a request that freezes jobs."""


@attrs.frozen
class HttpBulkActs(BulkActs):
    """Bulk operations through a service."""

    service: ServiceConnection

    async def count(self, change: Change, chosen: Chosen) -> BulkCount:
        """See `BulkActs.count`."""
        body = _body(change, chosen) | {"dry_run": True}
        return await self.service.ask(BulkCount, "POST", "/bulk", body=body)

    async def start(
        self, change: Change, chosen: Chosen, *, bulk_id: UUID | None = None, most: int | None = None
    ) -> BulkRecord:
        """See `BulkActs.start`."""
        body = _body(change, chosen) | {"bulk_id": bulk_id, "most": most}
        return await self.service.ask(BulkRecord, "POST", "/bulk", body=body, timeout_s=START_S)

    async def get(self, bulk_id: UUID) -> BulkRecord:
        """See `BulkActs.get`."""
        return await self.service.ask(BulkRecord, "GET", f"/bulk/{bulk_id}", missing=BulkNotFound)

    async def find(self, *, limit: int = 50, after: After = None) -> BulkPage:
        """See `BulkActs.find`."""
        return await self.service.ask(BulkPage, "GET", "/bulk", params={"limit": limit, "after": after})

    async def stop(self, bulk_id: UUID) -> BulkRecord:
        """See `BulkActs.stop`."""
        return await self.service.ask(BulkRecord, "POST", f"/bulk/{bulk_id}/stop", missing=BulkNotFound)


def _body(change: Change, chosen: Chosen) -> dict[str, Any]:
    check_act(change, chosen)
    priority = {"priority": change.priority} if change.action == "set_priority" else {}
    jobs = msgspec.to_builtins(chosen.criteria()) if isinstance(chosen, JobFilter) else {"job_ids": list(chosen)}
    return {"action": change.action} | priority | jobs

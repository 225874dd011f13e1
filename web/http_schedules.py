"""`Schedules` through a running service, over its HTTP API, on asyncio and on Trio."""

from __future__ import annotations

from datetime import datetime
from typing import Any, TypeVar
from urllib.parse import quote
from uuid import UUID

import attrs
import msgspec

from dataloader.jobs.model import MAX_NAME, Enqueued, check_instant, check_name
from dataloader.jobs.page_cursor import After
from dataloader.jobs.schedule_contract import (
    Backfilled,
    ScheduleEventPage,
    ScheduleNotFound,
    SchedulePage,
    ScheduleRecord,
    Schedules,
)
from dataloader.jobs.schedules import Schedule
from dataloader.jobs.states import Status
from dataloader.web.service_connection import ServiceConnection

T = TypeVar("T")


class _Times(msgspec.Struct):
    times: list[datetime]


class _Run(msgspec.Struct):
    job_id: UUID
    queue: str
    status: Status = Status.QUEUED
    created: bool = True


@attrs.frozen
class HttpSchedules(Schedules):
    """Schedules through a service."""

    service: ServiceConnection

    async def find(self, *, limit: int = 200, after: After = None) -> SchedulePage:
        """See `Schedules.find`."""
        return await self.service.ask(SchedulePage, "GET", "/schedules", params={"limit": limit, "after": after})

    async def get(self, name: str) -> ScheduleRecord:
        """See `Schedules.get`."""
        return await self._ask(ScheduleRecord, "GET", name)

    async def events(self, name: str, *, limit: int = 100, after: After = None) -> ScheduleEventPage:
        """See `Schedules.events`."""
        return await self._ask(ScheduleEventPage, "GET", name, "/events", params={"limit": limit, "after": after})

    async def next_times(self, name: str, *, number: int = 10) -> list[datetime]:
        """See `Schedules.next_times`."""
        return (await self._ask(_Times, "GET", name, "/next", params={"number": number})).times

    async def put(self, schedule: Schedule) -> ScheduleRecord:
        """See `Schedules.put`."""
        return await self._ask(ScheduleRecord, "PUT", schedule.name, body=schedule.spec())

    async def delete(self, name: str) -> ScheduleRecord:
        """See `Schedules.delete`."""
        return await self._ask(ScheduleRecord, "DELETE", name)

    async def pause(self, name: str) -> ScheduleRecord:
        """See `Schedules.pause`."""
        return await self._ask(ScheduleRecord, "POST", name, "/pause")

    async def resume(self, name: str) -> ScheduleRecord:
        """See `Schedules.resume`."""
        return await self._ask(ScheduleRecord, "POST", name, "/resume")

    async def run(self, name: str, *, job_id: UUID | None = None) -> Enqueued:
        """See `Schedules.run`."""
        added = await self._ask(_Run, "POST", name, "/run", params={"job_id": job_id})
        return Enqueued(added.job_id, added.status, created=added.created, queue=added.queue)

    async def backfill(
        self,
        name: str,
        begin: datetime,
        end: datetime,
        *,
        again: bool = False,
        dry_run: bool = False,
        backfill_id: UUID | None = None,
    ) -> Backfilled:
        """See `Schedules.backfill`."""
        check_instant("begin", begin)
        check_instant("end", end)
        wanted = {"begin": begin, "end": end, "again": again, "dry_run": dry_run, "backfill_id": backfill_id}
        return await self._ask(Backfilled, "POST", name, "/backfill", body=wanted)

    async def _ask(self, kind: type[T], method: str, name: str, then: str = "", **more: Any) -> T:
        check_name("name", name, MAX_NAME)
        path = f"/schedules/{quote(name, safe='')}{then}"
        return await self.service.ask(kind, method, path, missing=ScheduleNotFound, **more)

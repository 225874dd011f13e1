"""Reads of loads for commands: from the database, or from a running service."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote
from uuid import UUID

import attrs
import msgspec

from dataloader.store.etl import run_records
from dataloader.store.etl.run_records import FailureLine, LoadNotFound, LoadPage, LoadRecord, RunNotFound

if TYPE_CHECKING:  # only one of them is needed, and each import takes time
    from dataloader.store.connection.bridge import Database
    from dataloader.web.service_connection import ServiceConnection


class LoadReads(Protocol):
    """Reads of loads. Raises `LoadNotFound` for a load that has never run, `RunNotFound` for an unknown run."""

    async def loads(self, *, limit: int, after: str | None) -> LoadPage:
        """Return a page of the loads that have run, by name, after `after`, the `next` of the page before."""

    async def load(self, name: str) -> LoadRecord:
        """Return the state of a load."""

    async def failures_of_run(self, run_id: UUID, *, after: int, limit: int) -> list[FailureLine]:
        """Return the failures of a run, oldest first, after the failure `after`."""

    async def failures_of_load(self, name: str, *, after: int, limit: int) -> list[FailureLine]:
        """Return the unresolved failures of all runs of a load, oldest first, after the failure `after`."""


@attrs.frozen
class DatabaseLoadReads(LoadReads):
    """Loads in the tables of the database."""

    database: Database

    async def loads(self, *, limit: int, after: str | None) -> LoadPage:
        """See `LoadReads.loads`."""
        return await run_records.page_of_loads(self.database, limit=limit, after=after)

    async def load(self, name: str) -> LoadRecord:
        """See `LoadReads.load`."""
        return await run_records.get_load(self.database, name)

    async def failures_of_run(self, run_id: UUID, *, after: int, limit: int) -> list[FailureLine]:
        """See `LoadReads.failures_of_run`."""
        page = await run_records.page_of_run_failures(self.database, run_id, after=after, limit=limit)
        return page.failures

    async def failures_of_load(self, name: str, *, after: int, limit: int) -> list[FailureLine]:
        """See `LoadReads.failures_of_load`."""
        page = await run_records.page_of_load_failures(self.database, name, after=after, limit=limit)
        return page.failures


class _Failures(msgspec.Struct):
    failures: list[FailureLine]


@attrs.frozen
class HttpLoadReads(LoadReads):
    """Loads of a service."""

    service: ServiceConnection

    async def loads(self, *, limit: int, after: str | None) -> LoadPage:
        """See `LoadReads.loads`."""
        return await self.service.ask(LoadPage, "GET", "/loads", params={"limit": limit, "after": after})

    async def load(self, name: str) -> LoadRecord:
        """See `LoadReads.load`."""
        return await self.service.ask(LoadRecord, "GET", f"/loads/{quote(name, safe='')}", missing=LoadNotFound)

    async def failures_of_run(self, run_id: UUID, *, after: int, limit: int) -> list[FailureLine]:
        """See `LoadReads.failures_of_run`."""
        return await self._failures(f"/runs/{run_id}", RunNotFound, after=after, limit=limit)

    async def failures_of_load(self, name: str, *, after: int, limit: int) -> list[FailureLine]:
        """See `LoadReads.failures_of_load`."""
        return await self._failures(f"/loads/{quote(name, safe='')}", LoadNotFound, after=after, limit=limit)

    async def _failures(self, path: str, missing: type[RunNotFound | LoadNotFound], **page: Any) -> list[FailureLine]:
        answer = await self.service.ask(_Failures, "GET", f"{path}/failures", params=page, missing=missing)
        return answer.failures

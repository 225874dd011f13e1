"""How far loads have come, as commands read it: from the database, or from a running service."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote
from uuid import UUID

import attrs
import msgspec

from dataloader.store.etl import run_records
from dataloader.store.etl.run_records import FailureLine, LoadNotFound, LoadPage, LoadRecord, RunNotFound

if TYPE_CHECKING:  # one of them is needed, and each takes its time
    from dataloader.store.connection.bridge import Database
    from dataloader.web.service_connection import ServiceConnection


class LoadReads(Protocol):
    """What is asked of loads. `LoadNotFound` for one that has never run, `RunNotFound` for a run that is not there."""

    async def loads(self, *, limit: int, after: str | None) -> LoadPage:
        """A page of the loads that have run, by name, from behind `after`, the `next` of the page before."""

    async def load(self, name: str) -> LoadRecord:
        """How far a load has come."""

    async def failures_of_run(self, run_id: UUID, *, after: int, limit: int) -> list[FailureLine]:
        """What failed in a run, oldest first, from behind the failure `after`."""

    async def failures_of_load(self, name: str, *, after: int, limit: int) -> list[FailureLine]:
        """What failed in any run of a load and is unresolved, in the same way."""


@attrs.frozen
class DatabaseLoadReads(LoadReads):
    """Loads by their tables."""

    database: Database

    async def loads(self, *, limit: int, after: str | None) -> LoadPage:
        """As in `LoadReads`."""
        return await run_records.list_loads(self.database, limit=limit, after=after)

    async def load(self, name: str) -> LoadRecord:
        """As in `LoadReads`."""
        return await run_records.get_load(self.database, name)

    async def failures_of_run(self, run_id: UUID, *, after: int, limit: int) -> list[FailureLine]:
        """As in `LoadReads`."""
        page = await run_records.list_failures_of_run(self.database, run_id, after=after, limit=limit)
        return page.failures

    async def failures_of_load(self, name: str, *, after: int, limit: int) -> list[FailureLine]:
        """As in `LoadReads`."""
        page = await run_records.list_failures_of_load(self.database, name, after=after, limit=limit)
        return page.failures


class _Failures(msgspec.Struct):
    failures: list[FailureLine]


@attrs.frozen
class HttpLoadReads(LoadReads):
    """Loads by a service."""

    service: ServiceConnection

    async def loads(self, *, limit: int, after: str | None) -> LoadPage:
        """As in `LoadReads`."""
        return await self.service.ask(LoadPage, "GET", "/loads", params={"limit": limit, "after": after})

    async def load(self, name: str) -> LoadRecord:
        """As in `LoadReads`."""
        return await self.service.ask(LoadRecord, "GET", f"/loads/{quote(name, safe='')}", missing=LoadNotFound)

    async def failures_of_run(self, run_id: UUID, *, after: int, limit: int) -> list[FailureLine]:
        """As in `LoadReads`."""
        return await self._failures(f"/runs/{run_id}", RunNotFound, after=after, limit=limit)

    async def failures_of_load(self, name: str, *, after: int, limit: int) -> list[FailureLine]:
        """As in `LoadReads`."""
        return await self._failures(f"/loads/{quote(name, safe='')}", LoadNotFound, after=after, limit=limit)

    async def _failures(self, path: str, missing: type[RunNotFound | LoadNotFound], **page: Any) -> list[FailureLine]:
        answer = await self.service.ask(_Failures, "GET", f"{path}/failures", params=page, missing=missing)
        return answer.failures

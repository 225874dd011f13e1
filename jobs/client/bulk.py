"""`Bulk`: bulk operations on jobs, as programs, commands, pages and HTTP views use them."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import attrs

from dataloader.jobs.bulk_listings import BulkCount, BulkPage, BulkRecord, Chosen, check_act
from dataloader.jobs.client.client_part import ClientPart
from dataloader.jobs.contract import Change
from dataloader.jobs.listings import JobFilter
from dataloader.jobs.operations import bulk as operations
from dataloader.jobs.page_cursor import After, cursor_text


@attrs.frozen
class Bulk(ClientPart):
    """Bulk operations: `client.bulk` of `open_client`, or `supervisor.bulk`.

    All methods raise `BulkNotFound` for an unknown ID, and `StoreUnavailable` if no answer came.
    """

    async def count(self, change: Change, chosen: Chosen) -> BulkCount:
        """Count the jobs that an operation would change, up to `COUNTED`. Raises `BadRequest`.

        A count that takes longer than two seconds is "at least 0".
        """
        return await self.performer.perform(operations.CountBulk(**_fields_of_request(change, chosen), dry_run=True))

    async def start(
        self, change: Change, chosen: Chosen, *, bulk_id: UUID | None = None, most: int | None = None
    ) -> BulkRecord:
        """Freeze the jobs of an operation, and begin it.

        Args:
            change: the change of each job.
            chosen: the jobs. Jobs that would not change are left out.
            bulk_id: the operation's ID, created by the caller: a repeated request finds the operation that it began.
            most: begin nothing if there are more jobs than this.

        Raises:
            BadRequest: a value is not allowed, there are more jobs than `most`, or the ID belongs to another operation.
        """
        fields = _fields_of_request(change, chosen)
        return await self.performer.perform(operations.StartBulk(**fields, bulk_id=bulk_id, most=most))

    async def get(self, bulk_id: UUID) -> BulkRecord:
        """Return an operation."""
        return await self.performer.perform(operations.GetBulk(bulk_id))

    async def find(self, *, limit: int = 50, after: After = None) -> BulkPage:
        """Return a page of at most `limit` (1 to 1,000) operations, latest first, after `after`.

        Raises `BadRequest`.
        """
        return await self.performer.perform(operations.ListBulk(limit=limit, after=cursor_text(after)))

    async def stop(self, bulk_id: UUID) -> BulkRecord:
        """Stop an operation. Changed jobs stay changed. An operation that has ended does not change."""
        return await self.performer.perform(operations.StopBulk(bulk_id))


def _fields_of_request(change: Change, chosen: Chosen) -> dict[str, Any]:
    """Return the fields of a request. Raises `BadRequest`."""
    check_act(change, chosen)
    jobs = chosen.criteria() if isinstance(chosen, JobFilter) else {"job_ids": list(chosen)}
    return {"action": change.action, "priority": change.priority if change.action == "set_priority" else None} | jobs

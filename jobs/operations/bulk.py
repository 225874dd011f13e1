"""The operations on bulk operations, which change many jobs and outlive their request: start, count, read, stop."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final
from uuid import UUID

from msgspec import Meta

from dataloader.jobs.bulk_listings import MAX_CHOSEN, Action, BulkCount, BulkNotFound, BulkPage, BulkRecord, Chosen
from dataloader.jobs.contract import Change
from dataloader.jobs.model import MAX_INT
from dataloader.jobs.operations.fields import AfterPage, Criteria, Limit, Priority
from dataloader.jobs.operations.operation import Operation, Operations
from dataloader.jobs.roles import Role

bulk: Final = Operations()
dry_runs: Final = Operations()
"""Operations without a separate route: the route that starts a bulk operation also answers a `dry_run`."""

FREEZE_S: Final = 45.0
"""Seconds in which the jobs of an operation must be frozen; a million jobs take several."""


class BulkActRequest(Criteria, kw_only=True):
    """Action, and its jobs: `job_ids`, or at least one criterion that the jobs match."""

    EXAMPLE: ClassVar[Any] = {"action": "retry", "queue": "load.cbr", "status": ["failed"]}

    action: Annotated[Action, Meta(description="Change of each job.")]
    priority: Annotated[Priority | None, Meta(description="New priority, for `set_priority`.")] = None
    job_ids: (
        Annotated[
            list[UUID], Meta(min_length=1, max_length=MAX_CHOSEN, description="IDs of the jobs, instead of criteria.")
        ]
        | None
    ) = None
    bulk_id: (
        Annotated[
            UUID,
            Meta(
                description="ID of the bulk operation, chosen by the client. A repeated request starts no second one."
            ),
        ]
        | None
    ) = None
    most: Annotated[int, Meta(ge=0, le=MAX_INT, description="Refuse the request if more jobs match.")] | None = None
    dry_run: Annotated[bool, Meta(description="Only count the jobs. The status is 200.")] = False

    def __post_init__(self) -> None:
        """Refuse contradictory fields, in addition to the checks of `JobFilter`."""
        super().__post_init__()
        given = [name for name in Criteria.__struct_fields__ if getattr(self, name) is not None]
        if self.job_ids is not None and given:
            raise ValueError(f"$: give job_ids or criteria such as {given[0]}, not both")
        if self.job_ids is None and not given:
            raise ValueError(f"$: give job_ids or at least one of {', '.join(Criteria.__struct_fields__)}")
        if (self.priority is None) == (self.action == "set_priority"):
            raise ValueError("$: priority is required for set_priority, and not allowed otherwise")

    @property
    def change(self) -> Change:
        """Change of each job."""
        return Change(action=self.action, priority=self.priority or 0)

    @property
    def chosen(self) -> Chosen:
        """Jobs of the operation."""
        return self.job_filter() if self.job_ids is None else self.job_ids


@bulk.declare("POST", "/bulk", role=Role.ADMIN, deadline_s=FREEZE_S)
class StartBulk(BulkActRequest, Operation[BulkRecord], kw_only=True):
    """Begin a bulk operation: cancel, retry, run now or change of priority.

    Its jobs are those that match now, frozen: later jobs are not included. Any running service continues it without the
    caller, 500 jobs at a time, and changes each job once; its ID shows its progress. A job that has ended or was
    changed meanwhile counts as `done`, not as `changed`. A cancel leaves out jobs that wake durable processes.
    """


@dry_runs.declare("POST", "/bulk", role=Role.ADMIN)
class CountBulk(BulkActRequest, Operation[BulkCount], kw_only=True):
    """Count the jobs of a bulk operation: a start with `dry_run`."""


@bulk.declare("GET", "/bulk", role=Role.ADMIN)
class ListBulk(Operation[BulkPage], kw_only=True):
    """List the bulk operations, latest first."""

    limit: Limit = 50
    after: AfterPage | None = None


@bulk.declare("GET", "/bulk/{bulk_id}", role=Role.ADMIN, errors=(BulkNotFound,))
class GetBulk(Operation[BulkRecord]):
    """Show a bulk operation and its progress."""

    bulk_id: UUID


@bulk.declare("POST", "/bulk/{bulk_id}/stop", role=Role.ADMIN, errors=(BulkNotFound,))
class StopBulk(Operation[BulkRecord]):
    """Stop a bulk operation. Changed jobs stay changed, and an operation that has ended does not change."""

    bulk_id: UUID

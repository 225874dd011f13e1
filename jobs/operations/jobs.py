"""The operations on jobs: reading them, and changing one or all that match a filter.

Two are methods of `Performer` instead, because the database and HTTP do them differently: enqueueing a job (`enqueue`),
and waiting for its end (`changed_job`).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final
from uuid import UUID

from msgspec import Meta, Struct

from dataloader.jobs.contract import MAX_BULK
from dataloader.jobs.errors import Conflict, JobNotFound
from dataloader.jobs.listings import EventPage, JobPage, Level, LogPage
from dataloader.jobs.model import JobRecord, about
from dataloader.jobs.operations.fields import AfterPage, Criteria, JobFields, Limit, LoadName, Priority
from dataloader.jobs.operations.operation import Operation, Operations
from dataloader.jobs.roles import Role
from dataloader.jobs.wait_reasons import WaitReason

jobs: Final = Operations()

AfterEvent = Annotated[AfterPage, Meta(description="`next` of the page before, or an `event_id`.")]


@jobs.declare("GET", "/jobs/{job_id}", role=Role.READ, errors=(JobNotFound,), large=True, operation_id="show_job")
class GetJob(Operation[JobRecord]):
    """Show all of a job."""

    job_id: UUID


@jobs.declare("GET", "/jobs/{job_id}/why", role=Role.READ, errors=(JobNotFound,))
class ShowWhy(Operation[WaitReason]):
    """Say why a job does not run now, in one sentence."""

    job_id: UUID


@jobs.declare("GET", "/jobs", role=Role.READ)
class ListJobs(Criteria, Operation[JobPage], kw_only=True):
    """List jobs, newest first.

    A page of jobs with megabytes of args or results has fewer than `limit`.
    """

    limit: Limit = 50
    after: AfterPage | None = None


@jobs.declare("GET", "/jobs/{job_id}/events", role=Role.READ, errors=(JobNotFound,))
class ListEvents(Operation[EventPage]):
    """Read a job's journal, oldest line first. To follow it, send the last `event_id` as `after`."""

    job_id: UUID
    limit: Limit = 200
    after: AfterEvent | None = None


@jobs.declare("GET", "/jobs/{job_id}/logs", role=Role.READ, errors=(JobNotFound,))
class ListLog(Operation[LogPage]):
    """Read a job's log lines, oldest first. To follow it, send the last `event_id` as `after`.

    Where an attempt begins or ends is a line, too: its `kind` is not `log` but the journal's. A page that a filter
    leaves empty can have a `next`.
    """

    job_id: UUID
    limit: Limit = 200
    after: AfterEvent | None = None
    level: Annotated[Level, Meta(description="Only lines of this level or above.")] | None = None
    load: Annotated[LoadName, Meta(description="Only lines about this load of a flow.")] | None = None


@jobs.declare("POST", "/jobs/{job_id}/cancel", role=Role.OPERATE, errors=(JobNotFound, Conflict), large=True)
class CancelJob(Operation[JobRecord]):
    """Cancel a job.

    A queued job is canceled at once. A running one is asked to stop: it is canceled when its status says so; at once if
    its lease never ends and nobody renews it. One that has ended is left as it is, and `note` says so.
    """

    job_id: UUID


@jobs.declare(
    "POST", "/jobs/{job_id}/retry", role=Role.OPERATE, errors=(JobNotFound, Conflict), large=True, in_query=True
)
class RetryJob(Operation[JobRecord]):
    """Queue a failed, canceled or lost job again, from attempt 0."""

    job_id: UUID
    force: Annotated[
        bool,
        Meta(description="Also a running job whose lease never ends and is not renewed."),
    ] = False


@jobs.declare("POST", "/jobs/{job_id}/run-now", role=Role.OPERATE, errors=(JobNotFound, Conflict), large=True)
class RunJobNow(Operation[JobRecord]):
    """Make a job that waits for its time due at once. A lock_key that is held still holds it."""

    job_id: UUID


class PriorityRequest(JobFields, kw_only=True):
    """A new priority for a job that waits."""

    EXAMPLE: ClassVar[Any] = {"priority": 10}

    priority: Priority


@jobs.declare("PATCH", "/jobs/{job_id}", role=Role.OPERATE, errors=(JobNotFound, Conflict), large=True)
class ChangePriority(PriorityRequest, Operation[JobRecord], kw_only=True):
    """Change the priority of a queued job."""

    job_id: UUID


class Changed(Struct, frozen=True):
    """How many jobs a bulk action changed; repeat until it is 0, since some may have ended meanwhile."""

    EXAMPLE: ClassVar[Any] = {"changed": 42}

    changed: Annotated[int, about("How many jobs were changed.")]


class BulkRequest(Criteria, kw_only=True):
    """Which jobs an action is for. At least one criterion, so that an empty object never means everything."""

    EXAMPLE: ClassVar[Any] = {"queue": "load.cbr", "status": ["failed", "lost"], "limit": 100}

    limit: Annotated[int, Meta(ge=1, le=MAX_BULK, description="The most jobs that one request changes.")] = 1_000

    def __post_init__(self) -> None:
        """Refuse a request without a criterion, besides what `NewJob` refuses."""
        super().__post_init__()
        if all(getattr(self, name) is None for name in Criteria.__struct_fields__):
            raise ValueError(f"$: at least one of {', '.join(Criteria.__struct_fields__)}")


class BulkPriorityRequest(BulkRequest, kw_only=True):
    """Which jobs get another priority. At least one criterion."""

    EXAMPLE: ClassVar[Any] = {"queue": "load.cbr", "task": "load.rates", "priority": 10}

    priority: Priority


@jobs.declare("POST", "/jobs/cancel", role=Role.ADMIN)
class CancelMany(BulkRequest, Operation[Changed]):
    """Cancel the jobs that fit a filter, up to its limit; repeat until it changes 0.

    Jobs that wake durable processes are left out; `POST /api/v1/bulk` with `dry_run` counts them.
    """


@jobs.declare("POST", "/jobs/retry", role=Role.ADMIN)
class RetryMany(BulkRequest, Operation[Changed]):
    """Queue the failed, canceled and lost jobs that fit a filter again, up to its limit; repeat until it changes 0."""


@jobs.declare("POST", "/jobs/run-now", role=Role.ADMIN)
class RunManyNow(BulkRequest, Operation[Changed]):
    """Make the jobs that fit a filter and wait for their time due, up to its limit; repeat until it changes 0."""


@jobs.declare("POST", "/jobs/reprioritize", role=Role.ADMIN)
class ChangeManyPriorities(BulkPriorityRequest, Operation[Changed]):
    """Change the priority of the queued jobs that fit a filter, up to its limit; repeat until it changes 0."""

"""Operations on jobs: reading them, and changing one or all that match a filter.

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

AfterEvent = Annotated[AfterPage, Meta(description="`next` of the previous page, or an `event_id`.")]


@jobs.declare("GET", "/jobs/{job_id}", role=Role.READ, errors=(JobNotFound,), large=True, operation_id="show_job")
class GetJob(Operation[JobRecord]):
    """Show all fields of a job."""

    job_id: UUID


@jobs.declare("GET", "/jobs/{job_id}/why", role=Role.READ, errors=(JobNotFound,))
class ShowWhy(Operation[WaitReason]):
    """Return the reason why a job does not run now, in one sentence."""

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
    """Read a job's event history, oldest event first. To follow it, send the last `event_id` as `after`."""

    job_id: UUID
    limit: Limit = 200
    after: AfterEvent | None = None


@jobs.declare("GET", "/jobs/{job_id}/logs", role=Role.READ, errors=(JobNotFound,))
class ListLog(Operation[LogPage]):
    """Read a job's log lines, oldest first. To follow it, send the last `event_id` as `after`.

    The beginning (`picked`) or end (`requeue`, `done`, `failed`, `canceled`, `lost`) of an attempt is also a line,
    whose `kind` is that of the event instead of `log`, and whose `fields` are its payload. A page that a filter leaves
    empty can have a `next`.
    """

    job_id: UUID
    limit: Limit = 200
    after: AfterEvent | None = None
    level: Annotated[Level, Meta(description="Only lines of this level or above.")] | None = None
    load: Annotated[LoadName, Meta(description="Only lines about this load of a flow.")] | None = None


@jobs.declare("POST", "/jobs/{job_id}/cancel", role=Role.OPERATE, errors=(JobNotFound, Conflict), large=True)
class CancelJob(Operation[JobRecord]):
    """Cancel a job.

    A queued job is canceled immediately. A running job is asked to stop, and is canceled when its status says so; it is
    canceled immediately if its lease never ends and is not renewed. A job that has ended does not change, and `note`
    says so. 409 for the job that wakes a durable process.
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
        Meta(description="Also retry a running job whose lease never expires and is not renewed."),
    ] = False


@jobs.declare("POST", "/jobs/{job_id}/run-now", role=Role.OPERATE, errors=(JobNotFound, Conflict), large=True)
class RunJobNow(Operation[JobRecord]):
    """Make a delayed job due immediately. It still waits for a lock_key that is held.

    409 while it waits for other jobs to end.
    """

    job_id: UUID


class PriorityRequest(JobFields, kw_only=True):
    """New priority for a waiting job."""

    EXAMPLE: ClassVar[Any] = {"priority": 10}

    priority: Priority


@jobs.declare("PATCH", "/jobs/{job_id}", role=Role.OPERATE, errors=(JobNotFound, Conflict), large=True)
class ChangePriority(PriorityRequest, Operation[JobRecord], kw_only=True):
    """Change the priority of a queued job."""

    job_id: UUID


class Changed(Struct, frozen=True):
    """Number of jobs that a request changed. Repeat the request until it is 0."""

    EXAMPLE: ClassVar[Any] = {"changed": 42}

    changed: Annotated[int, about("Number of changed jobs.")]


class BulkRequest(Criteria, kw_only=True):
    """Filter of jobs, with at least one criterion, so that an empty object never means all jobs."""

    EXAMPLE: ClassVar[Any] = {"queue": "load.cbr", "status": ["failed", "lost"], "limit": 100}

    limit: Annotated[int, Meta(ge=1, le=MAX_BULK, description="Maximum number of jobs that one request changes.")] = (
        1_000
    )

    def __post_init__(self) -> None:
        """Refuse a request without a criterion, in addition to the checks of `JobFilter`."""
        super().__post_init__()
        if all(getattr(self, name) is None for name in Criteria.__struct_fields__):
            raise ValueError(f"$: give at least one of {', '.join(Criteria.__struct_fields__)}")


class BulkPriorityRequest(BulkRequest, kw_only=True):
    """Filter of jobs that get another priority, with at least one criterion."""

    EXAMPLE: ClassVar[Any] = {"queue": "load.cbr", "task": "load.rates", "priority": 10}

    priority: Priority


@jobs.declare("POST", "/jobs/cancel", role=Role.ADMIN)
class CancelMany(BulkRequest, Operation[Changed]):
    """Cancel the jobs that match a filter, up to its limit. Repeat until `changed` is 0.

    Jobs that wake durable processes are left out; `POST /api/v1/bulk` with `dry_run` counts them.
    """


@jobs.declare("POST", "/jobs/retry", role=Role.ADMIN)
class RetryMany(BulkRequest, Operation[Changed]):
    """Retry the failed, canceled and lost jobs that match a filter, up to its limit. Repeat until `changed` is 0."""


@jobs.declare("POST", "/jobs/run-now", role=Role.ADMIN)
class RunManyNow(BulkRequest, Operation[Changed]):
    """Make the delayed jobs that match a filter due, up to its limit. Repeat until `changed` is 0."""


@jobs.declare("POST", "/jobs/reprioritize", role=Role.ADMIN)
class ChangeManyPriorities(BulkPriorityRequest, Operation[Changed]):
    """Change the priority of the queued jobs that match a filter, up to its limit. Repeat until `changed` is 0."""

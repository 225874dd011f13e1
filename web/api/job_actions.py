"""Jobs are changed (Q4, R1, R2): canceled, queued again, made due, given another priority; one, or all of a filter.

What somebody runs is asked to stop, and stops by itself. A process that drains still does all of this.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final
from uuid import UUID

from msgspec import Meta, Struct

from dataloader.jobs.contract import MAX_BULK
from dataloader.jobs.model import JobRecord, about
from dataloader.jobs.states import Status
from dataloader.web import shown
from dataloader.web.api.job_fields import Criteria, JobFields, Priority
from dataloader.web.api.jobs import JobStatus, status_of
from dataloader.web.auth import Role
from dataloader.web.routes import Answer, Call, Routes

routes: Final = Routes()


class RetryQuery(Struct, forbid_unknown_fields=True, kw_only=True):
    """Which jobs may be queued again."""

    force: Annotated[
        bool,
        Meta(description="Also a running job whose lease never ends and is not renewed."),
    ] = False


class PriorityRequest(JobFields, kw_only=True):
    """A new priority for a job that waits."""

    EXAMPLE: ClassVar[Any] = {"priority": 10}

    priority: Priority


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


class Changed(Struct, frozen=True):
    """How many jobs a bulk action changed; repeat until it is 0, since some may have ended meanwhile."""

    EXAMPLE: ClassVar[Any] = {"changed": 42}

    changed: Annotated[int, about("How many jobs were changed.")]


@routes.add(
    "POST",
    "/api/v1/jobs/<uuid:job_id>/cancel",
    role=Role.OPERATE,
    answers={200: JobStatus},
    rows=True,
    conflicts=True,
)
async def cancel_job(call: Call, job_id: UUID) -> Answer:
    """Cancel a job.

    A queued job is canceled at once. A running one is asked to stop: it is canceled when its status says so; at once if
    its lease never ends and nobody renews it. One that has ended is left as it is, and `note` says so.
    """
    job = await call.jobs.cancel(job_id)
    if job.status.is_final and job.status is not Status.CANCELED:
        return Answer(value=await status_of(call, job, f"the job had ended before: it stays {job.status}"))
    return Answer(value=await status_of(call, job))


@routes.add(
    "POST",
    "/api/v1/jobs/<uuid:job_id>/retry",
    role=Role.OPERATE,
    query=RetryQuery,
    answers={200: JobStatus},
    conflicts=True,
    rows=True,
)
async def retry_job(call: Call, job_id: UUID, query: RetryQuery) -> Answer:
    """Queue a failed, canceled or lost job again, from attempt 0."""
    job = await call.jobs.retry(job_id, force=query.force)
    return Answer(value=await status_of(call, job))


@routes.add(
    "POST", "/api/v1/jobs/<uuid:job_id>/run-now", role=Role.OPERATE, answers={200: JobStatus}, conflicts=True, rows=True
)
async def run_job_now(call: Call, job_id: UUID) -> Answer:
    """Make a job that waits for its time due at once. A lock_key that is held still holds it."""
    return Answer(value=await status_of(call, await call.jobs.run_now(job_id)))


@routes.add(
    "PATCH",
    "/api/v1/jobs/<uuid:job_id>",
    role=Role.OPERATE,
    body=PriorityRequest,
    answers={200: JobRecord},
    conflicts=True,
    rows=True,
)
async def change_priority(call: Call, job_id: UUID, body: PriorityRequest) -> Answer:
    """Change the priority of a queued job."""
    [job] = await call.masked(shown.job, [await call.jobs.set_priority(job_id, body.priority)])
    return Answer(value=job)


@routes.add("POST", "/api/v1/jobs/cancel", role=Role.ADMIN, body=BulkRequest, answers={200: Changed})
async def cancel_many(call: Call, body: BulkRequest) -> Answer:
    """Cancel the jobs that fit a filter, up to its limit; repeat until it changes 0.

    Jobs that wake durable processes are left out; `POST /api/v1/bulk` with `dry_run` counts them.
    """
    changed = await call.jobs.cancel(body.job_filter(), limit=body.limit)
    return Answer(value=Changed(changed))


@routes.add("POST", "/api/v1/jobs/retry", role=Role.ADMIN, body=BulkRequest, answers={200: Changed})
async def retry_many(call: Call, body: BulkRequest) -> Answer:
    """Queue the failed, canceled and lost jobs that fit a filter again, up to its limit; repeat until it changes 0."""
    changed = await call.jobs.retry(body.job_filter(), limit=body.limit)
    return Answer(value=Changed(changed))


@routes.add("POST", "/api/v1/jobs/run-now", role=Role.ADMIN, body=BulkRequest, answers={200: Changed})
async def run_many_now(call: Call, body: BulkRequest) -> Answer:
    """Make the jobs that fit a filter and wait for their time due, up to its limit; repeat until it changes 0."""
    changed = await call.jobs.run_now(body.job_filter(), limit=body.limit)
    return Answer(value=Changed(changed))


@routes.add("POST", "/api/v1/jobs/reprioritize", role=Role.ADMIN, body=BulkPriorityRequest, answers={200: Changed})
async def change_many_priorities(call: Call, body: BulkPriorityRequest) -> Answer:
    """Change the priority of the queued jobs that fit a filter, up to its limit; repeat until it changes 0."""
    changed = await call.jobs.set_priority(body.job_filter(), body.priority, limit=body.limit)
    return Answer(value=Changed(changed))

"""Jobs, queues and failures over HTTP: the routes of their operations, and routes that exist only over HTTP.

The views written by hand have different answers: a job's status, for which a request may wait; changes of one job,
which are answered with its status; and statistics, whose query has other names.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Self
from uuid import UUID

from msgspec import UNSET, Meta, Struct, UnsetType

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.model import JobRecord, about
from dataloader.jobs.operations.failures import failures
from dataloader.jobs.operations.fields import EXAMPLE_ID, MAX_WAIT_S, Instant, QueueStateNow
from dataloader.jobs.operations.jobs import CancelJob, RetryJob, RunJobNow, jobs
from dataloader.jobs.operations.queues import STATS_NAMES, ListStats, queues
from dataloader.jobs.roles import Role
from dataloader.jobs.secrets.record_masks import masked
from dataloader.jobs.states import Status, WaitsFor
from dataloader.web.operation_routes import OperationRoutes
from dataloader.web.paging import page_answer
from dataloader.web.routes import DEADLINE_S, Answer, Call

routes: Final = OperationRoutes()


class StatusQuery(Struct, forbid_unknown_fields=True, kw_only=True):
    """Time to wait for an end or a change."""

    wait: Annotated[
        float,
        Meta(
            ge=0,
            le=MAX_WAIT_S,
            description="Seconds to wait for the end of the job. An ended job is returned immediately.",
        ),
    ] = 0.0


class JobStatus(Struct, frozen=True, kw_only=True):
    """Status of a job. `note` says why a cancel changed nothing."""

    EXAMPLE: ClassVar[Any] = {
        "job_id": EXAMPLE_ID, "status": "running", "attempt": 1, "started_at": "2026-11-20T12:00:00.250Z",
        "run_started_at": "2026-11-20T12:00:00.250Z", "finished_at": None, "heartbeat_at": "2026-11-20T12:00:10Z",
        "error": None, "progress": {"rows": 4200},
        "result": None, "cancel_requested": False, "waits_for": None, "queue_state": None,
        "available_at": "2026-11-20T12:00:00Z",
    }  # fmt: skip

    job_id: Annotated[UUID, about("ID of the job.")]
    status: Annotated[Status, about("Status of the job.")]
    attempt: Annotated[int, about("Number of attempts, without refunded ones.")]
    started_at: Annotated[Instant | None, about("Start of the first run.")]
    run_started_at: Annotated[Instant | None, about("Start of the current or last run.")]
    finished_at: Annotated[Instant | None, about("End of the job.")]
    heartbeat_at: Annotated[Instant | None, about("Last heartbeat of the worker.")]
    error: Annotated[str | None, about("Error of the last failed attempt.")]
    progress: Annotated[Any, about("Last progress that the handler reported.")]
    result: Annotated[Any, about("Result of the handler.")]
    cancel_requested: Annotated[bool, about("True if a cancel was requested.")]
    waits_for: Annotated[WaitsFor | None, about("Waiting reason of a queued job; null if it is ready or not queued.")]
    queue_state: QueueStateNow
    available_at: Annotated[Instant, about("Earliest start.")]
    note: Annotated[str | UnsetType, about("Reason why a cancel had no effect.")] = UNSET

    @classmethod
    def of(cls, job: JobRecord, note: str | UnsetType = UNSET) -> Self:
        """Return the status of a job whose secrets are masked."""
        return cls(
            job_id=job.job_id,
            status=job.status,
            attempt=job.attempt,
            started_at=job.started_at,
            run_started_at=job.run_started_at,
            finished_at=job.finished_at,
            heartbeat_at=job.heartbeat_at,
            error=job.error,
            progress=job.progress,
            result=job.result,
            cancel_requested=job.cancel_requested,
            waits_for=job.waits_for,
            queue_state=job.queue_state,
            available_at=job.available_at,
            note=note,
        )


async def status_of(call: Call, job: JobRecord, note: str | UnsetType = UNSET) -> JobStatus:
    """Return the status of a job, without secrets, and with a note."""
    [shown_job] = await call.masked([job])
    return JobStatus.of(shown_job, note)


@routes.add(
    "GET",
    "/api/v1/jobs/<uuid:job_id>/status",
    role=Role.READ,
    query=StatusQuery,
    answers={200: JobStatus},
    deadline_s=DEADLINE_S + MAX_WAIT_S,
)
async def show_status(call: Call, job_id: UUID, query: StatusQuery) -> Answer:
    """Return a job's status. With `wait`, return when the job ends or changes, or after `wait` seconds."""
    if query.wait > 0:
        await call.services.waiting.until_changed(job_id, timeout_s=query.wait, caller=call.operator.name)
    async with call.long_answer():
        return Answer(value=await status_of(call, await call.jobs.get(job_id)))


@routes.operation(CancelJob, answers={200: JobStatus})
async def cancel_job(call: Call, operation: CancelJob) -> Answer:
    """Return the job's status, with a note if it had ended before."""
    job = await call.perform(operation)
    if job.status.is_final and job.status is not Status.CANCELED:
        return Answer(value=await status_of(call, job, f"the job had already ended; its status is {job.status}"))
    return Answer(value=await status_of(call, job))


@routes.operation(RetryJob, answers={200: JobStatus})
async def retry_job(call: Call, operation: RetryJob) -> Answer:
    """Return the job's status."""
    return Answer(value=await status_of(call, await call.perform(operation)))


@routes.operation(RunJobNow, answers={200: JobStatus})
async def run_job_now(call: Call, operation: RunJobNow) -> Answer:
    """Return the job's status."""
    return Answer(value=await status_of(call, await call.perform(operation)))


@routes.operation(ListStats)
async def list_stats(call: Call, operation: ListStats) -> Answer:
    """Return a page of statistics. Errors use the names of the query."""
    try:
        page = await call.perform(operation)
    except BadRequest as error:
        if error.field not in STATS_NAMES:
            raise
        raise BadRequest(STATS_NAMES[error.field], error.message.replace("begin", "from")) from None
    return page_answer(call, masked(page))


routes.operations([*jobs, *failures, *queues])

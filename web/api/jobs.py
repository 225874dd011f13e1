"""Jobs are looked at (Q3): one, a page of them, their journals and logs; and waited for.

What happens to jobs is the actors' work.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Self
from uuid import UUID

import trio
from msgspec import UNSET, Meta, Struct, UnsetType

from dataloader.jobs.listings import EventPage, JobPage, Level, LogPage
from dataloader.jobs.model import JobRecord, about
from dataloader.jobs.states import Status, WaitsFor
from dataloader.jobs.wait_reasons import WaitReason
from dataloader.web import shown
from dataloader.web.api.job_fields import EXAMPLE_ID, Criteria, Instant, LoadName, QueueStateNow
from dataloader.web.auth import Role
from dataloader.web.paging import AfterPage, Limit, PageQuery, page_answer
from dataloader.web.routes import DEADLINE_S, Answer, Call, Routes

routes: Final = Routes()

AfterEvent = Annotated[AfterPage, Meta(description="`next` of the page before, or an `event_id`.")]
MAX_WAIT_S: Final = 60.0
"""The longest that a status request may wait."""


class JobsQuery(Criteria, kw_only=True):
    """A page of jobs, newest first. `status` may be repeated or separated by commas."""

    limit: Limit = 50
    after: AfterPage | None = None


class StatusQuery(Struct, forbid_unknown_fields=True, kw_only=True):
    """How long to wait for an end or a change."""

    wait: Annotated[
        float, Meta(ge=0, le=MAX_WAIT_S, description="Seconds; the answer comes at once when the job has ended.")
    ] = 0.0


class JobStatus(Struct, frozen=True, kw_only=True):
    """How a job stands (Q3). `note` says why a cancel changed nothing."""

    EXAMPLE: ClassVar[Any] = {
        "job_id": EXAMPLE_ID, "status": "running", "attempt": 1, "started_at": "2026-11-20T12:00:00.250Z",
        "finished_at": None, "heartbeat_at": "2026-11-20T12:00:10Z", "error": None, "progress": {"rows": 4200},
        "result": None, "cancel_requested": False, "waits_for": None, "queue_state": None,
        "available_at": "2026-11-20T12:00:00Z",
    }  # fmt: skip

    job_id: Annotated[UUID, about("The job's id.")]
    status: Annotated[Status, about("The job's status.")]
    attempt: Annotated[int, about("The number of its attempts, without refunded ones.")]
    started_at: Annotated[Instant | None, about("When its last attempt began.")]
    finished_at: Annotated[Instant | None, about("When it ended for good.")]
    heartbeat_at: Annotated[Instant | None, about("The time of its worker's last heartbeat.")]
    error: Annotated[str | None, about("The error of its last failed attempt.")]
    progress: Annotated[Any, about("The handler's last progress.")]
    result: Annotated[Any, about("The handler's result.")]
    cancel_requested: Annotated[bool, about("Whether a cancel has been requested.")]
    waits_for: Annotated[WaitsFor | None, about("What a queued job waits for; null if it is ready, or not queued.")]
    queue_state: QueueStateNow
    available_at: Annotated[Instant, about("The job does not start before this instant.")]
    note: Annotated[str | UnsetType, about("Why a cancel changed nothing.")] = UNSET

    @classmethod
    def of(cls, job: JobRecord, note: str | UnsetType = UNSET) -> Self:
        """The status of a job whose secrets are masked."""
        return cls(
            job_id=job.job_id,
            status=job.status,
            attempt=job.attempt,
            started_at=job.started_at,
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


class EventsQuery(PageQuery, kw_only=True):
    """A page of a job's journal, oldest line first."""

    limit: Limit = 200
    after: AfterEvent | None = None


class LogQuery(EventsQuery, kw_only=True):
    """A page of a job's log, oldest line first."""

    level: Annotated[Level, Meta(description="Only lines of this level or above.")] | None = None
    load: Annotated[LoadName, Meta(description="Only lines about this load of a flow.")] | None = None


@routes.add("GET", "/api/v1/jobs", role=Role.READ, query=JobsQuery, answers={200: JobPage}, pages=True)
async def list_jobs(call: Call, query: JobsQuery) -> Answer:
    """List jobs, newest first.

    A page of jobs with megabytes of args or results has fewer than `limit`.
    """
    page = await call.jobs.find(query.job_filter(), limit=query.limit, after=query.after)
    return page_answer(call, JobPage(await call.masked(shown.job, page.jobs), page.next))


@routes.add("GET", "/api/v1/jobs/<uuid:job_id>", role=Role.READ, answers={200: JobRecord}, rows=True)
async def show_job(call: Call, job_id: UUID) -> Answer:
    """Show all of a job."""
    [job] = await call.masked(shown.job, [await call.jobs.get(job_id)])
    return Answer(value=job)


@routes.add("GET", "/api/v1/jobs/<uuid:job_id>/why", role=Role.READ, answers={200: WaitReason})
async def show_why(call: Call, job_id: UUID) -> Answer:
    """Say why a job does not run now, in one sentence."""
    return Answer(value=shown.wait_reason(await call.jobs.why(job_id)))


async def status_of(call: Call, job: JobRecord, note: str | UnsetType = UNSET) -> JobStatus:
    """Return the status of a job, without secrets, and with a note."""
    [shown_job] = await call.masked(shown.job, [job])
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
    """Say where a job stands; with `wait`, as soon as it ends or changes, or after so many seconds."""
    if query.wait > 0:
        await call.services.waiting.until_changed(job_id, timeout_s=query.wait, caller=call.operator.name)
    async with call.long_answer():
        return Answer(value=await status_of(call, await call.jobs.get(job_id)))


@routes.add(
    "GET", "/api/v1/jobs/<uuid:job_id>/events", role=Role.READ, query=EventsQuery, answers={200: EventPage}, pages=True
)
async def list_events(call: Call, job_id: UUID, query: EventsQuery) -> Answer:
    """Read a job's journal, oldest line first. To follow it, send the last `event_id` as `after`."""
    events = []
    page = await call.jobs.events(job_id, limit=query.limit, after=query.after)
    for event in page.events:
        events.append(shown.event(event))
        # Log lines have up to 8 kB each: the loop must turn in between.
        await trio.lowlevel.checkpoint()
    return page_answer(call, EventPage(events, page.next))


@routes.add(
    "GET", "/api/v1/jobs/<uuid:job_id>/logs", role=Role.READ, query=LogQuery, answers={200: LogPage}, pages=True
)
async def list_log(call: Call, job_id: UUID, query: LogQuery) -> Answer:
    """Read a job's log lines, oldest first. To follow it, send the last `event_id` as `after`.

    Where an attempt begins or ends is a line, too: its `kind` is not `log` but the journal's. A page that a filter
    leaves empty can have a `next`.
    """
    page = await call.jobs.logs(job_id, limit=query.limit, after=query.after, level=query.level, load=query.load)
    lines = []
    for line in page.lines:
        lines.append(shown.log_line(line))
        # Lines have up to 8 kB each: the loop must turn in between.
        await trio.lowlevel.checkpoint()
    return page_answer(call, LogPage(lines, page.next))

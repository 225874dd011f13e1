"""The job API (Q2 to Q4): trigger, look, wait, cancel, retry, change, one by one or by a filter.

Views read and write rows through store/; what happens to jobs is the actors' work. A process that drains takes no new
jobs, and still answers and cancels.
"""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Final
from uuid import UUID

import trio
from msgspec import UNSET, UnsetType

from dataloader.jobs.errors import Draining
from dataloader.jobs.model import JobRecord, NewJob
from dataloader.jobs.states import Status
from dataloader.store.queue import control, reads
from dataloader.web import shown
from dataloader.web.api.schemas import (
    MAX_WAIT_S,
    BatchRequest,
    BatchTriggered,
    BulkPriorityRequest,
    BulkRequest,
    Changed,
    EventList,
    EventsQuery,
    JobList,
    JobsQuery,
    JobStatus,
    PriorityRequest,
    RetryQuery,
    StatusQuery,
    Triggered,
    TriggerRequest,
)
from dataloader.web.auth import Role
from dataloader.web.routes import DEADLINE_S, Answer, Call, Routes
from dataloader.web.services import Services

routes: Final = Routes()


@routes.add(
    "POST",
    "/api/v1/jobs/trigger",
    role=Role.OPERATE,
    body=TriggerRequest,
    answers={201: Triggered, 200: Triggered},
    conflicts=True,
)
async def trigger_job(call: Call, body: TriggerRequest) -> Answer:
    """Add a job.

    201 with its address in Location; 200 when the idempotency key brought the same request before; 409 when it brought
    another one.
    """
    [job] = await _enqueue(call.services, [body])
    return Answer(
        value=job,
        status=HTTPStatus.CREATED if job.created else HTTPStatus.OK,
        headers={"Location": f"/api/v1/jobs/{job.job_id}"},
    )


@routes.add(
    "POST",
    "/api/v1/jobs/trigger/batch",
    role=Role.OPERATE,
    body=BatchRequest,
    answers={201: BatchTriggered, 200: BatchTriggered},
    conflicts=True,
    large=True,
)
async def trigger_batch(call: Call, body: BatchRequest) -> Answer:
    """Add up to 1,000 jobs, all or none.

    201 when at least one is new; 200 when idempotency keys brought all of them before.
    """
    jobs = await _enqueue(call.services, body.jobs)
    created = any(job.created for job in jobs)
    return Answer(
        value=BatchTriggered(jobs),
        status=HTTPStatus.CREATED if created else HTTPStatus.OK,
    )


async def _enqueue(services: Services, requests: Sequence[TriggerRequest]) -> list[Triggered]:
    if services.state().draining:
        raise Draining("this process takes no new jobs")
    new = [NewJob(**request.domain_fields()) for request in requests]
    enqueued = await services.served_queues.enqueue(services.enqueuer, new)
    return [Triggered(job.job_id, job.status, job.created, job.queue_state) for job in enqueued]


@routes.add("GET", "/api/v1/jobs", role=Role.READ, query=JobsQuery, answers={200: JobList}, rows=True)
async def list_jobs(call: Call, query: JobsQuery) -> Answer:
    """List jobs, newest first, in pages: send a page's `next` as `after` for the next one.

    A page of jobs with megabytes of args or results has fewer than `limit`.
    """
    after = None if query.after is None else reads.Cursor.decode(query.after)
    page = await reads.list_jobs(call.services.database, query.job_filter(), limit=query.limit, after=after)
    return Answer(value=JobList(await _masked(call.services, page.jobs), page.next))


@routes.add("GET", "/api/v1/jobs/<uuid:job_id>", role=Role.READ, answers={200: JobRecord}, rows=True)
async def show_job(call: Call, job_id: UUID) -> Answer:
    """Show all of a job."""
    [job] = await _masked(call.services, [await reads.get_job(call.services.database, job_id)])
    return Answer(value=job)


async def _masked(services: Services, jobs: Sequence[JobRecord]) -> list[JobRecord]:
    """The jobs without secrets. In a thread: a megabyte of args takes a tenth of a second."""
    return await trio.to_thread.run_sync(lambda: list(map(shown.job, jobs)), limiter=services.turns.masking)


async def _status(services: Services, job: JobRecord, note: str | UnsetType = UNSET) -> JobStatus:
    [masked] = await _masked(services, [job])
    return JobStatus.of(masked, note)


@routes.add(
    "GET",
    "/api/v1/jobs/<uuid:job_id>/status",
    role=Role.READ,
    query=StatusQuery,
    answers={200: JobStatus},
    deadline_s=DEADLINE_S + MAX_WAIT_S,
    waits=True,
)
async def show_status(call: Call, job_id: UUID, query: StatusQuery) -> Answer:
    """Say where a job stands; with `wait`, as soon as it ends or changes, or after so many seconds."""
    if query.wait > 0:
        await call.services.waiting.until_changed(job_id, timeout_s=query.wait)
    async with call.services.turns.long_answers:
        return Answer(value=await _status(call.services, await reads.get_job(call.services.database, job_id)))


@routes.add(
    "GET", "/api/v1/jobs/<uuid:job_id>/events", role=Role.READ, query=EventsQuery, answers={200: EventList}, rows=True
)
async def list_events(call: Call, job_id: UUID, query: EventsQuery) -> Answer:
    """Read a job's journal, oldest line first: send the last `event_id` as `after` to read on."""
    events = []
    for event in await reads.list_events(call.services.database, job_id, after=query.after, limit=query.limit):
        events.append(shown.event(event))
        # Log lines have up to 8 kB each: the loop must turn in between.
        await trio.lowlevel.checkpoint()
    return Answer(value=EventList(events))


@routes.add("POST", "/api/v1/jobs/<uuid:job_id>/cancel", role=Role.OPERATE, answers={200: JobStatus}, rows=True)
async def cancel_job(call: Call, job_id: UUID) -> Answer:
    """Cancel a job.

    A queued job is canceled at once. A running one is asked to stop: it is canceled when its status says so; at once if
    its lease never ends and nobody renews it. One that has ended is left as it is, and `note` says so.
    """
    job = await control.cancel(call.services.database, job_id, call.actor)
    if job.status.is_final and job.status is not Status.CANCELED:
        return Answer(
            value=await _status(call.services, job, f"the job had ended before: it is {job.status} and stays so")
        )
    return Answer(value=await _status(call.services, job))


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
    job = await control.retry(call.services.database, job_id, call.actor, force=query.force)
    return Answer(value=await _status(call.services, job))


@routes.add(
    "POST", "/api/v1/jobs/<uuid:job_id>/run-now", role=Role.OPERATE, answers={200: JobStatus}, conflicts=True, rows=True
)
async def run_job_now(call: Call, job_id: UUID) -> Answer:
    """Make a job that waits for its time due at once. A lock_key that is held still holds it."""
    return Answer(value=await _status(call.services, await control.run_now(call.services.database, job_id, call.actor)))


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
    [job] = await _masked(
        call.services, [await control.set_priority(call.services.database, job_id, body.priority, call.actor)]
    )
    return Answer(value=job)


@routes.add("POST", "/api/v1/jobs/cancel", role=Role.ADMIN, body=BulkRequest, answers={200: Changed})
async def cancel_many(call: Call, body: BulkRequest) -> Answer:
    """Cancel the jobs that fit a filter, up to its limit; repeat until it changes 0."""
    changed = await control.cancel_many(call.services.database, body.job_filter(), call.actor, limit=body.limit)
    return Answer(value=Changed(changed))


@routes.add("POST", "/api/v1/jobs/retry", role=Role.ADMIN, body=BulkRequest, answers={200: Changed})
async def retry_many(call: Call, body: BulkRequest) -> Answer:
    """Queue the failed, canceled and lost jobs that fit a filter again, up to its limit; repeat until it changes 0."""
    changed = await control.retry_many(call.services.database, body.job_filter(), call.actor, limit=body.limit)
    return Answer(value=Changed(changed))


@routes.add("POST", "/api/v1/jobs/run-now", role=Role.ADMIN, body=BulkRequest, answers={200: Changed})
async def run_many_now(call: Call, body: BulkRequest) -> Answer:
    """Make the jobs that fit a filter and wait for their time due, up to its limit; repeat until it changes 0."""
    changed = await control.run_now_many(call.services.database, body.job_filter(), call.actor, limit=body.limit)
    return Answer(value=Changed(changed))


@routes.add("POST", "/api/v1/jobs/reprioritize", role=Role.ADMIN, body=BulkPriorityRequest, answers={200: Changed})
async def change_many_priorities(call: Call, body: BulkPriorityRequest) -> Answer:
    """Change the priority of the queued jobs that fit a filter, up to its limit; repeat until it changes 0."""
    changed = await control.set_priority_many(
        call.services.database, body.job_filter(), body.priority, call.actor, limit=body.limit
    )
    return Answer(value=Changed(changed))

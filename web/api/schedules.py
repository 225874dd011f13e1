"""Schedules over HTTP: plans, and operators' actions."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Annotated, Any, ClassVar, Final, Literal
from uuid import UUID

import msgspec
from msgspec import Meta, Struct

from dataloader.jobs.cron import MAX_TEXT
from dataloader.jobs.errors import BadRequest
from dataloader.jobs.model import Instant, about
from dataloader.jobs.operations.fields import EXAMPLE_ID, NAME, Limit, QueueName, TaskName, described
from dataloader.jobs.roles import Role
from dataloader.jobs.schedule_contract import (
    MAX_NEXT,
    Backfilled,
    ScheduleEventPage,
    SchedulePage,
    ScheduleRecord,
)
from dataloader.jobs.schedules import FORMER_OVERLAPS, Schedule
from dataloader.jobs.states import Status
from dataloader.web import shown
from dataloader.web.api.trigger import check_args
from dataloader.web.paging import PageQuery, page_answer
from dataloader.web.routes import Answer, Call, Routes

routes: Final = Routes()

_ADDRESS: Final = "/api/v1/schedules/<path:name>"
Name = Annotated[str, described("The schedule's name.", "nightly", **NAME)]


class SchedulesQuery(PageQuery, kw_only=True):
    """Page of schedules, by name."""

    limit: Limit = 200


class ScheduleEventsQuery(PageQuery, kw_only=True):
    """Page of a schedule's events, latest first."""

    limit: Limit = 100


class ScheduleTimesQuery(Struct, forbid_unknown_fields=True, kw_only=True):
    """Number of requested times."""

    number: Annotated[int, Meta(ge=1, le=MAX_NEXT, description="The most times.")] = 10


class ScheduleRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Schedule of a task's jobs: `cron` or `every_s`, and the catch-up and overlap policies."""

    EXAMPLE: ClassVar[Any] = {
        "task": "report", "cron": "0 6 * * MON-FRI", "zone": "Europe/Berlin", "args": {"region": "EU"},
        "job": {"queue": "reports"},
    }  # fmt: skip

    FORMER_VALUES: ClassVar[Mapping[str, Mapping[str, str]]] = {"overlap": FORMER_OVERLAPS}

    task: TaskName
    cron: (
        Annotated[str, described("Five fields, or an alias such as @daily.", "0 6 * * MON-FRI", maxLength=MAX_TEXT)]
        | None
    ) = None
    every_s: Annotated[float, described("Seconds between two times, at least 1.", 3600)] | None = None
    zone: Annotated[str, described("The time zone of `cron`.", "Europe/Berlin")] = "UTC"
    start_at: Annotated[Instant, about("No time before; of `every_s` the first one.")] | None = None
    end_at: Annotated[Instant, about("No time from then on.")] | None = None
    args: Annotated[dict[str, Any], about("The args of each job.")] = {}
    job: Annotated[
        dict[str, Any], about("Other fields of each job, as a trigger has them: `queue`, `priority`, …")
    ] = {}
    missed: Annotated[
        Literal["skip", "once", "all"], about("Of times that passed meanwhile: none, the latest, all.")
    ] = "once"
    grace_s: Annotated[float, about("With `skip`: how late a job may be.")] = 60
    missed_limit: Annotated[int, about("With `all`: how many of the newest.")] = 100
    missed_within_s: Annotated[float, about("With `all`: how old.")] | None = None
    overlap: Annotated[
        Literal["buffer_one", "skip", "buffer_all", "cancel", "allow"],
        about("While a job has not ended: one waits, the next is left out, all wait, it is canceled, it runs beside."),
    ] = "buffer_one"
    jitter_s: Annotated[float, about("Delays each job by a random time of up to so many seconds.")] = 0
    pause_on_failure: Annotated[bool, about("Whether a job that fails for good pauses the schedule.")] = False

    def schedule(self, name: str) -> Schedule:
        """Return the requested schedule. Raises `BadRequest`."""
        return Schedule(name=name, **msgspec.structs.asdict(self))


class BackfillRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Planned times that get jobs, from `begin` to `end` (exclusive)."""

    EXAMPLE: ClassVar[Any] = {"begin": "2026-11-01T00:00:00Z", "end": "2026-11-08T00:00:00Z", "dry_run": True}

    begin: Annotated[Instant, about("The first instant.")]
    end: Annotated[Instant, about("The end, exclusive.")]
    again: Annotated[bool, about("Whether times that have a job get another one.")] = False
    dry_run: Annotated[bool, about("Add nothing, only say what would be added.")] = False
    backfill_id: (
        Annotated[UUID, about("The backfill's id; a request with the same one again adds nothing twice.")] | None
    ) = None


class ScheduleRunQuery(Struct, forbid_unknown_fields=True, kw_only=True):
    """ID of the job that is added."""

    job_id: Annotated[UUID, Meta(description="The job's id; the same id again adds no second job.")] | None = None


class NextTimes(Struct, frozen=True):
    """Next planned times of a schedule."""

    EXAMPLE: ClassVar[Any] = {"times": ["2026-11-23T05:00:00Z", "2026-11-24T05:00:00Z"]}

    times: Annotated[list[Instant], about("The times, ascending.")]


class ScheduleRun(Struct, frozen=True):
    """Job that was added in addition to the plan."""

    EXAMPLE: ClassVar[Any] = {"job_id": EXAMPLE_ID, "queue": "reports", "status": "queued", "created": True}

    job_id: Annotated[UUID, about("The job's id.")]
    queue: QueueName
    status: Annotated[Status, about("The job's status.")]
    created: Annotated[bool, about("False: an earlier request has added the job.")]


async def _shown(call: Call, record: ScheduleRecord) -> Answer:
    [masked] = await call.masked(shown.schedule, [record])
    return Answer(value=masked)


@routes.add("GET", "/api/v1/schedules", role=Role.READ, query=SchedulesQuery, answers={200: SchedulePage}, pages=True)
async def list_schedules(call: Call, query: SchedulesQuery) -> Answer:
    """List the schedules, by name."""
    page = await call.schedules.find(limit=query.limit, after=query.after)
    return page_answer(call, SchedulePage(await call.masked(shown.schedule, page.schedules), page.next))


@routes.add("GET", _ADDRESS, role=Role.READ, answers={200: ScheduleRecord})
async def get_schedule(call: Call, name: str) -> Answer:
    """Show a schedule: its declaration, its next time, and whether it is paused."""
    return await _shown(call, await call.schedules.get(name))


@routes.add("PUT", _ADDRESS, role=Role.ADMIN, body=ScheduleRequest, answers={200: ScheduleRecord})
async def put_schedule(call: Call, name: str, body: ScheduleRequest) -> Answer:
    """Store a schedule, replacing one with that name. Programs that declare it do not change it from now on."""
    check_args(call, body.task, body.args)
    return await _shown(call, await call.schedules.put(body.schedule(name)))


@routes.add("DELETE", _ADDRESS, role=Role.ADMIN, answers={200: ScheduleRecord})
async def delete_schedule(call: Call, name: str) -> Answer:
    """Delete a schedule, and show it as it was; its jobs stay.

    A schedule that programs declare is stored again when the next of them starts.
    """
    return await _shown(call, await call.schedules.delete(name))


@routes.add("GET", f"{_ADDRESS}/next", role=Role.READ, query=ScheduleTimesQuery, answers={200: NextTimes})
async def list_next_times(call: Call, name: str, query: ScheduleTimesQuery) -> Answer:
    """List the next planned times of a schedule, whether it is paused or not."""
    return Answer(value=NextTimes(await call.schedules.next_times(name, number=query.number)))


@routes.add(
    "GET", f"{_ADDRESS}/events", role=Role.READ, query=ScheduleEventsQuery, answers={200: ScheduleEventPage}, pages=True
)
async def list_schedule_events(call: Call, name: str, query: ScheduleEventsQuery) -> Answer:
    """List a schedule's events, latest first: left-out times, pauses, changes."""
    page = await call.schedules.events(name, limit=query.limit, after=query.after)
    return page_answer(call, ScheduleEventPage(await call.masked(shown.schedule_event, page.events), page.next))


@routes.add("POST", f"{_ADDRESS}/pause", role=Role.OPERATE, answers={200: ScheduleRecord})
async def pause_schedule(call: Call, name: str) -> Answer:
    """Pause a schedule: it adds no jobs. Jobs that it has added continue."""
    return await _shown(call, await call.schedules.pause(name))


@routes.add("POST", f"{_ADDRESS}/resume", role=Role.OPERATE, answers={200: ScheduleRecord})
async def resume_schedule(call: Call, name: str) -> Answer:
    """End a schedule's pause. Times that were due meanwhile are missed: `missed` says how they are handled."""
    return await _shown(call, await call.schedules.resume(name))


@routes.add(
    "POST",
    f"{_ADDRESS}/run",
    role=Role.OPERATE,
    query=ScheduleRunQuery,
    answers={201: ScheduleRun, 200: ScheduleRun},
    conflicts=True,
)
async def run_schedule(call: Call, name: str, query: ScheduleRunQuery) -> Answer:
    """Add a job of a schedule now, in addition to its plan. 201 if it is new, 200 if an earlier request added it."""
    added = await call.schedules.run(name, job_id=query.job_id)
    return Answer(
        value=ScheduleRun(added.job_id, added.queue, added.status, added.created),
        status=HTTPStatus.CREATED if added.created else HTTPStatus.OK,
        headers={"Location": f"/api/v1/jobs/{added.job_id}"},
    )


@routes.add("POST", f"{_ADDRESS}/backfill", role=Role.OPERATE, body=BackfillRequest, answers={200: Backfilled})
async def backfill_schedule(call: Call, name: str, body: BackfillRequest) -> Answer:
    """Add the jobs of past planned times, or only list them."""
    if body.end <= body.begin:
        raise BadRequest("end", "must be later than begin")
    found = await call.schedules.backfill(
        name, body.begin, body.end, again=body.again, dry_run=body.dry_run, backfill_id=body.backfill_id
    )
    return Answer(value=found)

"""Operations on schedules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal
from uuid import UUID

import msgspec
from msgspec import Meta, Struct

from dataloader.jobs.cron import MAX_TEXT
from dataloader.jobs.errors import BadRequest, IdempotencyConflict
from dataloader.jobs.model import MAX_NAME, Enqueued, Instant, about, check_instant, check_name
from dataloader.jobs.operations.fields import EXAMPLE_ID, AfterPage, Limit, QueueName, TaskName, field_meta
from dataloader.jobs.operations.operation import Operation, Operations
from dataloader.jobs.roles import Role
from dataloader.jobs.schedule_listings import (
    MAX_NEXT,
    Backfilled,
    ScheduleEventPage,
    ScheduleNotFound,
    SchedulePage,
    ScheduleRecord,
)
from dataloader.jobs.schedules import FORMER_OVERLAPS, Schedule
from dataloader.jobs.states import Status

schedules: Final = Operations()


class NamedSchedule(Struct, forbid_unknown_fields=True):
    """Name of the schedule of an operation. Raises `BadRequest` for a name that no schedule can have."""

    name: str

    def __post_init__(self) -> None:
        """Check the name."""
        check_name("name", self.name, MAX_NAME)


@schedules.declare("GET", "/schedules", role=Role.READ)
class ListSchedules(Operation[SchedulePage], kw_only=True):
    """List the schedules, by name."""

    limit: Limit = 200
    after: AfterPage | None = None


@schedules.declare("GET", "/schedules/{name}", role=Role.READ, errors=(ScheduleNotFound,), large=True)
class GetSchedule(NamedSchedule, Operation[ScheduleRecord]):
    """Show a schedule: its declaration, its next time, and whether it is paused."""


class ScheduleRequest(Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Schedule of a task's jobs: `cron` or `every_s`, and the catch-up and overlap policies."""

    EXAMPLE: ClassVar[Any] = {
        "task": "report", "cron": "0 6 * * MON-FRI", "zone": "Europe/Berlin", "args": {"region": "EU"},
        "job": {"queue": "reports"},
    }  # fmt: skip

    FORMER_VALUES: ClassVar[Mapping[str, Mapping[str, str]]] = {"overlap": FORMER_OVERLAPS}

    task: TaskName
    cron: (
        Annotated[str, field_meta("Five fields, or an alias such as @daily.", "0 6 * * MON-FRI", maxLength=MAX_TEXT)]
        | None
    ) = None
    every_s: Annotated[float, field_meta("Seconds between two times, at least 1.", 3600)] | None = None
    zone: Annotated[str, field_meta("The time zone of `cron`.", "Europe/Berlin")] = "UTC"
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


@schedules.declare("PUT", "/schedules/{name}", role=Role.ADMIN, large=True)
class PutSchedule(ScheduleRequest, Operation[ScheduleRecord], kw_only=True):
    """Store a schedule, replacing one with that name. Programs that declare it do not change it from now on."""

    name: str

    @classmethod
    def of(cls, schedule: Schedule) -> PutSchedule:
        """Return the operation that stores a schedule."""
        return cls(**{name: getattr(schedule, name) for name in cls.__struct_fields__})

    @property
    def schedule(self) -> Schedule:
        """Schedule that it stores. Raises `BadRequest`."""
        return Schedule(**msgspec.structs.asdict(self))


@schedules.declare("DELETE", "/schedules/{name}", role=Role.ADMIN, errors=(ScheduleNotFound,), large=True)
class DeleteSchedule(NamedSchedule, Operation[ScheduleRecord]):
    """Delete a schedule, and show it as it was; its jobs stay.

    A schedule that programs declare is stored again when the next of them starts.
    """


class NextTimes(Struct, frozen=True):
    """Next planned times of a schedule."""

    EXAMPLE: ClassVar[Any] = {"times": ["2026-11-23T05:00:00Z", "2026-11-24T05:00:00Z"]}

    times: Annotated[list[Instant], about("The times, ascending.")]


@schedules.declare("GET", "/schedules/{name}/next", role=Role.READ, errors=(ScheduleNotFound,))
class ListNextTimes(NamedSchedule, Operation[NextTimes]):
    """List the next planned times of a schedule, whether it is paused or not."""

    number: Annotated[int, Meta(ge=1, le=MAX_NEXT, description="The most times.")] = 10


@schedules.declare("GET", "/schedules/{name}/events", role=Role.READ, errors=(ScheduleNotFound,))
class ListScheduleEvents(NamedSchedule, Operation[ScheduleEventPage]):
    """List a schedule's events, latest first: left-out times, pauses, changes."""

    limit: Limit = 100
    after: AfterPage | None = None


@schedules.declare("POST", "/schedules/{name}/pause", role=Role.OPERATE, errors=(ScheduleNotFound,), large=True)
class PauseSchedule(NamedSchedule, Operation[ScheduleRecord]):
    """Pause a schedule: it adds no jobs. Jobs that it has added continue."""


@schedules.declare("POST", "/schedules/{name}/resume", role=Role.OPERATE, errors=(ScheduleNotFound,), large=True)
class ResumeSchedule(NamedSchedule, Operation[ScheduleRecord]):
    """End a schedule's pause. Times that were due meanwhile are missed: `missed` says how they are handled."""


class ScheduleRun(Struct, frozen=True):
    """Job that was added in addition to the plan."""

    EXAMPLE: ClassVar[Any] = {"job_id": EXAMPLE_ID, "queue": "reports", "status": "queued", "created": True}

    job_id: Annotated[UUID, about("The job's id.")]
    queue: QueueName
    status: Annotated[Status, about("The job's status.")]
    created: Annotated[bool, about("False: an earlier request has added the job.")]


@schedules.declare(
    "POST",
    "/schedules/{name}/run",
    role=Role.OPERATE,
    errors=(ScheduleNotFound, IdempotencyConflict),
    in_query=True,
)
class RunSchedule(NamedSchedule, Operation[Enqueued]):
    """Add a job of a schedule now, in addition to its plan. 201 if it is new, 200 if an earlier request added it."""

    job_id: Annotated[UUID, Meta(description="The job's id; the same id again adds no second job.")] | None = None


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

    def __post_init__(self) -> None:
        """Refuse an empty span."""
        check_instant("begin", self.begin)
        check_instant("end", self.end)
        if self.end <= self.begin:
            raise BadRequest("end", "must be later than begin")


@schedules.declare("POST", "/schedules/{name}/backfill", role=Role.OPERATE, errors=(ScheduleNotFound,))
class BackfillSchedule(BackfillRequest, Operation[Backfilled], kw_only=True):
    """Add the jobs of past planned times, or only list them."""

    name: str

    def __post_init__(self) -> None:
        """Check the name in addition to the span."""
        super().__post_init__()
        check_name("name", self.name, MAX_NAME)

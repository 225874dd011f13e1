"""Operations on schedules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final
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
from dataloader.jobs.schedules import FORMER_OVERLAPS, Missed, Overlap, Schedule
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
    zone: Annotated[str, field_meta("Time zone of `cron`.", "Europe/Berlin")] = "UTC"
    start_at: Annotated[Instant, about("No times before this. With `every_s`, the first time.")] | None = None
    end_at: Annotated[Instant, about("No times from this on.")] | None = None
    args: Annotated[dict[str, Any], about("Args of each job.")] = {}
    job: Annotated[
        dict[str, Any], about("Other fields of each job, as in a trigger request: `queue`, `priority`, …")
    ] = {}
    missed: Annotated[Missed, about("Catch-up policy for missed times: none, the latest, or all.")] = Missed.ONCE
    grace_s: Annotated[float, about("With `skip`: maximum delay of a job, in seconds.")] = 60
    missed_limit: Annotated[int, about("With `all`: maximum number of times, the newest.")] = 100
    missed_within_s: Annotated[float, about("With `all`: maximum age in seconds.")] | None = None
    overlap: Annotated[
        Overlap,
        about(
            "Overlap policy while a job has not ended: one job waits, the time is skipped, all jobs wait, the"
            " earlier job is canceled, or both run concurrently."
        ),
    ] = Overlap.BUFFER_ONE
    jitter_s: Annotated[float, about("Delay each job by a random time, at most this many seconds.")] = 0
    pause_on_failure: Annotated[bool, about("Pause the schedule when one of its jobs has failed for good.")] = False


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

    times: Annotated[list[Instant], about("Times, ascending.")]


@schedules.declare("GET", "/schedules/{name}/next", role=Role.READ, errors=(ScheduleNotFound,))
class ListNextTimes(NamedSchedule, Operation[NextTimes]):
    """List the next planned times of a schedule, whether it is paused or not."""

    number: Annotated[int, Meta(ge=1, le=MAX_NEXT, description="Maximum number of times.")] = 10


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

    job_id: Annotated[UUID, about("ID of the job.")]
    queue: QueueName
    status: Annotated[Status, about("Status of the job.")]
    created: Annotated[bool, about("False if an earlier request added the job.")]


@schedules.declare(
    "POST",
    "/schedules/{name}/run",
    role=Role.OPERATE,
    errors=(ScheduleNotFound, IdempotencyConflict),
    in_query=True,
)
class RunSchedule(NamedSchedule, Operation[Enqueued]):
    """Add a job of a schedule now, in addition to its plan. 201 if it is new, 200 if an earlier request added it."""

    job_id: Annotated[UUID, Meta(description="ID of the job. Repeating the ID adds no second job.")] | None = None


class BackfillRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Planned times that get jobs, from `begin` to `end` (exclusive)."""

    EXAMPLE: ClassVar[Any] = {"begin": "2026-11-01T00:00:00Z", "end": "2026-11-08T00:00:00Z", "dry_run": True}

    begin: Annotated[Instant, about("Begin (inclusive).")]
    end: Annotated[Instant, about("End (exclusive).")]
    again: Annotated[bool, about("Also enqueue jobs for times that already have one.")] = False
    dry_run: Annotated[bool, about("Only return the times, without adding jobs.")] = False
    backfill_id: (
        Annotated[UUID, about("ID of the backfill. A repeated request with this ID adds no job twice.")] | None
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

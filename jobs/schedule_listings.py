"""Schedules as they are stored, their events, and the answers to operations on them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Annotated, Any, Final, Literal
from uuid import UUID

import attrs

from dataloader.jobs.errors import NotFound
from dataloader.jobs.model import Instant, about
from dataloader.jobs.page_cursor import Next
from dataloader.jobs.schedules import Schedule
from dataloader.jobs.secrets.record_masks import FIXED_WORD, SENSITIVE

MAX_BACKFILL: Final = 10_000
"""Maximum number of planned times of one backfill."""
MAX_NEXT: Final = 1_000

Origin = Literal["code", "operator"]


class ScheduleNotFound(NotFound):
    """No schedule has this name."""


@attrs.frozen(kw_only=True)
class ScheduleRecord:
    """Schedule as it is stored."""

    name: Annotated[str, about("Name of the schedule."), SENSITIVE]
    task: Annotated[str, about("Task of its jobs."), SENSITIVE]
    spec: Annotated[Mapping[str, Any], about("Declaration: times, args, options and policies."), SENSITIVE]
    origin: Annotated[
        Origin, about("`code`: declared by programs; `operator`: stored by an operator, and not changed by programs.")
    ]
    stored_by: Annotated[str, about("Process or operator that stored it last."), SENSITIVE]
    stored_at: Annotated[Instant, about("Time at which it was first stored.")]
    changed_at: Annotated[Instant, about("Time at which it was last stored.")]
    next_at: Annotated[
        Instant | None, about("Next planned time; null if the schedule is paused or retired, or has no more times.")
    ]
    last_at: Annotated[Instant | None, about("Newest planned time with a job.")]
    last_job_id: Annotated[UUID | None, about("ID of this job.")]
    paused: Annotated[bool, about("True if it is paused and enqueues no jobs.")]
    paused_why: Annotated[str | None, about("Reason of the pause."), SENSITIVE]
    retired_at: Annotated[Instant | None, about("Time since which no program declares it; it enqueues no jobs.")]
    unknown_task: Annotated[bool, about("True if no process has declared its task; the name may be mistyped.")] = False
    fault: Annotated[
        str | None, about("Error in `spec`, if it is unreadable; the schedule enqueues no jobs."), SENSITIVE
    ] = None

    @property
    def schedule(self) -> Schedule:
        """Schedule itself. Raises `BadRequest` if it has a `fault`."""
        return Schedule.of_spec(self.name, self.spec)

    def next_times(self, number: int) -> list[datetime]:
        """Return its next planned times, at most `number`; for a paused or retired schedule, those after now."""
        schedule = self.schedule
        times = schedule.times(self.stored_at)
        is_off = self.paused or self.retired_at is not None
        first = schedule.next_after(times, datetime.now(UTC)) if is_off else self.next_at
        if first is None:
            return []
        found: list[datetime] = []
        # Another program may have stored a time near Python's limits.
        with suppress(OverflowError):
            found.extend(islice(times.after(first - timedelta(microseconds=1)), number))
        return [at for at in found if schedule.end_at is None or at < schedule.end_at]


@attrs.frozen
class SchedulePage:
    """Page of schedules, by name."""

    schedules: Annotated[list[ScheduleRecord], about("Schedules.")]
    next: Next


@attrs.frozen(kw_only=True)
class ScheduleEvent:
    """Event of a schedule, or of planned times that have no job."""

    event_id: Annotated[int, about("The event's number; later events have larger ones.")]
    at: Annotated[Instant, about("Timestamp of the event; for skipped times, the first of them.")]
    kind: Annotated[
        str,
        about("Kind: `left_out`, `paused`, `resumed`, `changed`, `retired` or `backfilled`."),
        FIXED_WORD,
    ]
    payload: Annotated[
        Mapping[str, Any] | None,
        about("Details; for skipped times, their number, and the `first` and `last` of them."),
        SENSITIVE,
    ]


@attrs.frozen
class ScheduleEventPage:
    """Page of a schedule's events, latest first."""

    events: Annotated[list[ScheduleEvent], about("Events.")]
    next: Next


@attrs.frozen(kw_only=True)
class Backfilled:
    """Jobs that a backfill has added, or would add."""

    backfill: Annotated[UUID | None, about("ID of the backfill, which its jobs have; null for a dry run.")]
    times: Annotated[list[Instant], about("Planned times that get a job, ascending.")]
    had_jobs: Annotated[int, about("Number of planned times that already have a job.")]

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

MAX_BACKFILL: Final = 10_000
"""Maximum number of planned times of one backfill."""
MAX_NEXT: Final = 1_000

Origin = Literal["code", "operator"]


class ScheduleNotFound(NotFound):
    """No schedule has this name."""


@attrs.frozen(kw_only=True)
class ScheduleRecord:
    """Schedule as it is stored."""

    name: Annotated[str, about("The schedule's name.")]
    task: Annotated[str, about("The task of its jobs.")]
    spec: Annotated[Mapping[str, Any], about("What was declared: its times, args, options and policies.")]
    origin: Annotated[Origin, about("`code`: programs declare it; `operator`: it was put by hand, and they leave it.")]
    stored_by: Annotated[str, about("Who stored it last: a process, or an operator.")]
    stored_at: Annotated[Instant, about("When it was stored first.")]
    changed_at: Annotated[Instant, about("When it was stored last.")]
    next_at: Annotated[Instant | None, about("The next planned time; null: it is paused or retired, or none is left.")]
    last_at: Annotated[Instant | None, about("The newest planned time that has a job.")]
    last_job_id: Annotated[UUID | None, about("That job.")]
    paused: Annotated[bool, about("Whether it is paused: it adds no jobs.")]
    paused_why: Annotated[str | None, about("Why it is paused.")]
    retired_at: Annotated[Instant | None, about("When the programs no longer declared it: it adds no jobs.")]
    unknown_task: Annotated[bool, about("Whether no process has declared its task: the name may be mistyped.")] = False
    fault: Annotated[str | None, about("What is wrong with `spec`, if it can't be read: it adds no jobs.")] = None

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

    schedules: Annotated[list[ScheduleRecord], about("The schedules.")]
    next: Next


@attrs.frozen(kw_only=True)
class ScheduleEvent:
    """Event of a schedule, or of planned times that have no job."""

    event_id: Annotated[int, about("The event's number; later events have larger ones.")]
    at: Annotated[Instant, about("When it happened; of times that were left out, when the first of them was.")]
    kind: Annotated[str, about("`left_out`, `paused`, `resumed`, `changed`, `retired`, `backfilled`.")]
    payload: Annotated[
        Mapping[str, Any] | None,
        about("What there is to say of it; of times that were left out, how many, from the `first` to the `last`."),
    ]


@attrs.frozen
class ScheduleEventPage:
    """Page of a schedule's events, latest first."""

    events: Annotated[list[ScheduleEvent], about("The events.")]
    next: Next


@attrs.frozen(kw_only=True)
class Backfilled:
    """Jobs that a backfill has added, or would add."""

    backfill: Annotated[UUID | None, about("The backfill's id, which its jobs have; null for a dry run.")]
    times: Annotated[list[Instant], about("The planned times that get a job, ascending.")]
    had_jobs: Annotated[int, about("Planned times that have a job already, and get none.")]

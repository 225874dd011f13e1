"""Schedules: which runs are due, which were missed, and when the next one is. Pure: uses no clock and no database.

The next run follows from the planned time of the last one, never from its end. A long pause takes no extra time: missed
times are found backwards from now, or by division.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from hashlib import sha256
from itertools import islice, takewhile
from types import MappingProxyType
from typing import Any, Final, Protocol

import attrs
import msgspec

from dataloader.jobs.cron import Cron, shortest_pause
from dataloader.jobs.errors import BadRequest
from dataloader.jobs.fault_texts import in_our_words
from dataloader.jobs.former_names import former_value
from dataloader.jobs.model import JOB_FIELDS, MAX_NAME, NewJob, check_between, check_instant, check_name
from dataloader.jobs.zones import zone_named

MAX_MISSED: Final = 10_000
MAX_PERIOD_S: Final = 100 * 366 * 86_400
COUNTED: Final = 1_000
"""Maximum number to which left-out runs are counted."""


class Missed(StrEnum):
    """Catch-up policy: how runs are handled whose time passed while no process could start them."""

    SKIP = "skip"
    """A run that is later than `grace_s` is left out."""
    ONCE = "once"
    """The latest run is caught up, the others are left out."""
    ALL = "all"
    """The newest `missed_limit` runs of the last `missed_within_s` seconds are caught up, oldest first."""


class Overlap(StrEnum):
    """Overlap policy: how a run is handled that is due while an earlier run of the schedule has not ended."""

    BUFFER_ONE = "buffer_one"
    """The run waits for the end of the earlier run. While one run waits already, further runs are left out."""
    SKIP = "skip"
    """The run is left out."""
    BUFFER_ALL = "buffer_all"
    """All runs wait. They run one after the other, in no guaranteed order."""
    CANCEL = "cancel"
    """The earlier run is canceled. The new run starts when it has ended."""
    ALLOW = "allow"
    """The run starts beside the earlier run."""


FORMER_OVERLAPS: Final = MappingProxyType({"one": "buffer_one", "all": "buffer_all", "parallel": "allow"})
"""New name of each renamed overlap policy."""


class Times(Protocol):
    """Planned times of a schedule."""

    def after(self, instant: datetime, until: datetime | None = None) -> Iterator[datetime]:
        """Yield the times later than `instant`, ascending; up to and including `until` if it is given."""

    def until(self, instant: datetime, after: datetime) -> Iterator[datetime]:
        """Yield the times not later than `instant` and later than `after`, descending."""


@attrs.frozen
class Every:
    """Times at a fixed `period` from `start` on."""

    start: datetime
    period: timedelta

    def after(self, instant: datetime, until: datetime | None = None) -> Iterator[datetime]:
        """Yield later times, as `Times` describes."""
        number = max((instant - self.start) // self.period + 1, 0)
        while until is None or self.start + number * self.period <= until:
            yield self.start + number * self.period
            number += 1

    def until(self, instant: datetime, after: datetime) -> Iterator[datetime]:
        """Yield earlier times, as `Times` describes."""
        number = (instant - self.start) // self.period
        while number >= 0 and self.start + number * self.period > after:
            yield self.start + number * self.period
            number -= 1

    def begun_by(self, instant: datetime) -> Every:
        """Return the same times, extended backwards to begin at `instant` or earlier."""
        earlier = max(-((instant - self.start) // self.period), 0)
        return Every(self.start - earlier * self.period, self.period)


def _missed(value: Missed | str) -> Missed:
    return Missed(_choice("missed", Missed, value))


def _overlap(value: Overlap | str) -> Overlap:
    if isinstance(value, str) and value in FORMER_OVERLAPS:
        raise BadRequest("overlap", former_value(value, FORMER_OVERLAPS[value]))
    return Overlap(_choice("overlap", Overlap, value))


def _choice(field: str, choices: type[StrEnum], value: str) -> StrEnum:
    try:
        return choices(value)
    except ValueError:
        raise BadRequest(field, f"must be one of {', '.join(choices)}, not {value!r:.60}") from None


@attrs.frozen(kw_only=True)
class Schedule:
    """Schedule that adds jobs of `task` automatically.

    Times are those of the expression `cron` by the clock of `zone`, or one every `every_s` seconds from `start_at` on,
    by default from when the schedule is first stored. There are none from `end_at` on. `job` has the options of each
    job, as in a trigger request.

    `jitter_s` delays the start of a job by up to `jitter_s` seconds, never its planned time; each time gets the same
    delay in all processes. With `pause_on_failure` the schedule is paused when one of its jobs has failed for good.

    Raises `BadRequest`, which names the field, for values out of range.
    """

    name: str
    task: str
    args: Mapping[str, Any] = attrs.field(factory=dict)
    cron: str | None = None
    every_s: float | None = None
    zone: str = "UTC"
    start_at: datetime | None = None
    end_at: datetime | None = None
    missed: Missed = attrs.field(default=Missed.ONCE, converter=_missed)
    grace_s: float = 60
    missed_limit: int = 100
    missed_within_s: float | None = None
    overlap: Overlap = attrs.field(default=Overlap.BUFFER_ONE, converter=_overlap)
    jitter_s: float = 0
    pause_on_failure: bool = False
    job: Mapping[str, Any] = attrs.field(factory=dict)
    _cron: Cron | None = attrs.field(init=False, default=None, repr=False, eq=False)

    def __attrs_post_init__(self) -> None:
        """Refuse invalid values."""
        check_name("name", self.name, MAX_NAME)
        check_name("task", self.task, MAX_NAME)
        if (self.cron is None) == (self.every_s is None):
            raise BadRequest("cron" if self.cron is not None else "every_s", "must have either cron or every_s")
        zone = zone_named(self.zone)
        for field in ("start_at", "end_at"):
            value = getattr(self, field)
            if value is not None:
                check_instant(field, value)
        if self.start_at is not None and self.end_at is not None and self.end_at <= self.start_at:
            raise BadRequest("end_at", f"must be later than start_at, not {self.end_at.isoformat()}")
        if self.every_s is not None:
            _check_seconds("every_s", self.every_s, 1, MAX_PERIOD_S)
        _check_seconds("grace_s", self.grace_s, 0, MAX_PERIOD_S)
        check_between("missed_limit", self.missed_limit, 1, MAX_MISSED)
        if self.missed_within_s is not None:
            _check_seconds("missed_within_s", self.missed_within_s, 1, MAX_PERIOD_S)
        _check_seconds("jitter_s", self.jitter_s, 0, MAX_PERIOD_S)
        if self.cron is not None:
            object.__setattr__(self, "_cron", Cron.parsed(self.cron, zone))
        if self.jitter_s and self.jitter_s >= (shortest_s := self._shortest_pause_s()):
            allowed = f"must be less than the shortest interval between two runs, {shortest_s:g} s"
            raise BadRequest("jitter_s", f"{allowed}, not {self.jitter_s:g}")

    @classmethod
    def of_spec(cls, name: str, spec: Mapping[str, Any]) -> Schedule:
        """Return the schedule of `spec`. Raises `BadRequest`, also for a value that is not a spec at all."""
        if not isinstance(spec, Mapping):
            raise BadRequest("spec", f"must be an object with a schedule's fields, not {spec!r:.60}")
        for field in ("args", "job"):
            if not isinstance(spec.get(field, {}), Mapping):
                raise BadRequest(field, f"must be an object, not {spec[field]!r:.60}")
        if "task" not in spec:
            raise BadRequest("task", "is required")
        unknown = sorted(spec.keys() - _FIELDS)
        if unknown:
            raise BadRequest(unknown[0], f"is not a field of a schedule; the fields are {', '.join(sorted(_FIELDS))}")
        instants = {field: _parsed_instant(field, spec[field]) for field in ("start_at", "end_at") if spec.get(field)}
        try:
            return cls(name=name, **{**spec, **instants})
        except BadRequest:
            raise
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            # A field is missing, or of another type: any program may have written the row.
            raise BadRequest("spec", f"is not valid for a schedule: {error}") from error

    def spec(self) -> dict[str, Any]:
        """Return the JSON form that `of_spec` reads, without default values."""
        fields = [field for field in attrs.fields(Schedule) if field.name in _FIELDS]
        values = {field.name: getattr(self, field.name) for field in fields}
        said = {field.name for field in fields if values[field.name] not in (field.default, {})}
        return {
            name: value.isoformat() if isinstance(value, datetime) else value
            for name, value in values.items()
            if name in said
        }

    def new_job(self, **fields: Any) -> NewJob:
        """Return a job of the schedule with `fields` and, with precedence, the options of `job`, as a trigger would.

        Raises `BadRequest`, which names the option, such as `job.priority`.
        """
        unknown = sorted(self.job.keys() - _JOB_OPTIONS)
        if unknown:
            raise BadRequest(
                f"job.{unknown[0]:.60}",
                f"is not an option of a schedule's jobs; the options are {', '.join(sorted(_JOB_OPTIONS))}",
            )
        try:
            return msgspec.convert({"task": self.task, "args": dict(self.args), **fields, **self.job}, NewJob)
        except msgspec.ValidationError as error:
            raise _refusal_of_job(error, self.job) from error

    def check_job(self) -> None:
        """Raise `BadRequest` if no job can have the options of `job`. Called before a schedule is stored.

        Stored schedules are read without this check, since another program may have written them.
        """
        self.new_job()

    @property
    def timing(self) -> tuple[object, ...]:
        """Fields that determine its times; if they change, the schedule starts over."""
        return self.cron, self.every_s, self.zone, self.start_at, self.end_at

    @property
    def planning(self) -> tuple[object, ...]:
        """Fields that `plan` depends on, besides its arguments."""
        return self.timing, self.missed, self.grace_s, self.missed_limit, self.missed_within_s

    def _shortest_pause_s(self) -> float:
        if self._cron is None:
            return self.every_s or 0
        return shortest_pause(self._cron, datetime(2000, 1, 1, tzinfo=UTC)).total_seconds()

    def times(self, stored_at: datetime) -> Times:
        """Return its planned times, if it was first stored at `stored_at`."""
        if self._cron is not None:
            return self._cron
        assert self.every_s is not None, "one of the two is given"  # noqa: S101
        return Every(self.start_at or stored_at, timedelta(seconds=self.every_s))

    def next_after(self, times: Times, instant: datetime) -> datetime | None:
        """Return its first planned time after `instant`, or None."""
        begin = instant
        if self.start_at is not None:
            begin = max(instant, self.start_at - timedelta(microseconds=1))
        try:
            found = next(times.after(begin), None)
        except OverflowError:
            return None  # it would be later than the year 9999, Python's last
        return None if found is None or (self.end_at is not None and found >= self.end_at) else found

    def available_at(self, planned_at: datetime) -> datetime:
        """Return when the job of a planned time may start: with the jitter, the same in all processes."""
        if not self.jitter_s:
            return planned_at
        digest = sha256(f"{self.name}\n{planned_at.timestamp():.3f}".encode()).digest()
        share = int.from_bytes(digest[:8]) / 2**64
        return planned_at + timedelta(seconds=share * self.jitter_s)


_FIELDS: Final = {field.name for field in attrs.fields(Schedule)} - {"name", "_cron"}
_JOB_OPTIONS: Final = frozenset(name for name, field in JOB_FIELDS.items() if not field.is_single)
"""Options of a trigger, without those for single jobs."""
_WHERE: Final = re.compile(r"(.*?) - at `\$\.?([^`]*)`", re.DOTALL)


def _refusal_of_job(error: msgspec.ValidationError, job: Mapping[str, Any]) -> BadRequest:
    """Return the refusal of an option, or of the task or the args, in our words."""
    if isinstance(error.__cause__, BadRequest):
        name, message = error.__cause__.field, error.__cause__.message
    else:
        match = _WHERE.fullmatch(str(error))
        name, message = (match[2], match[1]) if match else ("job", str(error))
        message = in_our_words(message, Any)
    return BadRequest(f"job.{name}" if re.split(r"[.\[]", name)[0] in job else name, message)


def _parsed_instant(field: str, value: Any) -> datetime:
    if isinstance(value, datetime):
        return value
    try:
        return datetime.fromisoformat(value)
    except (TypeError, ValueError):
        raise BadRequest(field, f"must be a timestamp with a time zone (RFC 3339), not {value!r:.60}") from None


@attrs.frozen
class PlannedTimes:
    """Plan for a schedule that is due.

    `due` has the planned times of the runs to be added, ascending. `left_out` is the number of other due times, up to
    `COUNTED`, from `first_left_out` to `last_left_out`. `next_at` is the next planned time, None if there is none.
    """

    due: tuple[datetime, ...]
    left_out: int
    first_left_out: datetime | None
    last_left_out: datetime | None
    next_at: datetime | None


def plan(schedule: Schedule, times: Times, next_at: datetime, now: datetime) -> PlannedTimes:
    """Return the plan at `now` for a schedule whose next run was planned for `next_at`.

    Times before `next_at` are ignored: a clock that was put back repeats no run.
    """
    if now < next_at:
        return PlannedTimes((), 0, None, None, next_at)
    before = next_at - timedelta(microseconds=1)
    last = now if schedule.end_at is None else min(now, schedule.end_at - timedelta(microseconds=1))
    past = times.until(last, before)
    due = list(_times_to_run(schedule, past, now))
    oldest = due[-1] if due else None
    # Left-out times are all earlier than the times to be run.
    rest = times.until(last if oldest is None else oldest - timedelta(microseconds=1), before)
    left_out = list(islice(rest, COUNTED))
    return PlannedTimes(
        tuple(reversed(due)),
        len(left_out),
        next_at if left_out else None,
        left_out[0] if left_out else None,
        schedule.next_after(times, now),
    )


def _times_to_run(schedule: Schedule, past: Iterable[datetime], now: datetime) -> Iterator[datetime]:
    """Yield the past times, newest first, that are to be run."""
    match schedule.missed:
        case Missed.ONCE:
            return islice(past, 1)
        case Missed.SKIP:
            within_s: float | None = schedule.grace_s
        case Missed.ALL:
            within_s = schedule.missed_within_s
    if within_s is not None:
        earliest = now - timedelta(seconds=within_s)
        past = takewhile(lambda planned_at: planned_at >= earliest, past)
    return islice(past, schedule.missed_limit)


def _check_seconds(field: str, value: float, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (low <= value <= high) or math.isnan(value):
        raise BadRequest(field, f"must be a number of seconds from {low:g} to {high:,}, not {value!r:.60}")

"""Timeline of a run: each task as a bar on a line for the whole run, with its phases."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any, Final

import attrs

from dataloader.store.etl.run_views import RunView, RunViewTask
from dataloader.web.pages.formats import duration, in_zone, inert, words

MOST_LANES: Final = 6
"""Maximum number of lanes of a bar; more would be too thin to see."""
_PHASES: Final = ("requests", "processing", "writing")
_STEPS_S: Final = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1_800, 3_600, 7_200, 10_800, 21_600, 43_200, 86_400)
_MOST_TICKS: Final = 6


@attrs.frozen
class Lane:
    """Part of a task: a phase of a load, or a table of dimensions."""

    name: str
    kind: str
    since: datetime
    until: datetime
    busy_s: float | None


@attrs.frozen
class Line:
    """Time between two timestamps as a line from 0 to 1."""

    since: datetime
    until: datetime

    @classmethod
    def of(cls, run: RunView) -> Line:
        """Return the line of a run. During the run its end moves in steps, so that most refreshes find no change."""
        if run.is_over:
            instants = [run.finished_at, *(task.finished_at for task in run.tasks)]
            until = max((instant for instant in instants if instant is not None), default=run.started_at)
        else:
            past_s = max(1.0, (run.now - run.started_at).total_seconds())
            step_s = 2 ** max(0, int(past_s / 64).bit_length())
            until = run.started_at + timedelta(seconds=(past_s // step_s + 1) * step_s)
        return cls(run.started_at, max(until, run.started_at + timedelta(milliseconds=1)))

    def at(self, instant: datetime) -> float:
        """Return the position of a timestamp."""
        return (instant - self.since) / (self.until - self.since)

    def marks(self, tz: tzinfo) -> list[tuple[float, str]]:
        """Return round times of a zone along the line, with their labels."""
        whole_s = (self.until - self.since).total_seconds()
        step_s = next((step for step in _STEPS_S if whole_s / step <= _MOST_TICKS), None)
        if step_s is None:
            step_s = 86_400 * (1 + int(whole_s / 86_400 / _MOST_TICKS))
        form = "%m-%d" if step_s >= 86_400 else "%H:%M" if step_s >= 60 else "%H:%M:%S"
        offset_s = (in_zone(self.since, tz).utcoffset() or timedelta()).total_seconds()
        first_s = -((self.since.timestamp() + offset_s) // -step_s) * step_s - offset_s
        marks = []
        for number in range(_MOST_TICKS + 2):
            at = datetime.fromtimestamp(first_s + number * step_s, UTC)
            if at <= self.until:
                marks.append((self.at(at), in_zone(at, tz).strftime(form)))
        # A label at the end would be cut off.
        return [mark for mark in marks if mark[0] < 1 - len(mark[1]) / 60]


def lanes_of(task: RunViewTask) -> list[Lane]:
    """Return the phases or tables of a task with known times, in order."""
    parts: Mapping[str, Any] = task.phases or task.tables
    found = []
    for number, (name, part) in enumerate(sorted(parts.items(), key=_phase_order)):
        times = part if isinstance(part, Mapping) else {}
        since, until = _instant_in_utc(times.get("began_at")), _instant_in_utc(times.get("ended_at"))
        if since is not None and until is not None:
            kind = name if task.phases else "failed" if times.get("status") == "failed" else f"table-{number % 2}"
            busy_s = times.get("busy_s")
            found.append(Lane(name, kind, since, until, busy_s if isinstance(busy_s, int | float) else None))
    return found[:MOST_LANES]


def _phase_order(part: tuple[str, object]) -> tuple[int, str]:
    return (_PHASES.index(part[0]) if part[0] in _PHASES else len(_PHASES)), part[0]


def _instant_in_utc(text: object) -> datetime | None:
    try:
        instant = datetime.fromisoformat(text) if isinstance(text, str) else None
    except ValueError:
        return None
    return instant if instant is None or instant.tzinfo is not None else instant.replace(tzinfo=UTC)


@attrs.frozen
class Bar:
    """Bar of a task that has begun; the arguments of `svg.lanes`."""

    start: float
    end: float
    label: str
    kind: str
    parts: list[tuple[float, float, str, str]]


def bar_of(task: RunViewTask, line: Line, tz: tzinfo) -> Bar | None:
    """Return the bar of a task, or None if it has not begun."""
    if task.started_at is None:
        return None
    ends = task.finished_at or line.until
    took = duration(task.took) if task.took is not None else "still running"
    said = (
        f"{words(task.status)}, {_clock_or_now(task.started_at, tz)} to {_clock_or_now(task.finished_at, tz)}, {took}"
    )
    parts = [
        (
            line.at(lane.since),
            line.at(lane.until),
            f"{inert(lane.name)} {_clock_or_now(lane.since, tz)} to {_clock_or_now(lane.until, tz)}"
            + ("" if lane.busy_s is None else f", {duration(lane.busy_s)} of work"),
            lane.kind,
        )
        for lane in lanes_of(task)
    ]
    return Bar(line.at(task.started_at), line.at(ends), said, task.status, parts)


def _clock_or_now(value: datetime | None, tz: tzinfo) -> str:
    return "now" if value is None else in_zone(value, tz).strftime("%H:%M:%S")

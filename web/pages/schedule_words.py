"""Schedule in words: its times, its policies for missed and overlapping times, its events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, tzinfo
from typing import Final
from zoneinfo import ZoneInfo

import attrs

from dataloader.jobs.schedule_listings import ScheduleEvent, ScheduleRecord
from dataloader.jobs.schedules import COUNTED, Missed, Overlap, Schedule
from dataloader.web.pages.formats import duration, number

_OVERLAPS: Final = {
    Overlap.BUFFER_ONE: "While a job has not ended, the next job waits for its end. Further times are skipped.",
    Overlap.SKIP: "While a job has not ended, times are skipped.",
    Overlap.BUFFER_ALL: "While a job has not ended, all later jobs wait. They run one at a time.",
    Overlap.CANCEL: "A job that has not ended is canceled when the next job is due. The next job starts afterwards.",
    Overlap.ALLOW: "Jobs run concurrently.",
}


def when(schedule: Schedule) -> str:
    """Return its times in short: the expression, or the period."""
    return schedule.cron if schedule.cron is not None else f"every {duration(schedule.every_s)}"


def state(record: ScheduleRecord) -> str:
    """Return its state: `on`, `paused`, `retired`, `faulty`, or `over` if no time is left."""
    if record.retired_at is not None:
        return "retired"
    if record.paused:
        return "paused"
    if record.fault is not None:
        return "faulty"
    return "on" if record.next_at is not None else "over"


def policies(schedule: Schedule) -> Iterator[str]:
    """Yield sentences about how its times are handled."""
    match schedule.missed:
        case Missed.ONCE:
            yield "Of missed times, only the latest is caught up."
        case Missed.SKIP:
            yield f"Times missed by more than {duration(schedule.grace_s)} are skipped."
        case Missed.ALL:
            within = "" if schedule.missed_within_s is None else f" of the last {duration(schedule.missed_within_s)}"
            yield (f"Of missed times, the newest {number(schedule.missed_limit)}{within} are caught up, oldest first.")
    yield _OVERLAPS[schedule.overlap]
    if schedule.jitter_s:
        yield f"Each job starts at a random time, up to {duration(schedule.jitter_s)} after its planned time."
    if schedule.pause_on_failure:
        yield "The schedule is paused when a job has failed for good."


@attrs.frozen
class PlannedTime:
    """Planned time. `there`: by the schedule's own clock; `changed`: how that clock was changed before it."""

    at: datetime
    there: str
    changed: str | None


def planned_times(times: Sequence[datetime], zone: tzinfo, last: datetime | None) -> Iterator[PlannedTime]:
    """Yield the times, marking changes of the schedule's clock between them; `last` is the previous time."""
    before = None if last is None else last.astimezone(zone).utcoffset()
    for at in times:
        there = at.astimezone(zone)
        ahead = there.utcoffset()
        changed = None
        if before is not None and ahead is not None and ahead != before:
            way = "forward" if ahead > before else "back"
            changed = f"clock moved {way} by {duration(abs(ahead - before))} since the previous time"
        yield PlannedTime(at, f"{there:%a %Y-%m-%d %H:%M:%S} {there:%z}", changed)
        before = ahead


def zone_of(schedule: Schedule) -> ZoneInfo:
    """Return the schedule's zone."""
    return ZoneInfo(schedule.zone)


_WHY: Final = {
    "missed": "missed: no process could start them",
    "overlap": "an earlier job had not ended",
    "unique": "another job covers them",
}


@attrs.frozen
class EventLine:
    """Event as a sentence, with the times that it is about."""

    at: datetime
    kind: str
    text: str
    first: datetime | None = None
    last: datetime | None = None


def event_line(event: ScheduleEvent) -> EventLine:
    """Return an event in words, or its kind if that is unknown."""
    given = event.payload or {}
    first, last = (
        _instant_with_zone(given.get("first") or given.get("begin")),
        _instant_with_zone(given.get("last") or given.get("end")),
    )
    match event.kind:
        case "left_out":
            times = given.get("times", 0)
            why = given.get("why", "")
            many = f"{times:,}" if isinstance(times, int) else str(times)
            if why == "missed" and isinstance(times, int) and times >= COUNTED:
                many += " or more"
            text = f"{many} skipped: {_WHY.get(str(why), why)}"
        case "backfilled":
            text = f"backfilled: {given.get('jobs', 0)} jobs"
        case _:
            by = given.get("by") or given.get("why")
            text = event.kind if by is None else f"{event.kind} ({by})"
    return EventLine(event.at, event.kind, text, first, last)


def _instant_with_zone(text: object) -> datetime | None:
    try:
        found = datetime.fromisoformat(text) if isinstance(text, str) else None
    except ValueError:
        return None
    return None if found is None or found.utcoffset() is None else found

"""Work periods: the times of a week in which work is allowed, by the wall clock of a zone.

`MON-FRI 00:00-06:00`, `SAT,SUN 10:00-24:00`, `DAILY 22:00-06:00`. The end is exclusive, and 23:59 means the end of the
day. A period whose end is before its start continues over midnight; its days are those on which it begins. In an hour
that the clock skips, a period is not open; in a repeated hour it is open twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from itertools import chain
from typing import Final
from zoneinfo import ZoneInfo

import attrs

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.zones import DAY, offset, spans, wall_time

DAYS: Final = ("MON", "TUE", "WED", "THU", "FRI", "SAT", "SUN")
WEEK: Final = 7 * 24 * 60
"""Minutes of a week, which begins on Monday at 00:00."""
_DAY_MINUTES: Final = 24 * 60
_LAST_MINUTE: Final = _DAY_MINUTES - 1
_PERIOD: Final = re.compile(r"(\S+) +(\d\d):([0-5]\d) *- *(\d\d):([0-5]\d)", re.ASCII)

Range = tuple[int, int]
"""Minutes of a week from the first to the second (exclusive)."""


@attrs.frozen
class WorkPeriods:
    """Open minutes of a week, as ranges that neither touch nor overlap, ascending.

    `ahead` is how far the authoritative clock is ahead of the zone's clock here: the database may have other zone data.
    """

    ranges: tuple[Range, ...]
    zone: ZoneInfo
    ahead: timedelta = timedelta(0)

    @classmethod
    def parsed(cls, texts: Iterable[str], zone: ZoneInfo) -> WorkPeriods:
        """Return the periods of `texts` together; no texts mean always. Raises `BadRequest` for an invalid period."""
        ranges = _joined(chain.from_iterable(map(_parsed_period, texts)))
        return cls(tuple(ranges) or ((0, WEEK),), zone)

    def is_open(self, instant: datetime) -> bool:
        """Return True if a period is open at `instant`."""
        return self._is_open(instant + self.ahead)

    def _is_open(self, instant: datetime) -> bool:
        wall = wall_time(instant, offset(self.zone, instant))
        minute = wall.weekday() * _DAY_MINUTES + wall.hour * 60 + wall.minute
        return any(begin <= minute < end for begin, end in self.ranges)

    def next_change(self, instant: datetime) -> datetime | None:
        """Return the next time at which it opens or closes, or None if it never does."""
        shown = instant + self.ahead
        is_open = self._is_open(shown)
        # Longer than a week: if a day is skipped, its period waits for the next one.
        for change in self._candidates(shown, shown + 15 * DAY):
            if self._is_open(change) != is_open:
                return change - self.ahead
        return None

    def _candidates(self, begin: datetime, end: datetime) -> Iterator[datetime]:
        """Yield the times later than `begin` at which it may open or close, ascending."""
        edges = sorted(set(chain.from_iterable(self.ranges)))
        for span in spans(self.zone, begin, end):
            if span.begin > begin:
                yield span.begin
            shown = wall_time(span.begin, span.offset)
            monday = shown.replace(hour=0, minute=0, second=0, microsecond=0) - shown.weekday() * DAY
            for week in (0, 1):
                for edge in edges:
                    found = span.begin + (monday + timedelta(weeks=week, minutes=edge) - shown)
                    if span.begin < found < span.end:
                        yield found


def closes_at(together: Iterable[tuple[WorkPeriods, float]], instant: datetime) -> datetime | None:
    """Return when the first of several periods closes, each earlier by its margin in seconds, or None for never.

    It is `instant` itself if one is closed, or closes within its margin. A period that opens within its margin counts
    as open: a job that starts exactly at the opening, by another clock, is not stopped.
    """
    closes: datetime | None = None
    for periods, margin_s in together:
        margin = timedelta(seconds=margin_s)
        if not periods.is_open(instant + margin):
            return instant
        change = periods.next_change(instant + margin)
        if change is not None and (closes is None or change - margin < closes):
            closes = change - margin
    return closes


def _parsed_period(text: str) -> Iterator[Range]:
    match = _PERIOD.fullmatch(text.strip().upper()) if isinstance(text, str) else None
    if match is None:
        raise _refused_periods(text, "is not a period")
    days, *clock = match.groups()
    begin_hour, begin_minute, end_hour, end_minute = map(int, clock)
    begin, end = begin_hour * 60 + begin_minute, end_hour * 60 + end_minute
    if begin >= _DAY_MINUTES or end > _DAY_MINUTES:
        raise _refused_periods(text, "has an invalid time")
    if end == _LAST_MINUTE:
        end = _DAY_MINUTES
    if begin == end:
        raise _refused_periods(text, "is empty; a whole day is 00:00-24:00")
    if end < begin:
        end += _DAY_MINUTES
    for day in _days(text, days):
        yield day * _DAY_MINUTES + begin, day * _DAY_MINUTES + end


def _days(text: str, days: str) -> Iterator[int]:
    if days == "DAILY":
        yield from range(7)
        return
    for part in days.split(","):
        first, dash, last = part.partition("-")
        if first not in DAYS or (dash and last not in DAYS):
            raise _refused_periods(text, f"has unknown days ({part!r})")
        begin, end = DAYS.index(first), DAYS.index(last or first)
        yield from (day % 7 for day in range(begin, end + 1 + 7 * (end < begin)))


def _joined(ranges: Iterable[Range]) -> list[Range]:
    """Return the same minutes, within the week and in ranges that neither touch nor overlap."""
    within = chain.from_iterable(
        [(begin, end)] if end <= WEEK else [(begin, WEEK), (0, end - WEEK)] for begin, end in ranges
    )
    joined: list[Range] = []
    for begin, end in sorted(within):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


def _refused_periods(text: str, what: str) -> BadRequest:
    return BadRequest(
        "work_periods",
        "must be days and times, such as 'MON-FRI 00:00-06:00', 'SAT,SUN 10:00-24:00' or 'DAILY 22:00-06:00'; "
        f"{text!r:.100} {what}",
    )

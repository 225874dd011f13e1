"""Windows: the time span that a run loads, and its division into segments.

A run begins at the watermark of the run before, minus a look-back for records that are corrected late. It ends now.
Segments are divided at calendar boundaries of a time zone, so that a day is always in the same segment. Each segment is
committed as a whole.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from typing import Final, Literal
from zoneinfo import ZoneInfo

import attrs

from dataloader.flows.etl.sources.source import Window
from dataloader.jobs.errors import BadRequest

SegmentUnit = Literal["hour", "day", "week", "month", "year"]
SEGMENTS: Final = ("hour", "day", "week", "month", "year")
MOST_SEGMENTS: Final = 100_000


def begin_of_day(day: date, zone: tzinfo) -> datetime:
    """Return the first moment of a day in a zone: midnight, unless a clock change skips it.

    In that case it is the moment of the change: in Santiago and Cairo a day may begin at 01:00. If midnight occurs
    twice, the day begins at the first one. If there is no such day, it is the beginning of the next one.
    """
    # In a gap, the two readings of a wall clock time are swapped: the offset after the gap gives the earlier time.
    after, before = (datetime.combine(day, time(fold=fold), zone).astimezone(UTC) for fold in (1, 0))
    if after >= before:
        return before.astimezone(zone)
    seconds = range(int((before - after).total_seconds()))
    passed = bisect_left(seconds, day, key=lambda passed: (after + timedelta(seconds=passed)).astimezone(zone).date())
    return (after + timedelta(seconds=passed)).astimezone(zone)


def is_begin_of_day(moment: datetime) -> bool:
    """Return whether a timestamp, in its own zone, is the first moment of its day."""
    assert moment.tzinfo is not None  # noqa: S101 - windows have a zone
    return moment.astimezone(UTC) == begin_of_day(moment.date(), moment.tzinfo).astimezone(UTC)


def as_instant(value: date | datetime, zone: ZoneInfo) -> datetime:
    """Convert a day or a timestamp to a timestamp: a day to its first moment. A value without a zone is in `zone`."""
    if not isinstance(value, datetime):
        return begin_of_day(value, zone)
    return value.replace(tzinfo=zone) if value.tzinfo is None else value.astimezone(zone)


@attrs.frozen(kw_only=True)
class Windows:
    """Windows of a load.

    Args:
        start: start of the first run; a day begins at its first moment in `zone`. A backfill may begin earlier.
        segment: length of a segment: `hour`, `day`, `week`, `month`, `year`, or a timedelta counted from `start`.
        look_back: time before the watermark that each run loads again.
        delay: time before now that is left out, because its records may be incomplete.
        column: the target's column with the time of a row, by which rows of a window are found that the source no
            longer has.
        zone: time zone in which days begin.

    Raises `ValueError` with the field and the allowed values.
    """

    start: date | datetime
    segment: SegmentUnit | timedelta = "month"
    look_back: timedelta = timedelta()
    delay: timedelta = timedelta()
    column: str | None = None
    zone: str = "UTC"

    def __attrs_post_init__(self) -> None:
        if isinstance(self.segment, timedelta):
            if self.segment < timedelta(seconds=1):
                raise ValueError(f"segment: must be at least a second, not {self.segment}")
        elif self.segment not in SEGMENTS:
            raise ValueError(f"segment: must be {', '.join(SEGMENTS)} or a timedelta, not {self.segment!r}")
        for name in ("look_back", "delay"):
            if getattr(self, name) < timedelta():
                raise ValueError(f"{name}: must be a timedelta, at least zero, not {getattr(self, name)}")
        try:
            self._zone()
        except (KeyError, ValueError):
            raise ValueError(f"zone: must be a time zone such as Europe/Berlin, not {self.zone!r}") from None

    def begin(self) -> datetime:
        """Return the beginning of the first run."""
        return as_instant(self.start, self._zone())

    def ends_before(self, end: datetime, until: date | datetime) -> bool:
        """Return whether `until`, a day or a timestamp, is after `end`."""
        return end.astimezone(UTC) < as_instant(until, self._zone()).astimezone(UTC)

    def plan(
        self,
        *,
        watermark: datetime | None,
        now: datetime,
        since: date | datetime | None = None,
        until: date | datetime | None = None,
    ) -> list[Window]:
        """Return the segments of a run, oldest first; none if nothing is new.

        Everything before `watermark` is loaded. `since` and `until`, if given, are the bounds instead. The last segment
        may end in the middle of its unit: at `until`, but not later than now minus the delay.

        Raises `BadRequest` if `since` is not before `until`, or for more than `MOST_SEGMENTS` segments.
        """
        zone = self._zone()
        # Never later than now, even if requested: the watermark would move over records of the future.
        end, told = now.astimezone(zone) - self.delay, "now"
        if self.delay:
            told = f"now minus the load's delay of {str(self.delay).removesuffix(', 0:00:00')}"
        if until is not None and as_instant(until, zone).astimezone(UTC) < end.astimezone(UTC):
            end, told = as_instant(until, zone), "the value of to"
        if since is not None:
            begin = as_instant(since, zone)
            if begin.astimezone(UTC) >= end.astimezone(UTC):
                shown = f"{end.isoformat(timespec='seconds')} ({told})"
                raise BadRequest("from", f"must be a time before {shown}, not {begin.isoformat()}")
        elif watermark is None:
            begin = as_instant(self.start, zone)
        else:
            begin = max(watermark - self.look_back, as_instant(self.start, zone).astimezone(UTC)).astimezone(zone)
        windows = []
        for window in self._cut(begin, end):
            windows.append(window)
            if len(windows) > MOST_SEGMENTS:
                raise BadRequest(
                    "from", f"more than {MOST_SEGMENTS:,} segments ({self.segment}) would have to be loaded"
                )
        return windows

    def _cut(self, begin: datetime, end: datetime) -> Iterator[Window]:
        # Compared in UTC: in an hour that occurs twice in a zone, the later of two timestamps may have the earlier wall
        # clock time.
        zone, begin, end = self._zone(), begin.astimezone(UTC), end.astimezone(UTC)
        while begin < end:
            following = min(self._next(begin.astimezone(zone)).astimezone(UTC), end)
            yield Window(begin.astimezone(zone), following.astimezone(zone))
            begin = following

    def _next(self, begin: datetime) -> datetime:
        """Return the first boundary after `begin`."""
        if isinstance(self.segment, timedelta):
            # Counted in absolute time from `start`, so a day of 23 or 25 hours moves no boundary.
            start = as_instant(self.start, self._zone()).astimezone(UTC)
            passed = (begin.astimezone(UTC) - start) // self.segment
            return (start + (passed + 1) * self.segment).astimezone(begin.tzinfo)
        if self.segment == "hour":
            utc = begin.astimezone(UTC).replace(minute=0, second=0, microsecond=0) + timedelta(hours=1)
            return utc.astimezone(begin.tzinfo)
        day = begin.date()
        match self.segment:
            case "day":
                day += timedelta(days=1)
            case "week":
                day += timedelta(days=7 - day.weekday())
            case "month":
                day = (day.replace(day=1) + timedelta(days=32)).replace(day=1)
            case "year":
                day = date(day.year + 1, 1, 1)
        return as_instant(day, self._zone())

    def _zone(self) -> ZoneInfo:
        return ZoneInfo(self.zone)

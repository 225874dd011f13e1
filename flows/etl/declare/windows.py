"""Which spans of time a run loads, and how they are cut into segments (E6).

A run begins where the last one has come to, less a look-back for what is corrected late, and ends now. Segments are cut
at calendar boundaries of a time zone, so that the same day always lies in the same segment; each is committed whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta
from typing import Final, Literal
from zoneinfo import ZoneInfo

import attrs

from dataloader.flows.etl.sources.source import Window
from dataloader.jobs.errors import BadRequest

SegmentUnit = Literal["hour", "day", "week", "month", "year"]
SEGMENTS: Final = ("hour", "day", "week", "month", "year")
MOST_SEGMENTS: Final = 100_000


def instant(value: date | datetime, zone: ZoneInfo) -> datetime:
    """A day or an instant as an instant: a day is its midnight, and what has no zone is in `zone`."""
    if not isinstance(value, datetime):
        value = datetime.combine(value, time())
    return value.replace(tzinfo=zone) if value.tzinfo is None else value.astimezone(zone)


@attrs.frozen(kw_only=True)
class Windows:
    """The windows of a load.

    `start` is where the very first run begins. `segment` is a calendar unit, or a timedelta counted from `start`.
    `look_back` is loaded again by each run. `delay` leaves out what is too young to be complete. `column` is the
    target's column that lies in the window: rows of a window that its source no longer has are looked for by it.
    `zone` is where days begin.

    Raises `ValueError`, which names the field and what is allowed.
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
                raise ValueError(f"segment: must be a second or more, not {self.segment}")
        elif self.segment not in SEGMENTS:
            raise ValueError(f"segment: must be {', '.join(SEGMENTS)} or a timedelta, not {self.segment!r}")
        for name in ("look_back", "delay"):
            if getattr(self, name) < timedelta():
                raise ValueError(f"{name}: must be a timedelta not below zero, not {getattr(self, name)}")
        try:
            self._zone()
        except (KeyError, ValueError):
            raise ValueError(f"zone: must be a time zone such as Europe/Berlin, not {self.zone!r}") from None

    def begin(self) -> datetime:
        """Where the very first run begins."""
        return instant(self.start, self._zone())

    def plan(
        self,
        *,
        watermark: datetime | None,
        now: datetime,
        since: date | datetime | None = None,
        until: date | datetime | None = None,
    ) -> list[Window]:
        """The segments of a run, oldest first; none if nothing is new.

        `watermark` is how far the load has come; `since` and `until`, when they are given, are loaded instead. The last
        segment may end in the middle of its unit: at `until`, and now less the delay at the latest.

        Raises `BadRequest` if `since` is not before `until`, or for more segments than anybody can want.
        """
        zone = self._zone()
        # Nor further when more was asked for: what is to come yet would never be loaded, behind the watermark.
        end, told = now.astimezone(zone) - self.delay, "now"
        if self.delay:
            told = f"now, less the load's delay of {str(self.delay).removesuffix(', 0:00:00')}"
        if until is not None and instant(until, zone).astimezone(UTC) < end.astimezone(UTC):
            end, told = instant(until, zone), "what is given as to"
        if since is not None:
            begin = instant(since, zone)
            if begin.astimezone(UTC) >= end.astimezone(UTC):
                shown = f"{end.isoformat(timespec='seconds')} ({told})"
                raise BadRequest("from", f"must be a time before {shown}, not {begin.isoformat()}")
        elif watermark is None:
            begin = instant(self.start, zone)
        else:
            begin = max(watermark - self.look_back, instant(self.start, zone).astimezone(UTC)).astimezone(zone)
        windows = []
        for window in self._cut(begin, end):
            windows.append(window)
            if len(windows) > MOST_SEGMENTS:
                raise BadRequest(
                    "from", f"more than {MOST_SEGMENTS:,} segments ({self.segment}) would have to be loaded"
                )
        return windows

    def _cut(self, begin: datetime, end: datetime) -> Iterator[Window]:
        # Compared in UTC: of two wall clock times in the hour that a zone has twice the later one may read less.
        zone, begin, end = self._zone(), begin.astimezone(UTC), end.astimezone(UTC)
        while begin < end:
            following = min(self._next(begin.astimezone(zone)).astimezone(UTC), end)
            yield Window(begin.astimezone(zone), following.astimezone(zone))
            begin = following

    def _next(self, begin: datetime) -> datetime:
        """The first boundary behind `begin`."""
        if isinstance(self.segment, timedelta):
            # Counted in absolute time from `start`: an hour more or less in a day moves no boundary.
            start = instant(self.start, self._zone()).astimezone(UTC)
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
        return instant(day, self._zone())

    def _zone(self) -> ZoneInfo:
        return ZoneInfo(self.zone)

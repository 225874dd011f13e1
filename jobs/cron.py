"""Cron expressions with a time zone, and their planned times.

Expressions are those of Debian's cron: five fields with names, ranges, lists and steps, extended by `L` (last) and `#`
(the nth weekday of a month). As in Debian's cron, an expression with a `*` in its minutes or hours follows the wall
clock: it does not run in an hour that the clock skips, and runs twice in an hour that is repeated. All others run at
fixed times: skipped times run right afterwards, and repeated times run once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta
from functools import lru_cache
from itertools import pairwise
from typing import Final
from zoneinfo import ZoneInfo

import attrs
from cronsim import CronSim, CronSimError

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.zones import DAY, Span, instant_of, spans, wall_time

ALIASES: Final = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
FIELDS: Final = 5
MAX_TEXT: Final = 1_000
"""Maximum number of characters of an expression. One that names all minutes, hours, days and months has under 600."""
HORIZON: Final = 50 * 366 * DAY
"""An expression without a time within this period never has one: 29 February on a weekday recurs within 40 years."""
PARSED: Final = 500
"""Number of parsed expressions kept in the cache: many schedules have the same one."""
_MINUTE: Final = timedelta(minutes=1)


@attrs.frozen
class Cron:
    """Timestamps of an expression, in whole seconds in UTC.

    Use `Cron.parsed`. `minutes` are the matching minutes of a day, ascending. `is_fixed` is True if neither minutes nor
    hours have a `*`.
    """

    text: str
    zone: ZoneInfo
    minutes: tuple[int, ...] = attrs.field(repr=False)
    is_fixed: bool = attrs.field(repr=False)
    _days: CronSim = attrs.field(repr=False, eq=False)

    @classmethod
    def parsed(cls, text: str, zone: ZoneInfo) -> Cron:
        """Parse the expression `text`, by the clock of `zone`.

        Raises `BadRequest` for an invalid expression, and for one that never has a time.
        """
        return _parsed_cron(text, zone)

    def after(self, instant: datetime, until: datetime | None = None) -> Iterator[datetime]:
        """Yield the times later than `instant`, ascending; up to and including `until` if it is given."""
        begin = _whole_seconds(instant) + timedelta(seconds=1)
        for span in spans(self.zone, begin, min(until or begin + HORIZON, begin + HORIZON) + timedelta(seconds=1)):
            for found in self._within(span):
                if until is not None and found > until:
                    return
                yield found

    def until(self, instant: datetime, after: datetime) -> Iterator[datetime]:
        """Yield the times not later than `instant` and later than `after`, descending."""
        end, begin = _whole_seconds(instant) + timedelta(seconds=1), _whole_seconds(after) + timedelta(seconds=1)
        while begin < end:
            start = max(end - DAY, begin)
            for span in reversed(list(spans(self.zone, start, end))):
                yield from reversed(list(self._within(span)))
            end = start

    def _within(self, span: Span) -> Iterator[datetime]:
        """Yield the times of a span, ascending."""
        was, shown = wall_time(span.begin, span.before), wall_time(span.begin, span.offset)
        # The clock was put forward: skipped times are due now.
        caught_up = self.is_fixed and was < shown and any(self._matching(was, shown))
        if caught_up:
            yield span.begin
        for wall in self._matching(shown, wall_time(span.end, span.offset)):
            found = instant_of(wall, span.offset)
            if not (caught_up and found == span.begin) and not (self.is_fixed and self._is_repeated(wall, found)):
                yield found

    def _is_repeated(self, wall: datetime, found: datetime) -> bool:
        """Return True if the clock has shown the same time before, since it was put back."""
        return wall.replace(tzinfo=self.zone, fold=0).astimezone(UTC) < found

    def _matching(self, begin: datetime, end: datetime) -> Iterator[datetime]:
        """Yield the matching wall times from `begin` to `end` (exclusive), ascending."""
        midnight = datetime.combine(begin.date(), time())
        while midnight < end:
            if self.is_on(midnight.date()):
                # If `begin` has seconds, start at the next whole minute.
                first = -((midnight - max(begin, midnight)) // _MINUTE)
                for minute in self.minutes[bisect_left(self.minutes, first) :]:
                    wall = midnight + minute * _MINUTE
                    if wall >= end:
                        return
                    yield wall
            midnight += DAY

    def is_on(self, day: date) -> bool:
        """Return True if the expression has times on a day."""
        return day.month in self._days.months and self._days.match_day(day)


@lru_cache(PARSED)
def _parsed_cron(text: str, zone: ZoneInfo) -> Cron:
    if len(text) > MAX_TEXT:
        # A longer one would block the loop for seconds, and a number of thousands of digits cannot be read.
        raise _refused_cron(text, f"has more than {MAX_TEXT:,} characters")
    expression = ALIASES.get(text.strip().lower(), text)
    parts = expression.split()
    if len(parts) != FIELDS:
        raise _refused_cron(text, f"has {len(parts)} fields" if parts else "is empty")
    try:
        found = CronSim(expression, datetime(2000, 1, 1, tzinfo=UTC))
    except CronSimError as error:
        raise _refused_cron(text, str(error).replace("Bad", "has an invalid")) from None
    minutes = tuple(sorted(hour * 60 + minute for hour in found.hours for minute in found.minutes))
    is_fixed = not parts[0].startswith("*") and not parts[1].startswith("*")
    cron = Cron(text, zone, minutes, is_fixed, found)
    if not any(cron.is_on(date(2000, 1, 1) + n * DAY) for n in range(HORIZON // DAY)):
        raise _refused_cron(text, "has no date")
    return cron


def shortest_pause(cron: Cron, since: datetime, number: int = 1_000) -> timedelta:
    """Return the shortest time between two of the next `number` times after `since`."""
    times = [found for _, found in zip(range(number), cron.after(since), strict=False)]
    return min((later - earlier for earlier, later in pairwise(times)), default=HORIZON)


def _whole_seconds(instant: datetime) -> datetime:
    return instant.astimezone(UTC).replace(microsecond=0)


def _refused_cron(text: str, what: str) -> BadRequest:
    return BadRequest(
        "cron",
        "must have five fields (minute hour day-of-month month day-of-week), such as '30 6 * * MON-FRI', or be one of "
        f"{', '.join(ALIASES)}; {text!r:.100} {what}",
    )

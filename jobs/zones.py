"""Time zones: their names, and the times at which their clocks are changed.

A wall time is a `datetime` without a zone; an instant is a `datetime` in UTC. The functions of this module are correct
for zones whose clock is not changed twice within a day; none has been since 1970.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Final
from zoneinfo import ZoneInfo

import attrs

from dataloader.jobs.errors import BadRequest

DAY: Final = timedelta(days=1)
_SECOND: Final = timedelta(seconds=1)


def zone_named(name: str) -> ZoneInfo:
    """Return the zone of the IANA database. Raises `BadRequest` if it has none of that name."""
    try:
        return ZoneInfo(name)
    except (KeyError, OSError, ValueError):  # OSError: a folder of zones; ValueError: a path
        pass
    raise BadRequest("zone", f"must be a time zone of the IANA database, such as Europe/Berlin, not {name!r:.100}")


@attrs.frozen
class Span:
    """Period from `begin` to `end` (exclusive). The zone's clock is `offset` ahead of UTC in all of it.

    Before `begin` it was `before` ahead: another value if the clock was changed at `begin`.
    """

    begin: datetime
    end: datetime
    offset: timedelta
    before: timedelta


def spans(zone: ZoneInfo, begin: datetime, end: datetime) -> Iterator[Span]:
    """Yield the period from `begin` to `end` in spans of at most a day, each with one offset."""
    while begin < end:
        until = min(begin + DAY, end)
        before, last = offset(zone, begin - _SECOND), offset(zone, until - _SECOND)
        if before == last:
            yield Span(begin, until, last, last)
        else:
            changed = _first_with(zone, last, begin - _SECOND, until - _SECOND)
            if changed > begin:
                yield Span(begin, changed, before, before)
            yield Span(changed, until, last, before)
        begin = until


def offset(zone: ZoneInfo, instant: datetime) -> timedelta:
    """Return how far the zone's clock is ahead of UTC at an instant."""
    ahead = instant.astimezone(zone).utcoffset()
    assert ahead is not None, "a zone has an offset at every instant"  # noqa: S101
    return ahead


def wall_time(instant: datetime, ahead: timedelta) -> datetime:
    """Return the time shown by a clock that is `ahead` of UTC."""
    return instant.astimezone(UTC).replace(tzinfo=None) + ahead


def instant_of(wall: datetime, ahead: timedelta) -> datetime:
    """Return the instant at which a clock that is `ahead` of UTC shows `wall`."""
    return (wall - ahead).replace(tzinfo=UTC)


def _first_with(zone: ZoneInfo, ahead: timedelta, before: datetime, after: datetime) -> datetime:
    """Return the first second between the two from which on the offset is `ahead`."""
    while after - before > _SECOND:
        middle = before + timedelta(seconds=(after - before) // _SECOND // 2)
        if offset(zone, middle) == ahead:
            after = middle
        else:
            before = middle
    return after

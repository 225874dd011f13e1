"""Display of values on a page: timestamps in the reader's zone, durations, numbers, JSON, users' texts.

Names here are Jinja's filters. No text is trusted: characters that would move or hide other text (control characters,
changes of the writing direction) are shown by their number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any, Final
from uuid import UUID

from markupsafe import Markup

_UNSEEN: Final = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)
MOST_JSON: Final = 64 << 10
"""Characters of a JSON value that a page shows."""
NOTHING: Final = "–"
"""Placeholder for a missing value."""


def inert(value: Any) -> Any:
    """Return a text with its invisible characters shown by their numbers; any other value unchanged.

    Jinja's `finalize`.
    """
    if isinstance(value, Markup):
        return value
    if value is None:
        return NOTHING
    if isinstance(value, str) and _UNSEEN.search(value):
        return _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", value)
    return value


def instant(value: datetime | None, tz: tzinfo, *, ms: bool = False) -> str | Markup:
    """Return a timestamp in a zone, `2026-11-23 12:00:07`, with UTC in its title.

    In a repeated hour it has an offset.
    """
    if value is None:
        return NOTHING
    there = in_zone(value, tz)
    text = there.strftime("%Y-%m-%d %H:%M:%S")
    if ms:
        text += f".{there.microsecond // 1000:03}"
    return _time(value, text + _offset_if_doubled(there))


def clock(value: datetime | None, tz: tzinfo, *, ms: bool = False) -> str | Markup:
    """Return only the time of day, `12:00:07`, for places where the day is visible nearby."""
    if value is None:
        return NOTHING
    there = in_zone(value, tz)
    text = there.strftime("%H:%M:%S")
    if ms:
        text += f".{there.microsecond // 1000:03}"
    return _time(value, text + _offset_if_doubled(there))


def ago(value: datetime | None, tz: tzinfo, *, kind: str = "") -> str | Markup:
    """Return a timestamp that a script shows and updates as `3 s ago` or `in 3 s`; without a script it is `instant`.

    With the kind `due`, something is planned for it: when it has passed, it is `3 s overdue`.
    """
    if value is None:
        return NOTHING
    there = in_zone(value, tz)
    text = there.strftime("%Y-%m-%d %H:%M:%S") + _offset_if_doubled(there)
    stands = value.astimezone(UTC).isoformat(timespec="milliseconds")
    return Markup('<time datetime="{}" title="{}" data-ago{}>{}</time>').format(
        stands, f"{text} ({_utc(value)})", Markup('="{}"').format(kind) if kind else "", text
    )


_KNOWN: Final = re.compile(r"\b(\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b)")


def sentence(text: str, tz: tzinfo, address: Callable[[str], str]) -> Markup:
    """Return one of our sentences: timestamps such as `2026-11-23 12:00:07Z` in a zone, job IDs as links."""
    parts: list[Any] = list(map(inert, _KNOWN.split(text)))
    for place in range(1, len(parts), 2):
        known = parts[place]
        if not known.endswith("Z"):
            parts[place] = Markup('<a class="id" href="{}">{}</a>').format(address(known), known)
            continue
        with suppress(ValueError):
            parts[place] = instant(datetime.fromisoformat(known), tz)
    return Markup("").join(parts)


def in_zone(value: datetime, tz: tzinfo) -> datetime:
    """Return a timestamp by the clock of a zone, or in UTC at the limits of time, such as PostgreSQL's `infinity`."""
    try:
        return value.astimezone(tz)
    except OverflowError:
        return value.astimezone(UTC)


def _time(value: datetime, text: str) -> Markup:
    stands = value.astimezone(UTC).isoformat(timespec="milliseconds")
    return Markup('<time datetime="{}" title="{}">{}</time>').format(stands, _utc(value), text)


def _utc(value: datetime) -> str:
    return value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + " UTC"


def _offset_if_doubled(there: datetime) -> str:
    if there.replace(fold=0).utcoffset() == there.replace(fold=1).utcoffset():
        return ""
    offset = there.strftime("%z")
    return f"{offset[:3]}:{offset[3:5]}"


def duration(seconds: float | timedelta | None) -> str:
    """Return readable seconds: `40 ms`, `2.1 s`, `4 min 10 s`, `2 h 3 min`, `3 d 4 h`."""
    if seconds is None:
        return NOTHING
    given = seconds.total_seconds() if isinstance(seconds, timedelta) else float(seconds)
    sign, left = ("-" if given < 0 else ""), abs(given)
    if left < 1:
        return f"{sign}{left * 1000:.0f} ms"
    if left < 10:
        return f"{sign}{left:.1f} s"
    return sign + _two_units(round(left))


_UNITS: Final = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def _two_units(left: int) -> str:
    """Return whole seconds in the largest unit that fits, and the next smaller one."""
    at = next(index for index, (unit, _) in enumerate(_UNITS) if left >= unit)
    parts = []
    for unit, name in _UNITS[at : at + 2]:
        if left >= unit:
            parts.append(f"{left // unit} {name}")
            left %= unit
    return " ".join(parts)


def number(value: float | None) -> str:
    """Return a number with thousands separators: `1,204`."""
    if value is None:
        return NOTHING
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}".rstrip("0").rstrip(".")


def signed(value: int | None) -> str:
    """Return a difference: `+1,204`, `-3`, `0`."""
    return NOTHING if value is None else f"{value:+,}" if value else "0"


def signed_duration(value: timedelta | None) -> str:
    """Return a difference of durations: `+2 min 3 s`."""
    if value is None:
        return NOTHING
    if not value:
        return "0"
    return f"+{duration(value)}" if value > timedelta() else duration(value)


def at_least(count: int, most: int) -> str:
    """Return a count that was limited to `most`: `≥ 10,000`."""
    return f"≥ {most:,}" if count >= most else f"{count:,}"


def as_json(value: Any, indent: int | None = 2) -> str:
    """Return readable JSON of a value, with exact integers."""
    return json.dumps(value, indent=indent, ensure_ascii=False, default=str)


def short_id(value: UUID | str) -> str:
    """Return the end of an ID, which distinguishes jobs of one moment; the link's title has the full ID."""
    return f"…{str(value)[-8:]}"


def words(value: str) -> str:
    """Return a constant's name as words: `unknown_task` is `unknown task`."""
    return value.replace("_", " ")


def cut(value: str, most: int) -> str:
    """Return a text, cut to its beginning if it is longer than `most`."""
    return value if len(value) <= most else f"{value[: most - 1]}…"


FILTERS: Final[Mapping[str, Callable[..., Any]]] = {
    "duration": duration,
    "number": number,
    "signed": signed,
    "signed_duration": signed_duration,
    "at_least": at_least,
    "json": as_json,
    "short_id": short_id,
    "words": words,
    "cut": cut,
}

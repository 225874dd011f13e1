"""Windows of files and objects, by their names, so that a load of some windows reads no other files.

A pattern with the named groups `year`, `month` and `day` suits most names. Otherwise, give a function.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import attrs

from dataloader.flows.etl.declare import option_checks
from dataloader.flows.etl.sources.source import SourceError, Window

WindowOf = str | Callable[[str], Window | None]
"""Regular expression, such as `yob(?P<year>[0-9]{4})`, or a function from a name to its window.

With `year` alone a name belongs to a whole year, with `month` to a month, with `day` to a day, all in UTC. A name that
does not match the pattern, or for which the function returns None, belongs to no window and is left out.
"""


def check_window_of(_instance: Any, attribute: attrs.Attribute[Any], value: WindowOf | None) -> None:
    """Check a `WindowOf`, or None."""
    if value is None or callable(value):
        return
    allowed = "a regular expression with a group (?P<year>…), optionally month and day, or a function"
    try:
        groups = set(re.compile(value).groupindex)
    except (re.error, TypeError):
        raise option_checks.refuse(attribute.name, value, allowed) from None
    if groups not in ({"year"}, {"year", "month"}, {"year", "month", "day"}):
        raise option_checks.refuse(attribute.name, value, allowed)


def is_wanted(name: str, window_of: WindowOf | None, window: Window) -> bool:
    """Return whether a file of this name belongs to the window, at least in part. Without `window_of` all files do.

    Raises `SourceError` for a name whose numbers are not a date.
    """
    if window_of is None:
        return True
    own = own_window(name, window_of)
    if own is None:
        return False
    begins_before_end = own.start is None or window.end is None or own.start < window.end
    ends_after_start = own.end is None or window.start is None or own.end > window.start
    return begins_before_end and ends_after_start


def own_window(name: str, window_of: WindowOf | None) -> Window | None:
    """Return the window of a file of this name; None if it has none. Raises `SourceError` as `is_wanted` does."""
    if window_of is None or not isinstance(window_of, str):
        return None if window_of is None else window_of(name)
    return _window_by(name, window_of)


def _window_by(name: str, pattern: str) -> Window | None:
    found = re.search(pattern, name)
    if found is None:
        return None
    numbers = {part: int(number) for part, number in found.groupdict().items() if number is not None}
    try:
        start = datetime(numbers["year"], numbers.get("month", 1), numbers.get("day", 1), tzinfo=UTC)
        if "day" in numbers:
            return Window(start, start + timedelta(days=1))
        if "month" in numbers:
            # 31 days later is always in the next month.
            return Window(start, (start + timedelta(days=31)).replace(day=1))
        return Window(start, start.replace(year=start.year + 1))
    except (KeyError, ValueError, OverflowError) as error:
        raise SourceError(f"window_of: {found[0]!r} in {name!r} is not a date: {error}", is_retryable=False) from error

"""Chooses the endpoint for a window, where an interface has one for recent records and one for its archive."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import attrs

from dataloader.flows.etl.declare import option_checks
from dataloader.flows.etl.sources.source import Window


@attrs.frozen(kw_only=True)
class Routing:
    """Two endpoints for windows of different age.

    Args:
        recent: the endpoint for records younger than `recent_for`.
        former: the endpoint for older records.
        recent_for: a length of time before now. A window that begins before and ends after that instant is asked for
            in two parts, the former one first, each with its own walk over pages.
        now: the clock, for tests.
    """

    recent: str = attrs.field(validator=option_checks.text)
    former: str = attrs.field(validator=option_checks.text)
    recent_for: timedelta = attrs.field()
    now: Callable[[], datetime] = attrs.field(default=lambda: datetime.now(UTC), repr=False)

    @recent_for.validator
    def _check_recent_for(self, attribute: attrs.Attribute[timedelta], value: timedelta) -> None:
        if not isinstance(value, timedelta) or value <= timedelta(0):
            raise option_checks.refuse(attribute.name, value, "a length of time above 0, such as timedelta(days=30)")

    def walks(self, window: Window) -> list[tuple[str, Window]]:
        """Each endpoint that the window needs, with its part of it."""
        boundary = self.now() - self.recent_for
        if window.end is not None and window.end <= boundary:
            return [(self.former, window)]
        if window.start is not None and window.start >= boundary:
            return [(self.recent, window)]
        return [(self.former, Window(window.start, boundary)), (self.recent, Window(boundary, window.end))]

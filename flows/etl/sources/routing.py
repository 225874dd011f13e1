"""Selection of the endpoint for a window, for APIs with one endpoint for recent records and one for their archive."""

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
        recent: endpoint for records younger than `recent_for`.
        former: endpoint for older records.
        recent_for: length of time before now. A window that begins before and ends after that time is requested in two
            parts, the former one first, each with a separate walk over pages.
        now: clock, for tests.
    """

    recent: str = attrs.field(validator=option_checks.nonempty_text)
    former: str = attrs.field(validator=option_checks.nonempty_text)
    recent_for: timedelta = attrs.field()
    now: Callable[[], datetime] = attrs.field(default=lambda: datetime.now(UTC), repr=False)

    @recent_for.validator
    def _check_recent_for(self, attribute: attrs.Attribute[timedelta], value: timedelta) -> None:
        if not isinstance(value, timedelta) or value <= timedelta(0):
            raise option_checks.refuse(attribute.name, value, "a timedelta greater than 0, such as timedelta(days=30)")

    def walks(self, window: Window) -> list[tuple[str, Window]]:
        """Return the endpoints that the window needs, each with its part of the window."""
        boundary = self.now() - self.recent_for
        if window.end is not None and window.end <= boundary:
            return [(self.former, window)]
        if window.start is not None and window.start >= boundary:
            return [(self.recent, window)]
        return [(self.former, Window(window.start, boundary)), (self.recent, Window(boundary, window.end))]

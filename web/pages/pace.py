"""Pace of open pages: all of them together use at most `SHARE` of a core, and one connection.

Each answer to a page's poll reserves its duration, stretched by `1 / SHARE`, on one timeline. A page polls again when
the reserved time has passed. With few open pages that is the pace that the page asks for; with many it is slower.
"""

from __future__ import annotations

from typing import Final

import attrs
import trio

from dataloader.store.connection.fair_places import FairPlaces

SHARE: Final = 0.05
"""Share of one core that polls may use."""
LONGEST_S: Final = 60.0
REQUEST_S: Final = 0.003
"""Cost of a request besides the rendering, which is measured: Hypercorn, Quart, the records that are read."""


@attrs.define
class Pace:
    """Pace of one process."""

    turn: FairPlaces = attrs.field(factory=lambda: FairPlaces(most=1, most_of_one=1), init=False)
    """One poll at a time uses the database; operators are served round-robin."""
    _booked_until: float = attrs.field(default=0.0, init=False)

    def next_in(self, wanted_s: float, took_s: float) -> float:
        """Return the seconds until a page that took `took_s` may poll again; it wishes for `wanted_s`."""
        now = trio.current_time()
        booked = max(self._booked_until, now) + (took_s + REQUEST_S) / SHARE
        # No page waits longer than this, so that a flood of polls does not slow the others down further either.
        self._booked_until = min(booked, now + LONGEST_S)
        return max(min(wanted_s, LONGEST_S), self._booked_until - now)

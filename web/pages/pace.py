"""How often open pages come again: so that all of them together take `SHARE` of a core, and one connection (U13).

Each answer to a page's poll books the time that it took, stretched by `1 / SHARE`, on one time line. A page comes again
when what is booked has passed: with few pages open that is the pace which the page asks for, with many it is longer.
"""

from __future__ import annotations

from typing import Final

import attrs
import trio

from dataloader.web.fair_places import FairPlaces

SHARE: Final = 0.05
"""The part of one core that polls may take."""
LONGEST_S: Final = 60.0
REQUEST_S: Final = 0.003
"""What a request costs besides the rendering, which is measured: Hypercorn, Quart, the records that are read."""


@attrs.define
class Pace:
    """The pace of one process."""

    turn: FairPlaces = attrs.field(factory=lambda: FairPlaces(most=1, most_of_one=1), init=False)
    """One poll at a time asks the database; the operators are served round-robin."""
    _booked_until: float = attrs.field(default=0.0, init=False)

    def next_in(self, wanted_s: float, took_s: float) -> float:
        """Seconds until the page that was answered in `took_s` of work may come again; it wishes for `wanted_s`."""
        now = trio.current_time()
        booked = max(self._booked_until, now) + (took_s + REQUEST_S) / SHARE
        # No page is told to wait for longer: so a flood of polls slows the others no longer than that either.
        self._booked_until = min(booked, now + LONGEST_S)
        return max(min(wanted_s, LONGEST_S), self._booked_until - now)

"""Which lanes of a queue are worth a look, and when (S1, S4), by notifications and by what former claims have found.

Uses neither the database nor a clock. Lanes are those of this process's tasks; all its queues know the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import attrs

from dataloader.store.queue.lock_session import Claim


@attrs.define
class LaneLooks:
    """The lanes of one queue. Times are seconds of any monotonic clock. `stale`: which there are must be read again."""

    stale: bool = True
    _look_at: dict[str, float] = attrs.field(factory=dict)

    @property
    def lanes(self) -> list[str]:
        """All lanes, in one order."""
        return sorted(self._look_at)

    def learned(self, lanes: Iterable[str]) -> None:
        """These are all that there are, each worth a look."""
        self._look_at = dict.fromkeys(lanes, -math.inf)

    def told(self, lane: str) -> bool:
        """Something has changed in a lane; whether it is known here."""
        known = lane in self._look_at
        if known:
            self._look_at[lane] = -math.inf
        return known

    def all_due(self) -> None:
        """Each lane is worth a look: notifications may have been lost."""
        self._look_at = dict.fromkeys(self._look_at, -math.inf)

    def wait_s(self, now: float) -> float:
        """How long until one is worth a look; 0: one is."""
        return max(min(self._look_at.values(), default=math.inf) - now, 0)

    def due(self, now: float) -> list[str]:
        """Those that are worth a look now. What is told of them while they are looked at counts again."""
        due = [lane for lane in self.lanes if self._look_at[lane] <= now]
        for lane in due:
            self._look_at[lane] = math.inf
        return due

    def answered(self, claim: Claim, now: float) -> None:
        """What a claim has found of those that were due."""
        for lane, why, wait_s in claim.lanes:
            # If slots were lacking, jobs of an open lane may be among those that were left.
            again_s = 0 if why is None and claim.more else wait_s
            if lane in self._look_at and again_s is not None:
                self._look_at[lane] = min(self._look_at[lane], now + again_s)

    def failed(self, lanes: Iterable[str]) -> None:
        """The claim that was to look at these has failed."""
        for lane in lanes:
            self.told(lane)

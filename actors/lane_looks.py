"""Which lanes of a queue are worth a look, and when (S1, S4), by notifications and by what former claims have found.

Uses neither the database nor a clock. Lanes are those of this process's tasks; all its queues know the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import attrs

from dataloader.store.queue.claim import Claim

MAX_LOCKED_S: Final = 1.0
"""The longest pause between two looks at a lane, or a supplier, that somebody has locked."""


@attrs.define
class LaneLooks:
    """The lanes of one queue. Times are seconds of any monotonic clock. `stale`: which there are must be read again.

    Notifications may have been lost: if nothing has told of all of them for `poll_s` seconds, each is worth a look.
    """

    poll_s: float = math.inf
    stale: bool = True
    _look_at: dict[str, float] = attrs.field(factory=dict)
    _locked: dict[str, int] = attrs.field(factory=dict)
    _unanswered: set[str] = attrs.field(factory=set)
    _all_at: float = -math.inf

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

    def polled(self, lanes: Iterable[str], at: float) -> bool:
        """Of all lanes something waited in these at that time; whether one of them is known here."""
        self._all_at = max(self._all_at, at)
        return sum(self.told(lane) for lane in lanes) > 0

    def queue_told(self) -> None:
        """Something was told of the queue: it may have been paused when lanes were asked for, and not be so now."""
        for lane in self._unanswered:
            self.told(lane)

    def wait_s(self, now: float) -> float:
        """How long until one is worth a look; 0: one is."""
        return max(min([self._all_at + self.poll_s, *self._look_at.values()]) - now, 0) if self._look_at else math.inf

    def due(self, now: float) -> list[str]:
        """Those that are worth a look now. What is told of them while they are looked at counts again."""
        if now - self._all_at >= self.poll_s:
            due, self._all_at = self.lanes, now
        else:
            due = [lane for lane in self.lanes if self._look_at[lane] <= now]
        for lane in due:
            self._look_at[lane] = math.inf
        return due

    def answered(self, claim: Claim, now: float, asked: Iterable[str] = ()) -> None:
        """What a claim has found of those that were due, for which it `asked`."""
        self._unanswered = self._unanswered.union(asked).difference(lane for lane, *_ in claim.lanes)
        for lane, why, wait_s in claim.lanes:
            # If slots were lacking, jobs of an open lane may be among those that were left.
            again_s = 0 if why is None and claim.more else wait_s
            times = self._locked[lane] = self._locked.get(lane, -1) + 1 if why == "locked" else -1
            if lane in self._look_at and again_s is not None:
                if times > 0:
                    again_s = min(again_s * 2 ** min(times, 10), MAX_LOCKED_S)
                self._look_at[lane] = min(self._look_at[lane], now + again_s)

    def failed(self, lanes: Iterable[str]) -> None:
        """The claim that was to look at these has failed."""
        for lane in lanes:
            self.told(lane)

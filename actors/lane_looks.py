"""Decides which limit queues (lanes) of a queue to claim from, and when.

It decides by notifications and the results of former claims, and uses neither the database nor a clock. The lanes are
those of this process's tasks; all its queues have the same ones.

If the database refuses a claim with lanes, one of them may be the cause. From then on each of them is claimed from
separately. A lane whose own claim is refused, too, is closed for a pause that grows, and the others are claimed from
together again. If claims of several lanes are refused although each lane works alone, they stay separate for a time
that grows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import attrs

from dataloader.jobs.growing_pauses import Pauses
from dataloader.store.queue.claim import Claim

MAX_LOCKED_S: Final = 1.0
"""Maximum pause in seconds between two checks of a lane, or a supplier, that another session has locked."""
CLOSED_S: Final = (1.0, 60.0)
"""First and longest pause in seconds between two claims from a closed lane."""
MAX_APART_S: Final = 60.0
"""Maximum time in seconds for which lanes that work alone are not claimed from together."""


@attrs.define
class _Closed:
    """Lane whose own claim was refused, with the last error."""

    error: str
    pauses: Pauses = attrs.field(factory=lambda: Pauses(*CLOSED_S))


@attrs.define
class LaneLooks:
    """Lanes of one queue. Times are in seconds by any monotonic clock. `stale`: the set of lanes must be read again.

    Notifications may have been lost: if no poll has covered all lanes for `poll_s` seconds, each of them is due.
    """

    poll_s: float = math.inf
    stale: bool = True
    _look_at: dict[str, float] = attrs.field(factory=dict)
    _locked: dict[str, int] = attrs.field(factory=dict)
    _unanswered: set[str] = attrs.field(factory=set)
    _all_at: float = -math.inf
    _apart_until: dict[str, float] = attrs.field(factory=dict)
    _refusals: dict[str, int] = attrs.field(factory=dict)
    _closed: dict[str, _Closed] = attrs.field(factory=dict)

    @property
    def closed(self) -> int:
        """The number of closed lanes."""
        return len(self._closed)

    @property
    def lanes(self) -> list[str]:
        """All lanes, sorted."""
        return sorted(self._look_at)

    def learned(self, lanes: Iterable[str]) -> None:
        """Replace the set of lanes; each of them is due."""
        self._look_at = dict.fromkeys(lanes, -math.inf)
        for former in (self._apart_until, self._refusals, self._closed):
            for lane in former.keys() - self._look_at.keys():
                del former[lane]

    def told(self, lane: str) -> bool:
        """Note that a lane has changed. Return whether this process knows the lane."""
        known = lane in self._look_at
        if known and lane not in self._closed:
            self._look_at[lane] = -math.inf
        return known

    def polled(self, lanes: Iterable[str], at: float) -> bool:
        """Note that at `at` jobs waited in these lanes only. Return whether this process knows one of them."""
        self._all_at = max(self._all_at, at)
        return sum(self.told(lane) for lane in lanes) > 0

    def queue_told(self) -> None:
        """Note a notification for the queue, which may have been paused at the last claim and resumed since."""
        self.failed(self._unanswered)

    def wait_s(self, now: float) -> float:
        """Return the seconds until a lane is due; 0 if one is."""
        return max(min([self._all_at + self.poll_s, *self._look_at.values()]) - now, 0) if self._look_at else math.inf

    def due(self, now: float) -> list[str]:
        """Return the lanes that are due, for one claim. A notification during that claim makes its lane due again."""
        if now - self._all_at >= self.poll_s:
            self._all_at = now
            for lane in self._look_at:
                self.told(lane)
        due = [lane for lane in self.lanes if self._look_at[lane] <= now and lane not in self._apart_until]
        for lane in due:
            self._look_at[lane] = math.inf
        return due

    def due_apart(self, now: float) -> str | None:
        """Return the lane that is due in a claim of that lane alone, if there is one."""
        due = [lane for lane in self._apart_until if self._look_at[lane] <= now]
        if not due:
            return None
        lane = min(due, key=lambda one: self._look_at[one])
        self._look_at[lane] = math.inf
        return lane

    def answered(self, claim: Claim, now: float, asked: Iterable[str] = ()) -> None:
        """Note the result of a claim that `asked` for these lanes."""
        for lane in asked:
            if lane not in self._apart_until:
                self._refusals.pop(lane, None)
        self._unanswered = self._unanswered.union(asked).difference(lane for lane, *_ in claim.lanes)
        for lane, why, wait_s in claim.lanes:
            # If slots were lacking, the claim may have left jobs of an open lane.
            again_s = 0 if why is None and claim.more else wait_s
            times = self._locked[lane] = self._locked.get(lane, -1) + 1 if why == "locked" else -1
            if lane in self._look_at and again_s is not None:
                if times > 0:
                    again_s = min(again_s * 2 ** min(times, 10), MAX_LOCKED_S)
                self._look_at[lane] = min(self._look_at[lane], now + again_s)

    def failed(self, lanes: Iterable[str]) -> None:
        """Note that a claim from these lanes has failed for another reason than the lanes: they are due again."""
        for lane in lanes:
            if lane in self._look_at:
                self._look_at[lane] = -math.inf

    def refused(self, lanes: Iterable[str], now: float) -> None:
        """Note that the database has refused a claim from these lanes: each of them is now claimed from separately."""
        for lane in lanes:
            times = self._refusals[lane] = self._refusals.get(lane, 0) + 1
            self._apart_until[lane] = now if times == 1 else now + min(2.0 ** min(times, 6), MAX_APART_S)
        self.failed(lanes)

    def refused_apart(self, lane: str, error: str, now: float) -> bool:
        """Close a lane, because the database has refused a claim from it alone. Return True for a new error."""
        closed = self._closed.get(lane)
        is_new = closed is None or closed.error != error
        if closed is None:
            closed = self._closed[lane] = _Closed(error)
            self._refusals.pop(lane, None)
        closed.error = error
        self._look_at[lane] = now + closed.pauses.next()
        return is_new

    def worked_apart(self, lane: str, now: float) -> bool:
        """Note that a claim from this lane alone was answered. Return True if this opened the lane."""
        if now >= self._apart_until.get(lane, math.inf):
            del self._apart_until[lane]
        return self._closed.pop(lane, None) is not None

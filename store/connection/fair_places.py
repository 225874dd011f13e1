"""Places that callers share fairly, such as connections for reads, or answers that may have megabytes.

A caller is the name of an API token or of a signed-in operator. Rejected: one queue for all, oldest request first.
With it, 16 slow requests of one caller delay every later request of the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import attrs
import trio


@attrs.define(eq=False)
class FairPlaces:
    """Limiter with `most` places. One caller holds at most `most_of_one` of them.

    Places are granted round-robin over the callers that wait, and to the oldest request of each. A caller has an entry
    only while it holds a place or waits for one.

    Two of three places for one caller: its slow request does not stop all its other ones, and the first request of
    another caller does not wait. Only several callers together have three answers in memory. More places would not mask
    faster, since the threads share one interpreter lock.
    """

    most: int = 3
    most_of_one: int = 2
    _held: Counter[str] = attrs.field(factory=Counter, init=False)
    _waiting: dict[str, trio.lowlevel.ParkingLot] = attrs.field(factory=dict, init=False)
    """Waiting requests by caller. The first caller that may have one more place gets the next one."""

    @property
    def held(self) -> int:
        """Number of places in use."""
        return self._held.total()

    @property
    def waiting(self) -> int:
        """Number of waiting requests."""
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def place_of(self, caller: str) -> AsyncIterator[None]:
        """Hold a place for the duration of a block, after waiting for one."""
        await self._take(caller)
        try:
            yield
        finally:
            self._give_back(caller)

    def may_have_one_more(self, caller: str) -> bool:
        """Tell whether a request of this caller would get a place without waiting."""
        return self.held < self.most and self._held[caller] < self.most_of_one

    async def _take(self, caller: str) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        if self.may_have_one_more(caller):
            # No waiting request is overtaken: a request waits only while its caller may have no more places.
            self._held[caller] += 1
            await trio.lowlevel.cancel_shielded_checkpoint()
            return
        try:
            # `_grant_one` has counted the place when it wakes the request, which cannot be cancelled here after that.
            await self._waiting.setdefault(caller, trio.lowlevel.ParkingLot()).park()
        finally:
            if caller in self._waiting and not self._waiting[caller]:
                del self._waiting[caller]

    def _give_back(self, caller: str) -> None:
        self._held[caller] -= 1
        if not self._held[caller]:
            del self._held[caller]
        self._grant_one()

    def _grant_one(self) -> None:
        """Wake the oldest request of the first caller that may have one more place; the caller becomes the last one."""
        for caller, requests in self._waiting.items():
            # A lot is empty for a moment when its last request has been cancelled.
            if requests and self.may_have_one_more(caller):
                del self._waiting[caller]
                self._held[caller] += 1
                requests.unpark()
                if requests:
                    self._waiting[caller] = requests
                return

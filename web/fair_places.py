"""Threads that callers share fairly, for work of many milliseconds, such as the masking of secrets."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

import attrs
import trio

from dataloader.store.connection.fair_places import FairPlaces

R = TypeVar("R")
Ts = TypeVarTuple("Ts")


@attrs.define(eq=False)
class FairThreads:
    """Threads that callers share fairly. They are not Trio's own, all of which handlers may be using."""

    places: FairPlaces = attrs.field(factory=FairPlaces)
    _threads: trio.CapacityLimiter = attrs.field(init=False)
    """Has a thread for each place, so that no request waits for a thread."""

    @_threads.default
    def _a_thread_for_each_place(self) -> trio.CapacityLimiter:
        return trio.CapacityLimiter(self.places.most)

    async def run(self, caller: str, work: Callable[[*Ts], R], *args: *Ts) -> R:
        """Run `work(*args)` in a thread and return its result.

        A cancelled caller holds its place until the thread ends.
        """
        async with self.places.place_of(caller):
            return await trio.to_thread.run_sync(work, *args, limiter=self._threads)

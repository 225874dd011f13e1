"""An asyncio loop for the database driver, within Trio: trio-asyncio's, made to do all that is ready in one turn.

Left to itself it runs one callback for each turn of Trio's scheduler. An operation of the driver has some eight, and
a turn is as long as what all other tasks do in it: with two hundred handlers at work the database was idle for most of
the time. And it keeps the timer of every statement that was answered in time until that would have been up.
"""

from __future__ import annotations

import heapq
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import trio
import trio_asyncio

CALLBACKS_A_TURN: Final = 100
"""Callbacks that are done in one turn at the most, so that they can't keep the others waiting by calling for more."""
MIN_TIMERS: Final = 100
"""Timers that are kept before it is worth a look which of them were cancelled."""


@asynccontextmanager
async def open_loop() -> AsyncIterator[Any]:
    """The loop for the length of a block; give it to `Crossing`."""
    async with trio_asyncio.open_loop() as opened:
        loop: Any = opened  # which types nothing of its inside
        one_callback = loop._main_loop_one  # noqa: SLF001 - the one step that the main loop repeats

        timers = loop._timers  # noqa: SLF001
        alive = 0

        async def one_turn(*, no_wait: bool = False) -> None:
            nonlocal alive
            if len(timers) > 2 * alive + MIN_TIMERS:
                timers[:] = [timer for timer in timers if not timer.cancelled()]
                heapq.heapify(timers)
                alive = len(timers)
            await one_callback(no_wait)
            try:
                for _ in range(CALLBACKS_A_TURN):
                    if loop._stopped.is_set():  # noqa: SLF001
                        return
                    await one_callback(no_wait=True)
            except trio.WouldBlock:
                pass

        loop._main_loop_one = one_turn  # noqa: SLF001
        yield loop

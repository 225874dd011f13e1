"""Loop of an actor that works when it is woken or at times that it sets, and again after a failure of the database."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Final

import trio

from dataloader.actors.outage import Outage
from dataloader.actors.wake import Wake
from dataloader.jobs.errors import StoreError

PAUSE_S: Final = 1.0
"""Pause in seconds after a failure."""


async def work_when_woken(
    part: str, wake: Wake, work: Callable[[], Awaitable[float | None]], outage: Outage, *, pause_s: float = PAUSE_S
) -> None:
    """Call `work` at each `wake`, until cancelled.

    Args:
        part: name under which database failures are reported.
        wake: flag of the actor. To work at the start, set it before.
        work: returns the seconds after which it must be called again in any case; None if it need not be.
        outage: receives the failures.
        pause_s: pause in seconds after a failure, which no wake-up ends; then `work` is called again.
    """
    next_in_s: float | None = None
    while True:
        await wake.wait(math.inf if next_in_s is None else next_in_s)
        try:
            next_in_s = await work()
            outage.worked(part)
        except StoreError as error:
            outage.failed(part, error)
            await trio.sleep(pause_s)
            next_in_s = 0.0

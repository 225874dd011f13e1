"""Loop of an actor that works when it is woken, and again after a failure of the database."""

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


async def work_when_woken(part: str, wake: Wake, work: Callable[[], Awaitable[None]], outage: Outage) -> None:
    """Call `work` at each `wake`, until cancelled; call it again after a database failure, reported as `part`."""
    while True:
        await wake.wait(math.inf)
        try:
            await work()
            outage.worked(part)
        except StoreError as error:
            outage.failed(part, error)
            wake.set()
            await trio.sleep(PAUSE_S)

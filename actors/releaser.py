"""Releases the keys of ended jobs, and wakes the next jobs of these keys, as soon as the ends are recorded.

A claim that comes first releases the keys too; then there is nothing left to do here.
"""

from __future__ import annotations

import math
from typing import Final

import attrs
import trio

from dataloader.actors.outage import Outage
from dataloader.actors.wake import Wake
from dataloader.jobs.errors import StoreError
from dataloader.jobs.logger import get_logger
from dataloader.store.queue.lock_session import LockSession

log = get_logger(__name__)

RETRY_S: Final = 0.5


@attrs.define(eq=False)
class Releaser:
    """Releaser that works whenever `wake` is set."""

    locks: LockSession
    outage: Outage
    wake: Wake = attrs.field(factory=Wake)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Release until cancelled."""
        task_status.started()
        while True:
            await self.wake.wait(math.inf)
            try:
                await self.locks.release()
                self.outage.worked("releaser")
            except StoreError as error:
                self.outage.failed("releaser", error)
                await trio.sleep(RETRY_S)
                self.wake.set()

"""Releases the keys of ended jobs, and wakes the next jobs of these keys, as soon as the ends are recorded.

A claim that comes first releases the keys too; then there is nothing left to do here.
"""

from __future__ import annotations

from typing import Final

import attrs
import trio

from dataloader.actors.outage import Outage
from dataloader.actors.wake import Wake
from dataloader.actors.woken import work_when_woken
from dataloader.store.queue.lock_session import LockSession

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
        await work_when_woken("releaser", self.wake, self._release, self.outage, pause_s=RETRY_S)

    async def _release(self) -> None:
        await self.locks.release()

"""Enqueues the jobs that notify operators of failures. Runs only in a process that has targets.

A database notification wakes it when a failure occurs, and its clock when a group is due. It polls in case
notifications were lost; at its start it finds what a killed process has left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs
import trio

from dataloader.actors.outage import Outage
from dataloader.actors.wake import Wake
from dataloader.jobs.errors import StoreError
from dataloader.jobs.logger import get_logger
from dataloader.jobs.model import DEFAULT_LEASE_S
from dataloader.jobs.notices import Target
from dataloader.store.connection.bridge import Database
from dataloader.store.queue.notices import AGAIN_S, GATHER_S, tell

log = get_logger(__name__)

POLL_S: Final = 60.0
MIN_PAUSE_S: Final = 1.0
"""Minimum pause in seconds between two checks, however many failures occur."""


@attrs.define(eq=False, kw_only=True)
class Notifier:
    """Notifier of one process. A group is reported after `gather_s` seconds, then at most every `again_s`."""

    database: Database
    outage: Outage
    targets: Sequence[Target]
    default_lease_s: int = DEFAULT_LEASE_S
    gather_s: float = GATHER_S
    again_s: float = AGAIN_S
    wake: Wake = attrs.field(factory=Wake)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Enqueue such jobs until cancelled."""
        task_status.started()
        while True:
            self.wake.lower()
            pause_s = POLL_S
            try:
                told = await tell(
                    self.database,
                    self.targets,
                    gather_s=self.gather_s,
                    again_s=self.again_s,
                    default_lease_s=self.default_lease_s,
                )
                self.outage.worked("notifier")
                if told.next_in_s is not None:
                    pause_s = min(pause_s, told.next_in_s)
            except StoreError as error:
                self.outage.failed("notifier", error)
            await trio.sleep(MIN_PAUSE_S)
            await self.wake.wait(max(pause_s - MIN_PAUSE_S, 0.001))

"""Adds the jobs that tell operators of failures (S6). Runs only in a process that has targets.

A notification of the database wakes it when something has failed, its own clock when a group is to be told of. Its poll
is for lost notifications; at its start it finds what a killed process has left.
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
from dataloader.jobs.notices import Target
from dataloader.store.connection.bridge import Database
from dataloader.store.queue.notices import AGAIN_S, GATHER_S, tell

log = get_logger(__name__)

POLL_S: Final = 60.0
MIN_PAUSE_S: Final = 1.0
"""However much fails, it looks once a second."""


@attrs.define(eq=False, kw_only=True)
class Notifier:
    """The notifier of one process. A group is told of after `gather_s` seconds, and then at most every `again_s`."""

    database: Database
    outage: Outage
    targets: Sequence[Target]
    default_lease_s: int = 60
    gather_s: float = GATHER_S
    again_s: float = AGAIN_S
    wake: Wake = attrs.field(factory=Wake)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Tell until cancelled."""
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

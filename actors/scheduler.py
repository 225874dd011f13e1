"""Adds the jobs of schedules that are due (R7). Sleeps until the next one is.

A notification wakes it when a schedule was stored or resumed, the poller when that was lost. Every process has one:
whoever locks a schedule's row first adds its jobs.
"""

from __future__ import annotations

import math
from typing import Final

import attrs
import trio

from dataloader.actors.outage import Outage
from dataloader.actors.wake import Wake
from dataloader.jobs.errors import StoreError
from dataloader.store.connection.bridge import Database
from dataloader.store.schedules.tick import tick

MAX_PAUSE_S: Final = 5.0
"""After a failure."""
MIN_PAUSE_S: Final = 0.001


@attrs.define(eq=False, kw_only=True)
class Scheduler:
    """The scheduler of one process. Leases last `default_lease_s` where neither the schedule nor its task says so.

    After a failure it tries again in `poll_s` seconds at the latest. `due_at` is Trio's time of the next schedule.
    """

    database: Database
    outage: Outage
    poll_s: float
    default_lease_s: int = 60
    wake: Wake = attrs.field(factory=Wake)
    due_at: float = attrs.field(default=-math.inf, init=False)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Add jobs until cancelled."""
        task_status.started()
        while True:
            self.wake.lower()
            try:
                ticked = await tick(self.database, default_lease_s=self.default_lease_s)
            except StoreError as error:
                self.outage.failed("scheduler", error)
                await trio.sleep(min(self.poll_s, MAX_PAUSE_S))
                continue
            self.outage.worked("scheduler")
            pause_s = math.inf if ticked.next_in_s is None else max(ticked.next_in_s, MIN_PAUSE_S)
            self.due_at = trio.current_time() + pause_s
            await self.wake.wait(pause_s)

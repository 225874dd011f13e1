"""Adds the jobs of schedules that are due (R7). Sleeps until the next one is.

A notification wakes it when a schedule was stored or resumed, the poller when that was lost. Every process has one:
whoever locks a schedule's row first adds its jobs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import attrs
import trio

from dataloader.actors.outage import Outage
from dataloader.actors.wake import Wake
from dataloader.jobs.errors import StoreError
from dataloader.jobs.logger import get_logger
from dataloader.jobs.telemetry import Telemetry
from dataloader.store.connection.bridge import Database
from dataloader.store.schedules.cut_back import cut_back
from dataloader.store.schedules.tick import tick

log = get_logger(__name__)

MAX_PAUSE_S: Final = 5.0
"""After a failure."""
MIN_PAUSE_S: Final = 0.001
TELL_EVERY_S: Final = 3_600.0
"""A schedule that stays unreadable for the same reason is logged again after this time."""


@attrs.define(eq=False, kw_only=True)
class Scheduler:
    """The scheduler of one process. Leases last `default_lease_s` where neither the schedule nor its task says so.

    After a failure it tries again in `poll_s` seconds at the latest. `due_at` is Trio's time of the next schedule.
    """

    database: Database
    outage: Outage
    telemetry: Telemetry
    poll_s: float
    default_lease_s: int = 60
    wake: Wake = attrs.field(factory=Wake)
    due_at: float = attrs.field(default=-math.inf, init=False)
    _told: dict[tuple[str, str], float] = attrs.field(factory=dict, init=False)
    _may_be_ahead: bool = attrs.field(default=True, init=False)

    def clock_went_back(self) -> None:
        """Look for next times that the clock has computed while it was ahead, as at the start."""
        self._may_be_ahead = True
        self.wake.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Add jobs until cancelled."""
        task_status.started()
        while True:
            self.wake.lower()
            try:
                if self._may_be_ahead:
                    await cut_back(self.database)
                    self._may_be_ahead = False
                ticked = await tick(self.database, default_lease_s=self.default_lease_s)
            except StoreError as error:
                self.outage.failed("scheduler", error)
                await trio.sleep(min(self.poll_s, MAX_PAUSE_S))
                continue
            self.outage.worked("scheduler")
            self.telemetry.set_aside("scheduler", ticked.set_aside)
            self._tell(ticked.left)
            pause_s = math.inf if ticked.next_in_s is None else max(ticked.next_in_s, MIN_PAUSE_S)
            self.due_at = trio.current_time() + pause_s
            await self.wake.wait(pause_s)

    def _tell(self, left: Mapping[str, str]) -> None:
        """Log the schedules that are left, each once per hour and reason: they are met again at every tick."""
        now = trio.current_time()
        self._told = {one: at for one, at in self._told.items() if now - at < TELL_EVERY_S}
        for name, why in left.items():
            if (name, why) not in self._told:
                self._told[name, why] = now
                log.warning("a schedule is left to other processes", schedule=name, error=why)

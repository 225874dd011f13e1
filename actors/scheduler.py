"""Enqueues the jobs of due schedules, and sleeps until the next one is due.

A notification wakes it when a schedule was stored or resumed, the poller if that was lost. Every process has one; the
first to lock a schedule's row enqueues its jobs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import attrs
import trio

from dataloader.actors.outage import Outage
from dataloader.actors.wake import Wake
from dataloader.actors.woken import work_when_woken
from dataloader.jobs.logger import get_logger
from dataloader.jobs.model import DEFAULT_LEASE_S
from dataloader.jobs.telemetry import Telemetry
from dataloader.store.connection.bridge import Database
from dataloader.store.schedules.cut_back import cut_back
from dataloader.store.schedules.tick import tick

log = get_logger(__name__)

MAX_PAUSE_S: Final = 5.0
"""Maximum pause in seconds after a failure."""
MIN_PAUSE_S: Final = 0.001
TELL_EVERY_S: Final = 3_600.0
"""Seconds after which a schedule that stays unreadable for the same reason is logged again."""


@attrs.define(eq=False, kw_only=True)
class Scheduler:
    """Scheduler of one process. Leases last `default_lease_s` seconds unless the schedule or its task sets them.

    After a failure it tries again in `poll_s` seconds at the latest. `due_at` is the time of the next schedule by
    Trio's clock.
    """

    database: Database
    outage: Outage
    telemetry: Telemetry
    poll_s: float
    default_lease_s: int = DEFAULT_LEASE_S
    wake: Wake = attrs.field(factory=Wake)
    due_at: float = attrs.field(default=-math.inf, init=False)
    _told: dict[tuple[str, str], float] = attrs.field(factory=dict, init=False)
    _may_be_ahead: bool = attrs.field(default=True, init=False)

    def clock_went_back(self) -> None:
        """Correct next times that were computed while the clock was ahead, as at the start."""
        self._may_be_ahead = True
        self.wake.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Enqueue jobs until cancelled."""
        task_status.started()
        self.wake.set()
        pause_s = min(self.poll_s, MAX_PAUSE_S)
        await work_when_woken("scheduler", self.wake, self._tick, self.outage, pause_s=pause_s)

    async def _tick(self) -> float:
        """Enqueue the jobs that are due; return the seconds until the next schedule is."""
        if self._may_be_ahead:
            await cut_back(self.database)
            self._may_be_ahead = False
        ticked = await tick(self.database, default_lease_s=self.default_lease_s)
        self.telemetry.set_aside("scheduler", ticked.set_aside)
        self._tell(ticked.left)
        next_in_s = math.inf if ticked.next_in_s is None else max(ticked.next_in_s, MIN_PAUSE_S)
        self.due_at = trio.current_time() + next_in_s
        return next_in_s

    def _tell(self, left: Mapping[str, str]) -> None:
        """Log the schedules that are left to other processes, each once per hour and reason: every tick meets them."""
        now = trio.current_time()
        self._told = {one: at for one, at in self._told.items() if now - at < TELL_EVERY_S}
        for name, why in left.items():
            if (name, why) not in self._told:
                self._told[name, why] = now
                log.warning("skipping a schedule that this process cannot handle", schedule=name, error=why)

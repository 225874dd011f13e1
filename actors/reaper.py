"""Takes back jobs whose lease has ended, every period, a bounded number each time.

It runs in every process, and skips rows that another reaper has locked. The database's clock decides. If that clock has
jumped against ours between two sweeps, as in a failover to a host with another clock, the sweep takes nothing. So a
jump does not take all running jobs from their workers. The heartbeat is woken to renew its leases before the next
sweep, one period later. A worker that is cut off cannot renew its leases: after a jump ahead, they last their whole
length from then on. After a jump back, leases that are too long by the new clock are cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final
from uuid import UUID

import attrs
import trio

from dataloader.actors.outage import Outage
from dataloader.actors.wake import Wake
from dataloader.jobs.errors import StoreError
from dataloader.jobs.logger import get_logger
from dataloader.jobs.states import Status
from dataloader.jobs.telemetry import Telemetry
from dataloader.store.connection.bridge import Database
from dataloader.store.processes.upkeep import mend_ended
from dataloader.store.queue.leases import JUMP_S, Reaped, aio_cut_back_leases, aio_mark_jump, reap
from dataloader.store.queue.reads import ping

log = get_logger(__name__)

BATCH: Final = 500
MAX_BATCHES: Final = 4
"""Maximum number of batches in one sweep, even when every lease has expired."""
MAX_PAUSE_S: Final = 10.0
"""Maximum pause in seconds between sweeps while the database is away; a sweep may be the first to notice its return."""
SAY_ENDLESS_EVERY_S: Final = 60.0
PING_S: Final = 5.0
SETTLE_S: Final = 2.0
"""Delay in seconds of the first sweep after an outage, in which other workers write the ends of their runs."""


@attrs.define(eq=False, kw_only=True)
class Reaper:
    """Reaper that sweeps every `period_s` seconds.

    It sets `jumped` when the database's clock has jumped by more than `jump_s` seconds, and calls `went_back` if the
    clock has jumped back.
    """

    database: Database
    outage: Outage
    telemetry: Telemetry
    period_s: float
    jumped: Wake
    default_lease_s: int
    jump_s: float = JUMP_S
    went_back: Callable[[], None] = lambda: None
    _said: frozenset[UUID] = attrs.field(init=False, default=frozenset())
    _say_again_at: float = attrs.field(init=False, default=-math.inf)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Sweep until cancelled."""
        task_status.started()
        ahead_s: float | None = None
        was_away = False
        while True:
            try:
                if was_away:
                    await ping(self.database, PING_S)
                    await trio.sleep(min(self.period_s, SETTLE_S))
                ahead_s = await self._sweep(ahead_s)
                self.outage.worked("reaper")
                was_away = False
            except StoreError as error:
                self.outage.failed("reaper", error)
                was_away = True
            await trio.sleep(min(self.period_s, MAX_PAUSE_S) if self.outage.lasts else self.period_s)

    async def _sweep(self, ahead_s: float | None) -> float | None:
        """Sweep unless the database's clock has jumped. Returns the seconds by which it is ahead of ours, if known."""
        batches = 0
        while True:
            batches += 1
            reaped = await reap(self.database, BATCH, ahead_s=ahead_s, jump_s=self.jump_s)
            if reaped.jumped and ahead_s is not None:
                by_s = reaped.ahead_s - ahead_s
                if 0 < by_s <= reaped.took_s + self.jump_s:
                    # The statement may only have waited that long for a locked table. The next attempt shows it,
                    # because a real jump is seen again.
                    if batches < MAX_BATCHES:
                        continue
                    return None  # every attempt was slow; the next sweep does not compare, or no sweep would take jobs
                log.warning("skipping a sweep: the database's clock jumped", by_s=round(by_s, 1))
                self.jumped.set()
                if by_s > 0:
                    await self.database.write(aio_mark_jump)
                else:
                    self.went_back()
                    if cut := await self.database.write(aio_cut_back_leases):
                        log.warning("shortened leases: the database's clock had been ahead", jobs=cut)
                ahead_s = None  # from before the jump; without it the next sweep takes, even if no newer value is known
            if reaped.became:
                log.warning("recovered jobs whose leases had expired", jobs=len(reaped.became))
                self.telemetry.taken_back(reaped.became)
                await self._mend_processes(reaped)
            if len(reaped.became) < BATCH or batches == MAX_BATCHES:
                self._tell_of_endless(frozenset(reaped.endless))
                return reaped.ahead_s if reaped.took_s < self.jump_s else ahead_s

    async def _mend_processes(self, reaped: Reaped) -> None:
        """Replace lost wake-up jobs of processes: one that was to stop a step is lost when it ends with its worker."""
        if any(queue.startswith("process.") and status != Status.QUEUED for queue, status in reaped.became):
            await mend_ended(self.database, self.default_lease_s)

    def _tell_of_endless(self, found: frozenset[UUID]) -> None:
        """Warn of running jobs that no sweep will ever take back: when there are new ones, at most once a minute."""
        self.telemetry.found_endless(len(found))
        now = trio.current_time()
        if found - self._said and now >= self._say_again_at:
            self._said, self._say_again_at = found, now + SAY_ENDLESS_EVERY_S
            log.warning(
                "leases of running jobs never expire and are not renewed; cancel the jobs, or retry them with force",
                jobs=len(found),
                job_ids=[str(job_id) for job_id in sorted(found)[:5]],
            )

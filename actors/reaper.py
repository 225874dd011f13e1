"""Takes back jobs whose lease has ended, every period, a bounded number at a time (Q10).

Runs in every process; rows that another reaper has in hand are passed over. The database's clock decides. When that
clock has jumped against ours between two sweeps (a failover to a host with another clock), nothing is taken before a
second look one period later, so that a jump does not take every running job from its worker at once (F32).
"""

from __future__ import annotations

from typing import Final

import attrs
import structlog
import trio

from dataloader.jobs.errors import StoreError
from dataloader.store.database import Database
from dataloader.store.leases import database_clock, reap

log = structlog.get_logger(__name__)

BATCH: Final = 500
MAX_BATCHES: Final = 4
"""Batches in one sweep: a bound on what one sweep can take, also when everything has expired."""
JUMP_S: Final = 2.0


@attrs.define(eq=False, kw_only=True)
class Reaper:
    """Sweeps every `period_s` seconds."""

    database: Database
    period_s: float

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Sweep until cancelled."""
        task_status.started()
        ahead_s: float | None = None
        while True:
            try:
                before_s, ahead_s = ahead_s, await database_clock(self.database) - trio.current_time()
                if before_s is not None and abs(ahead_s - before_s) > JUMP_S:
                    log.warning(
                        "the database's clock jumped: this sweep is left out", by_s=round(ahead_s - before_s, 1)
                    )
                else:
                    await self._sweep()
            except StoreError as error:
                log.warning("a sweep for expired leases failed", error=str(error))
            await trio.sleep(self.period_s)

    async def _sweep(self) -> None:
        for _ in range(MAX_BATCHES):
            taken = await reap(self.database, BATCH)
            if taken:
                log.warning("jobs were taken back: their leases had ended", jobs=len(taken))
            if len(taken) < BATCH:
                return

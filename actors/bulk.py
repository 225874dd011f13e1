"""Runs bulk operations, which operators have started on many jobs, batch by batch.

A notification wakes it when an operation begins. The poller wakes it if the notification was lost, or if the process
that ran the operation has died. Every process has one; the first to lock an operation's row runs the next batch.
"""

from __future__ import annotations

from typing import Final

import attrs
import trio

from dataloader.actors.outage import Outage
from dataloader.actors.wake import Wake
from dataloader.actors.woken import work_when_woken
from dataloader.store.connection.bridge import Database
from dataloader.store.queue.bulk_batches import do_batch

WAIT_S: Final = 1.0
"""Pause in seconds after a failure, and after a batch that changed nothing because its rows were locked."""
MAX_REST_S: Final = 0.5
"""Maximum pause in seconds after a batch. It lasts as long as the batch took, to let claims and finishes run."""


@attrs.define(eq=False, kw_only=True)
class BulkWorker:
    """Worker for bulk operations in one process."""

    database: Database
    outage: Outage
    wake: Wake = attrs.field(factory=Wake)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run batches until cancelled."""
        task_status.started()
        self.wake.set()
        await work_when_woken("bulk operations", self.wake, self._do_batch, self.outage, pause_s=WAIT_S)

    async def _do_batch(self) -> float | None:
        """Run one batch and pause; return None if no operation is open."""
        began_at = trio.current_time()
        batch = await do_batch(self.database)
        if batch is None:
            return None
        await trio.sleep(WAIT_S if batch.waits else min(trio.current_time() - began_at, MAX_REST_S))
        return 0.0

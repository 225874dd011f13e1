"""Runs bulk operations, which operators have started on many jobs, batch by batch.

A notification wakes it when an operation begins. The poller wakes it if the notification was lost, or if the process
that ran the operation has died. Every process has one; the first to lock an operation's row runs the next batch.
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
        while True:
            self.wake.lower()
            began_at = trio.current_time()
            try:
                batch = await do_batch(self.database)
            except StoreError as error:
                self.outage.failed("bulk acts", error)
                await trio.sleep(WAIT_S)
                continue
            self.outage.worked("bulk acts")
            if batch is None:
                await self.wake.wait(math.inf)
            else:
                await trio.sleep(WAIT_S if batch.waits else min(trio.current_time() - began_at, MAX_REST_S))

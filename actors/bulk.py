"""Does what operators asked to be done to many jobs (U16), batch by batch.

A notification wakes it when an act begins, the poller when that was lost or when the process has died that was at
work. Every process has one: whoever locks an act's row first does its next batch.
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
"""After a batch that could change nothing, since others have its rows locked, and after a failure."""
MAX_REST_S: Final = 0.5
"""Between two batches it rests for as long as the batch took: claims and finishes get their turn."""


@attrs.define(eq=False, kw_only=True)
class BulkWorker:
    """What works on bulk acts in one process."""

    database: Database
    outage: Outage
    wake: Wake = attrs.field(factory=Wake)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Do batches until cancelled."""
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

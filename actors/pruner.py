"""Deletes jobs that ended long ago, with their journal, in small batches, and the rows of dead workers.

Retention is off by default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import attrs
import trio

from dataloader.actors.outage import Outage
from dataloader.jobs.errors import StoreError
from dataloader.jobs.logger import get_logger
from dataloader.jobs.states import Status
from dataloader.store.connection.bridge import Database
from dataloader.store.queue.retention import prune

log = get_logger(__name__)

EVERY_S: Final = 600.0
BETWEEN_BATCHES_S: Final = 0.1
"""The pause between batches, in which claims and finishes get their turn."""


@attrs.define(eq=False, kw_only=True)
class Pruner:
    """Keeps finished jobs for `days` by status; 0 keeps them for ever."""

    database: Database
    outage: Outage
    days: Mapping[Status, int]

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Prune until cancelled."""
        task_status.started()
        while True:
            try:
                while deleted := await prune(self.database, self.days):
                    log.info("old jobs were deleted", jobs=deleted)
                    await trio.sleep(BETWEEN_BATCHES_S)
            except StoreError as error:
                if not self.outage.lasts:
                    log.warning("old jobs were not deleted", error=str(error))
            await trio.sleep(EVERY_S)

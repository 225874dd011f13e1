"""Enqueues jobs that make the deliveries of durable processes, for the partitions of the outbox.

It runs in a process that has sinks or runs durable processes. Code that stores a delivery wakes it after the commit.
Its poll finds deliveries that a killed process has left, that other programs have stored, and that an operator has
released. The poll is slow until a delivery was found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs
import trio

from dataloader.actors.outage import Outage
from dataloader.actors.wake import Wake
from dataloader.jobs.errors import StoreError
from dataloader.jobs.model import DEFAULT_LEASE_S
from dataloader.jobs.process_outbox import Sink
from dataloader.store.connection.bridge import Database
from dataloader.store.processes.outbox_rows import know_sinks, post

POLL_S: Final = 5.0
UNUSED_POLL_S: Final = 60.0
"""Poll period in seconds while there are no sinks and there was nothing to deliver."""
KNOW_EVERY_S: Final = 1_800.0
PAUSE_S: Final = 0.005
"""Minimum pause in seconds between two checks, however much is stored."""


@attrs.define(eq=False, kw_only=True)
class OutboxPoster:
    """Poster of one process, for the `sinks` of its settings. Once it has posted, it polls every `poll_s` seconds."""

    database: Database
    outage: Outage
    sinks: Sequence[Sink]
    default_lease_s: int = DEFAULT_LEASE_S
    poll_s: float = POLL_S
    wake: Wake = attrs.field(factory=Wake)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Post until cancelled. The start of the process has stored the sinks in the database."""
        task_status.started()
        know_at, used = trio.current_time() + KNOW_EVERY_S, bool(self.sinks)
        while True:
            self.wake.lower()
            try:
                if self.sinks and trio.current_time() >= know_at:
                    await know_sinks(self.database, self.sinks)
                    know_at = trio.current_time() + KNOW_EVERY_S
                used = await post(self.database, self.default_lease_s) > 0 or used
                self.outage.worked("outbox")
            except StoreError as error:
                self.outage.failed("outbox", error)
            await trio.sleep(PAUSE_S)
            if await self.wake.wait(self.poll_s if used else UNUSED_POLL_S):
                used = True

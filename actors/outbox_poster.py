"""Sees to it that what processes tell is delivered: partitions of the outbox get jobs for it (P9, P10).

Runs in a process that has sinks or runs durable processes. Whoever stores something that is to be delivered wakes it
after the commit. Its poll finds what a killed process has left, what other programs have stored, and what an operator
has released; it is slow while nothing was ever found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs
import trio

from dataloader.actors.outage import Outage
from dataloader.actors.wake import Wake
from dataloader.jobs.errors import StoreError
from dataloader.jobs.process_outbox import Sink
from dataloader.store.connection.bridge import Database
from dataloader.store.processes.outbox_rows import know_sinks, post

POLL_S: Final = 5.0
UNUSED_POLL_S: Final = 60.0
"""The same, while there are no sinks and there was nothing to deliver."""
KNOW_EVERY_S: Final = 1_800.0
PAUSE_S: Final = 0.005
"""However much is stored, it looks so often at most."""


@attrs.define(eq=False, kw_only=True)
class OutboxPoster:
    """Poster of one process, for the `sinks` of its settings. Once it has posted, it polls every `poll_s` seconds."""

    database: Database
    outage: Outage
    sinks: Sequence[Sink]
    default_lease_s: int = 60
    poll_s: float = POLL_S
    wake: Wake = attrs.field(factory=Wake)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Post until cancelled. The start of the process has let the database know the sinks."""
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

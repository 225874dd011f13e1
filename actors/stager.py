"""Makes waiting jobs ready: their time has come, their key is free, their task is known, what they run after has ended.

Sleeps until the next job falls due, and is told by notification of an earlier one, and of an end that others wait for.
At such an end it looks only at those who wait for it; at jobs that were added and run after others when it is told of
one, when nothing has woken it, and at each sweep. Every backoff period it sweeps the parked keys, which is the net
below the wake-ups of those who hold them. When more has fallen due than one batch it rests between batches, as a share
of the time they take, so that claims and outcomes go on.
"""

from __future__ import annotations

from typing import Final

import attrs
import trio

from dataloader.actors.outage import Outage
from dataloader.actors.wake import Wake
from dataloader.jobs.errors import StoreError
from dataloader.jobs.logger import get_logger
from dataloader.jobs.tasks import Tasks
from dataloader.store.connection.bridge import Database
from dataloader.store.queue.make_ready import BATCH, ready_after, ready_due, ready_free, ready_known

log = get_logger(__name__)

LOCKED_S: Final = 0.5
MAX_PAUSE_S: Final = 5.0
"""After a failure."""
REST: Final = 2.5
"""The rest after a batch that left others due: so many times as long as the batch took."""
MAX_REST_S: Final = 0.2
"""So that where batches are slow a storm of 300,000 is still over within a minute."""


@attrs.define(eq=False, kw_only=True)
class Stager:
    """Stages for all queues; `queues` and `tasks` say which parked jobs with unknown tasks are known here."""

    database: Database
    queues: list[str]
    tasks: Tasks
    outage: Outage
    sweep_s: float
    poll_s: float
    wake: Wake = attrs.field(factory=Wake)
    added: Wake = attrs.field(factory=Wake)
    """Set before `wake` when a job was added that runs after others."""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Stage until cancelled."""
        task_status.started()
        sweep_at = trio.current_time()
        added = True
        while True:
            try:
                if trio.current_time() >= sweep_at:
                    sweep_at = trio.current_time() + self.sweep_s
                    await ready_known(self.database, self.queues, list(self.tasks))
                    await ready_free(self.database)
                    added = True
                if self.added.is_set:
                    self.added.lower()
                    added = True
                began = trio.current_time()
                staged = await ready_due(self.database)
                judged = await ready_after(self.database, added=added)
                added = added and judged.more
                self.outage.worked("stager")
            except StoreError as error:
                self.outage.failed("stager", error)
                await trio.sleep(min(self.poll_s, MAX_PAUSE_S))
                continue
            if (staged.readied >= BATCH and staged.next_due_s == 0) or (judged.jobs and judged.more):
                await trio.sleep(min(REST * (trio.current_time() - began), MAX_REST_S))
                continue
            # What falls due is told of, unless notifications are lost.
            pause_s = min(sweep_at - trio.current_time(), self.poll_s)
            if staged.next_due_s is not None:
                # Due and not made ready: somebody has the row locked.
                pause_s = min(pause_s, staged.next_due_s + 0.001 if staged.next_due_s > 0 else LOCKED_S)
            if judged.more:
                pause_s = min(pause_s, LOCKED_S)
            if not await self.wake.wait(max(pause_s, 0.001)):
                added = True

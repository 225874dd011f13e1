"""Makes waiting jobs ready: their time has come, their key is free, their task is known, what they run after has ended.

Sleeps until the next job falls due. Notifications wake it for a job that is due earlier, and for the end of a job that
others wait for. After such an end it looks only at the jobs that wait for it. It looks at newly added jobs that run
after others when a notification says that there are some, when no notification has come, and at each sweep. In every
backoff period it sweeps the parked keys, for wake-ups that were lost. When more jobs have fallen due than one batch
takes, it pauses between batches, in proportion to the time that they take, so that claims and outcomes go on.
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
from dataloader.store.queue.make_ready import BATCH, ready_after, ready_declared, ready_due, ready_free

log = get_logger(__name__)

LOCKED_S: Final = 0.5
MAX_PAUSE_S: Final = 5.0
"""After a failure."""
REST: Final = 2.5
"""The pause after a batch that left others due, as a multiple of the time that the batch took."""
MAX_REST_S: Final = 0.2
"""The longest such pause: even where batches are slow, 300,000 jobs that fall due together are ready in a minute."""


@attrs.define(eq=False, kw_only=True)
class Stager:
    """Stages for all queues. Jobs parked for an unknown task are made ready if this process has queue and task."""

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
                    await ready_declared(self.database, self.queues, list(self.tasks))
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
            # A notification wakes it for a job that falls due; `poll_s` is for lost ones.
            pause_s = min(sweep_at - trio.current_time(), self.poll_s)
            if staged.next_due_s is not None:
                # A job that is due and was not made ready has a locked row.
                pause_s = min(pause_s, staged.next_due_s + 0.001 if staged.next_due_s > 0 else LOCKED_S)
            if judged.more:
                pause_s = min(pause_s, LOCKED_S)
            if not await self.wake.wait(max(pause_s, 0.001)):
                added = True

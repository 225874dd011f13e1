"""Makes waiting jobs ready: when they are due, their key is free, or their predecessors have ended.

It sleeps until the next job is due. Notifications wake it for a job that is due earlier, and for the end of a job that
others wait for; the poller does if they were lost. After such an end it checks only the jobs that wait for it. It
checks new jobs that run after others when a notification, a poll or its own check reports some. In every backoff period
it looks for parked jobs and checks their keys, in case wake-ups were lost. When more jobs are due than one batch takes,
it pauses between batches, in proportion to their time, so that claims and outcomes continue.
"""

from __future__ import annotations

import math
from typing import Final

import attrs
import trio

from dataloader.actors.outage import Outage
from dataloader.actors.wake import Wake
from dataloader.jobs.errors import StoreError
from dataloader.jobs.logger import get_logger
from dataloader.store.connection.bridge import Database
from dataloader.store.queue.make_ready import BATCH, Judged, Staged, ready_after, ready_due, ready_free
from dataloader.store.queue.poll import look_for_parked

log = get_logger(__name__)

LOCKED_S: Final = 0.5
MAX_PAUSE_S: Final = 5.0
"""Maximum pause in seconds after a failure."""
REST: Final = 2.5
"""Pause after a batch that left due jobs, as a multiple of the batch's time."""
MAX_REST_S: Final = 0.2
"""Maximum such pause in seconds: even with slow batches, 300,000 jobs due together become ready in a minute."""


@attrs.define(eq=False, kw_only=True)
class Stager:
    """Stager for all queues.

    After a failure it tries again in `poll_s` seconds at the latest. `due_at` is the time of the next due job by Trio's
    clock.
    """

    database: Database
    outage: Outage
    sweep_s: float
    poll_s: float
    wake: Wake = attrs.field(factory=Wake)
    added: Wake = attrs.field(factory=Wake)
    """Set before `wake` when a job was added that runs after others."""
    due_at: float = attrs.field(default=-math.inf, init=False)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Stage until cancelled."""
        task_status.started()
        sweep_at = trio.current_time()
        added = judging = True
        while True:
            try:
                if trio.current_time() >= sweep_at:
                    sweep_at = trio.current_time() + self.sweep_s
                    if await self._sweep():
                        added = judging = True
                if self.added.is_set:
                    self.added.lower()
                    added = judging = True
                began = trio.current_time()
                staged = await ready_due(self.database)
                self.due_at = trio.current_time() + _due_in_s(staged)
                judged = await ready_after(self.database, added=added) if judging else Judged(0, more=False)
                added = added and judged.more
                judging = judged.more
                self.outage.worked("stager")
            except StoreError as error:
                judging = True
                self.outage.failed("stager", error)
                await trio.sleep(min(self.poll_s, MAX_PAUSE_S))
                continue
            if (staged.readied >= BATCH and staged.next_due_s == 0) or (judged.jobs and judged.more):
                await trio.sleep(min(REST * (trio.current_time() - began), MAX_REST_S))
                continue
            pause_s = min(self.due_at, sweep_at) - trio.current_time()
            if judged.more:
                pause_s = min(pause_s, LOCKED_S)
            if await self.wake.wait(max(pause_s, 0.001)):
                judging = True

    async def _sweep(self) -> bool:
        """Make parked jobs ready that need not wait; return whether jobs that run after others must be checked."""
        parked = await look_for_parked(self.database)
        if parked.for_keys:
            await ready_free(self.database)
        return parked.to_judge


def _due_in_s(staged: Staged) -> float:
    """Return the seconds until jobs must be made ready again."""
    if staged.next_due_s is None:
        return math.inf
    # A due job that was not made ready has a locked row.
    return staged.next_due_s + 0.001 if staged.next_due_s > 0 else LOCKED_S

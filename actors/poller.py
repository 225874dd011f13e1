"""Polls for events whose notifications may have been lost, and wakes the actors that they concern.

One statement serves all queues, the stager and the scheduler, which send none while they have nothing to do. A queue
that gets no answer from here for too long, because the pool has none, claims by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import attrs
import trio

from dataloader.actors.dispatcher import Dispatcher
from dataloader.actors.outage import Outage
from dataloader.actors.scheduler import Scheduler
from dataloader.actors.stager import Stager
from dataloader.actors.wake import Wake
from dataloader.jobs.errors import StoreError
from dataloader.jobs.growing_pauses import jittered
from dataloader.store.connection.bridge import Database
from dataloader.store.queue.poll import poll

EARLIER_S: Final = 0.1
"""Seconds by which a polled time must be earlier than the known one to count as another time."""


@attrs.define(eq=False, kw_only=True)
class Poller:
    """Poll of one process, every `poll_s` seconds, plus or minus a fifth."""

    database: Database
    outage: Outage
    poll_s: float
    dispatchers: Sequence[Dispatcher]
    stager: Stager
    scheduler: Scheduler
    bulk: Wake
    limits_changed: Callable[[], None]
    _limits: int | None = attrs.field(default=None, init=False)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Poll until cancelled."""
        task_status.started()
        while True:
            # Jittered, so that replicas that were started together do not poll together.
            await trio.sleep(jittered(self.poll_s))
            lanes = sorted({lane for one in self.dispatchers for lane in one.lanes.lanes})
            queues = list(dict.fromkeys(one.queue for one in self.dispatchers))
            tasks = sorted({task for one in self.dispatchers for task in one.tasks})
            sent_at = trio.current_time()
            try:
                polled = await poll(self.database, queues, lanes, tasks)
            except StoreError as error:
                self.outage.failed("poll", error)
                continue
            self.outage.worked("poll")
            if polled.limits != self._limits:
                self._limits = polled.limits
                self.limits_changed()
            for dispatcher in list(self.dispatchers):
                dispatcher.polled(polled, sent_at)
            if polled.to_judge:
                self.stager.added.set()
            if polled.to_judge or _is_earlier(polled.job_in_s, self.stager.due_at):
                self.stager.wake.set()
            if _is_earlier(polled.schedule_in_s, self.scheduler.due_at):
                self.scheduler.wake.set()
            if polled.bulk:
                self.bulk.set()


def _is_earlier(in_s: float | None, known_at: float) -> bool:
    """Return whether a time is earlier than the known one: a notification was lost, or the clock has jumped."""
    return in_s is not None and trio.current_time() + max(in_s, 0) + EARLIER_S < known_at

"""Retry delays that operators have set: read when limits change, and kept in memory for the ends of runs.

A notification reports each change. The listener also reports that a lost connection is back, and the poll reports a
change whose notification was lost. So an idle process reads nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import trio

from dataloader.actors.outage import Outage
from dataloader.actors.signals import Signals
from dataloader.actors.wake import Wake
from dataloader.actors.woken import work_when_woken
from dataloader.jobs.task import Task
from dataloader.store.connection.bridge import Database
from dataloader.store.limits.limit_rows import aio_retry_delays


@attrs.define(eq=False, kw_only=True)
class RetryDelays:
    """Delays of this process's tasks, `by_task` in seconds, for those with a delay set."""

    database: Database
    tasks: Mapping[str, Task[Any]]
    outage: Outage
    by_task: dict[str, float] = attrs.field(factory=dict)
    signals: Signals | None = None
    wake: Wake = attrs.field(factory=Wake)

    async def learn(self) -> None:
        """Read the delays. Raises `StoreUnavailable`."""
        found = await self.database.run(aio_retry_delays, list(self.tasks))
        self.by_task.clear()
        self.by_task.update(found)
        if self.signals is not None:
            self.signals.retry_delays.emit(dict(found))

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Read the delays whenever `wake` is set, until cancelled."""
        task_status.started()
        await work_when_woken("retry delays", self.wake, self.learn, self.outage)

"""Moves ready jobs, as other services add them, into the limit queues of an entry that takes only some tasks.

It checks when a job became ready in the queue, or when a poll has found one. A check also reads ready jobs that are not
its own. It pauses a hundred times as long as these take, so however many of them wait, they cost a hundredth of a
processor. The time of the answer does not count: on a busy machine, a check of a few jobs may take a second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import attrs
import trio

from dataloader.actors.outage import Outage
from dataloader.actors.wake import Wake
from dataloader.actors.woken import work_when_woken
from dataloader.store.connection.bridge import Database
from dataloader.store.limits.own_lanes import file_ready

REST_S: Final = 0.0002
"""Pause in seconds for each job that a check has read, which takes the server some 2 µs."""
LEAST_LOOKED: Final = 500
"""Minimum number of jobs for which a check counts, because of its fixed cost."""


@attrs.define(eq=False, kw_only=True)
class Filer:
    """Filer of one entry. `lanes` returns those of its tasks that have a limit queue."""

    queue: str
    lanes: Callable[[], Sequence[str]]
    database: Database
    outage: Outage
    wake: Wake = attrs.field(factory=Wake)

    async def run(self) -> None:
        """Check until cancelled."""
        await work_when_woken("filer", self.wake, self._look_at_all, self.outage)

    async def _look_at_all(self) -> None:
        last = None
        while lanes := self.lanes():
            filed = await file_ready(self.database, self.queue, lanes, last)
            last = filed.last
            await trio.sleep(REST_S * max(filed.looked, LEAST_LOOKED))
            if last is None:
                return

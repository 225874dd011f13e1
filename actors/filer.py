"""Puts ready jobs into the lanes of an entry that takes jobs of some tasks alone: what other services have added (S5).

It looks when something became ready in the queue, or a poll has found that something is. A look reads ready jobs that
are not its own, too: it rests a hundred times as long as these take, so however many of them wait, they cost a
hundredth of a processor. How long the answer took says nothing: on a busy machine a look at a few may take a second.
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
"""The pause after a look, for each job that it has looked at: some 2 µs of the server's time."""
LEAST_LOOKED: Final = 500
"""A look costs as much as one at so many jobs at least."""


@attrs.define(eq=False, kw_only=True)
class Filer:
    """The filer of one entry. `lanes` gives those of its tasks that have a lane."""

    queue: str
    lanes: Callable[[], Sequence[str]]
    database: Database
    outage: Outage
    wake: Wake = attrs.field(factory=Wake)

    async def run(self) -> None:
        """Look until cancelled."""
        await work_when_woken("filer", self.wake, self._look_at_all, self.outage)

    async def _look_at_all(self) -> None:
        last = None
        while lanes := self.lanes():
            filed = await file_ready(self.database, self.queue, lanes, last)
            last = filed.last
            await trio.sleep(REST_S * max(filed.looked, LEAST_LOOKED))
            if last is None:
                return

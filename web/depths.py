"""How many jobs wait in which queue, remembered for some seconds, however many ask.

Counting walks an index over all that has not ended; a few scrapers must not make it the database's main work.
"""

from __future__ import annotations

from typing import Final

import attrs
import trio

from dataloader.jobs.errors import StoreError
from dataloader.jobs.model import QueueRecord
from dataloader.store.database import Database
from dataloader.store.reads import count_queues

REMEMBERED_S: Final = 5.0
DATABASE_S: Final = 5.0
MOST_NAMED: Final = 100
"""Queues that are counted by name: whoever may trigger makes up names, and each is several lines for ever."""
OTHER: Final = "other"
"""Stands for all the others."""


@attrs.define
class QueueDepths:
    """The queues as they were at most five seconds ago. One for each app; it keeps its answer between requests."""

    _database: Database
    _queues: list[QueueRecord] | None = None
    _asked_at: float = float("-inf")

    async def latest(self) -> list[QueueRecord] | None:
        """The queues, or None while the database does not answer."""
        if trio.current_time() - self._asked_at >= REMEMBERED_S:
            self._asked_at = trio.current_time()
            self._queues = await self._ask()
        return self._queues

    async def _ask(self) -> list[QueueRecord] | None:
        try:
            with trio.move_on_after(DATABASE_S):
                return await count_queues(self._database, most=MOST_NAMED, rest=OTHER)
        except StoreError:
            pass
        return None

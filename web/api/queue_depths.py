"""How many jobs wait in which queue, remembered for some seconds, however many ask.

Counting walks an index over all that has not ended; a few scrapers must not make it the database's main work.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import attrs
import trio

from dataloader.jobs.errors import StoreError
from dataloader.jobs.model import QueueRecord
from dataloader.store.connection.bridge import Database
from dataloader.store.queue.reads import count_queues
from dataloader.web import shown

REMEMBERED_S: Final = 5.0
MOST_NAMED: Final = 100
"""Queues that are counted by name: whoever may trigger makes up names, and each is several lines for ever."""
OTHER: Final = "other"
"""Stands for all the others."""
_COUNTS: Final = ("ready", "delayed", "blocked", "unknown_task", "dependent", "limited", "running", "workers", "slots")


@attrs.define
class QueueDepths:
    """The queues as they were at most five seconds ago. One for each app; it keeps its answer between requests."""

    _database: Database
    _database_s: float
    """How long it waits for the database."""
    _queues: list[QueueRecord] | None = None
    _asked_at: float = float("-inf")
    _asking: trio.Lock = attrs.field(factory=trio.Lock)

    async def latest(self) -> list[QueueRecord] | None:
        """The queues, or None while the database does not answer."""
        async with self._asking:
            if trio.current_time() - self._asked_at >= REMEMBERED_S:
                self._queues = await self._ask()
                self._asked_at = trio.current_time()
            return self._queues

    async def _ask(self) -> list[QueueRecord] | None:
        try:
            with trio.move_on_after(self._database_s):
                return _by_shown_name(await count_queues(self._database, most=MOST_NAMED, rest=OTHER))
        except StoreError:
            pass
        return None


def _by_shown_name(queues: Iterable[QueueRecord]) -> list[QueueRecord]:
    """The queues without the secrets in their names; those whose names differ in these alone are counted together."""
    found: dict[str, QueueRecord] = {}
    for queue in map(shown.queue, queues):
        found[queue.queue] = _together(found[queue.queue], queue) if queue.queue in found else queue
    return [*found.values()]


def _together(one: QueueRecord, other: QueueRecord) -> QueueRecord:
    counts = {name: getattr(one, name) + getattr(other, name) for name in _COUNTS}
    oldest = min(filter(None, (one.oldest_ready_at, other.oldest_ready_at)), default=None)
    return attrs.evolve(one, paused=one.paused or other.paused, oldest_ready_at=oldest, **counts)

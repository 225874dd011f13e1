"""Number of waiting jobs per queue, cached for a few seconds for all requests.

A count scans an index of all jobs that have not ended; a few scrapers must not become the database's main load.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import attrs
import trio

from dataloader.jobs.errors import StoreError
from dataloader.jobs.model import QueueRecord
from dataloader.jobs.secrets.record_masks import masked
from dataloader.store.connection.bridge import Database
from dataloader.store.queue.reads import count_queues

REMEMBERED_S: Final = 5.0
MOST_NAMED: Final = 100
"""Maximum number of queues counted by name: clients may create any number of names, and each adds several series."""
OTHER: Final = "other"
"""Name for all other queues together."""
_COUNTS: Final = ("ready", "delayed", "blocked", "unknown_task", "dependent", "limited", "running", "workers", "slots")


@attrs.define
class QueueDepths:
    """Cached queues, at most five seconds old. One for each app."""

    _database: Database
    _database_s: float
    """Maximum wait for the database, in seconds."""
    _queues: list[QueueRecord] | None = None
    _asked_at: float = float("-inf")
    _asking: trio.Lock = attrs.field(factory=trio.Lock)

    async def latest(self) -> list[QueueRecord] | None:
        """Return the queues, or None while the database does not answer."""
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
    """Return the queues without secrets in their names. Those whose names then are equal are counted together."""
    found: dict[str, QueueRecord] = {}
    for queue in map(masked, queues):
        found[queue.queue] = _together(found[queue.queue], queue) if queue.queue in found else queue
    return [*found.values()]


def _together(one: QueueRecord, other: QueueRecord) -> QueueRecord:
    counts = {name: getattr(one, name) + getattr(other, name) for name in _COUNTS}
    oldest = min(filter(None, (one.oldest_ready_at, other.oldest_ready_at)), default=None)
    return attrs.evolve(one, paused=one.paused or other.paused, oldest_ready_at=oldest, **counts)

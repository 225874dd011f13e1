"""State of durable processes, cached for a few seconds for all scrapers."""

from __future__ import annotations

import attrs
import trio

from dataloader.jobs.errors import StoreError
from dataloader.store.connection.bridge import Database
from dataloader.store.processes.gauges import ProcessGauges, read_gauges
from dataloader.web.api.queue_depths import REMEMBERED_S


@attrs.define
class LatestProcessGauges:
    """Cached state of the processes, at most five seconds old. One for each app."""

    _database: Database
    _database_s: float
    """Maximum wait for the database, in seconds."""
    _gauges: ProcessGauges | None = None
    _asked_at: float = float("-inf")
    _asking: trio.Lock = attrs.field(factory=trio.Lock)

    async def latest(self) -> ProcessGauges | None:
        """Return the state of the processes, or None while the database does not answer."""
        async with self._asking:
            if trio.current_time() - self._asked_at >= REMEMBERED_S:
                self._gauges = await self._ask()
                self._asked_at = trio.current_time()
            return self._gauges

    async def _ask(self) -> ProcessGauges | None:
        try:
            with trio.move_on_after(self._database_s):
                return await read_gauges(self._database)
        except StoreError:
            pass
        return None

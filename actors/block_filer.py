"""Moves blocks of jobs with unknown tasks out of the way of this process's claims.

A claim skips such jobs, but walks over their entries in the index: 100,000 of them take some 30 ms. When a walk from
the front has read more than 10,000 jobs, the dispatcher wakes this actor. If at least a quarter of the first ready jobs
have unknown tasks, it moves them into the limit queues of their tasks, which belong to the workers that know them. A
notification wakes those workers. It then continues behind the moved jobs, until unknown jobs are few. Between
statements it pauses in proportion to their time, so that claims and outcomes are not delayed.

Rejected: moving every unknown job that a claim meets. Each would cost a write, and a job would wait for the
notification of its limit queue.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

import attrs
import trio

from dataloader.actors.outage import Outage
from dataloader.actors.wake import Wake
from dataloader.actors.woken import work_when_woken
from dataloader.jobs.logger import get_logger
from dataloader.store.connection.bridge import Database
from dataloader.store.limits.unknown_blocks import file_block

log = get_logger(__name__)

REST: Final = 2.5
"""Pause after a batch, as a multiple of the time that the batch took."""
MAX_REST_S: Final = 0.2


@attrs.define(eq=False, kw_only=True)
class BlockFiler:
    """Filer of one queue. `known` returns the tasks whose jobs stay; `done` is called after jobs were moved."""

    queue: str
    known: Callable[[], Collection[str]]
    done: Callable[[], None]
    database: Database
    outage: Outage
    wake: Wake = attrs.field(factory=Wake)

    async def run(self) -> None:
        """Move blocks until cancelled."""
        await work_when_woken("block filer", self.wake, self._file_all, self.outage)

    async def _file_all(self) -> None:
        moved, after = 0, None
        while True:
            began = trio.current_time()
            filed = await file_block(self.database, self.queue, self.known(), after)
            if not filed.is_block:
                break
            moved, after = moved + filed.jobs, filed.last
            await trio.sleep(min(REST * (trio.current_time() - began), MAX_REST_S))
        if moved:
            log.info("moved jobs of unknown tasks", queue=self.queue, jobs=moved)
            self.done()

"""Sums of runs that ended in this process, until they are written: once a second, and at the end."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Final

import attrs
import trio

from dataloader.actors.outage import Outage
from dataloader.jobs.errors import StoreError
from dataloader.jobs.logger import get_logger
from dataloader.jobs.run_stats import RunOutcome, RunSum
from dataloader.store.connection.bridge import Session
from dataloader.store.queue.run_stats import Key, aio_add_run_stats

log = get_logger(__name__)

WRITE_EVERY_S: Final = 1.0


@attrs.define(eq=False)
class RunSums:
    """Sums of the recorder's counts; `due_at` is the time by Trio's clock when they must be written."""

    session: Session
    outage: Outage
    due_at: float = math.inf
    _sums: defaultdict[Key, RunSum] = attrs.field(factory=lambda: defaultdict(RunSum), init=False)

    def add(self, queue: str, task: str, outcome: RunOutcome, run_s: float) -> None:
        """Count a run of `run_s` seconds whose end is recorded."""
        self._sums[queue, task, outcome.value].add(run_s)
        if self.due_at == math.inf:
            self.due_at = trio.current_time() + WRITE_EVERY_S

    async def write(self) -> None:
        """Write the counts, if there are any. There is one attempt: a lost answer must not count a run twice."""
        sums, self._sums = self._sums, defaultdict(RunSum)
        self.due_at = math.inf
        if not sums:
            return
        try:
            await self.session.write(aio_add_run_stats, sums)
        except StoreError as error:
            if not self.outage.lasts:
                log.warning(
                    "statistics of some runs were lost", runs=sum(one.runs for one in sums.values()), error=str(error)
                )

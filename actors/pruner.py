"""Deletes old data in small batches: ended jobs with their event histories, and rows of our other tables.

It also folds the statistics of runs by hour, which processes append to, and cancels duplicates of waiting jobs where
that is set. It closes limit queues that unknown tasks no longer need. It checks all durable processes and replaces
missing wake-up jobs. Jobs are kept for ever by default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import attrs
import trio

from dataloader.actors.outage import Outage
from dataloader.jobs.errors import StoreError
from dataloader.jobs.logger import get_logger
from dataloader.jobs.model import DEFAULT_LEASE_S
from dataloader.jobs.states import Status
from dataloader.store.connection.bridge import Database
from dataloader.store.limits.unknown_blocks import close_lanes
from dataloader.store.processes.upkeep import mend_ended, move_unserved, tend
from dataloader.store.queue.duplicates import cancel_duplicates
from dataloader.store.queue.retention import prune
from dataloader.store.queue.run_stats import FOLDED, fold_run_stats
from dataloader.store.queue.table_rules import prune_tables

log = get_logger(__name__)

EVERY_S: Final = 600.0
FOLD_EVERY_S: Final = 60.0
"""Interval in seconds at which statistics are folded: each reader reads the rows appended since."""
BETWEEN_BATCHES_S: Final = 0.1
"""Pause in seconds between batches, in which claims and finishes can run."""
PAGES: Final = 100
"""Pages of a thousand processes that are checked each time; each takes the server some milliseconds."""


@attrs.define(eq=False, kw_only=True)
class Pruner:
    """Pruner that keeps finished jobs for `days` by status, and rows of other tables for `table_days`.

    0 keeps them for ever. Of identical waiting jobs of the tasks `duplicates_of` it keeps the best. A process keeps its
    newest `keep_process_events` events (0: all), and its ended tasks for `process_task_days` days (0: for ever).
    """

    database: Database
    outage: Outage
    days: Mapping[Status, int]
    table_days: Mapping[str, int] = attrs.field(factory=dict)
    duplicates_of: Sequence[str] = ()
    default_lease_s: int = DEFAULT_LEASE_S
    keep_process_events: int = 0
    process_task_days: int = 0
    _walked_to: int = attrs.field(default=0, init=False)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Prune until cancelled."""
        task_status.started()
        prune_at = trio.current_time()
        while True:
            try:
                await self._fold()
                await self._cancel_duplicates()
                await self._tend_processes()
                await close_lanes(self.database)
                if trio.current_time() >= prune_at:
                    prune_at = trio.current_time() + EVERY_S
                    await self._prune()
                self.outage.worked("pruner")
            except StoreError as error:
                self.outage.failed("pruner", error)
            await trio.sleep(FOLD_EVERY_S)

    async def _fold(self) -> None:
        while await fold_run_stats(self.database) == FOLDED:  # noqa: ASYNC110 - each call folds a batch
            await trio.sleep(BETWEEN_BATCHES_S)

    async def _cancel_duplicates(self) -> None:
        while self.duplicates_of and (
            canceled := await cancel_duplicates(self.database, list(self.duplicates_of), None)
        ):
            log.info("canceled duplicates of waiting jobs", jobs=canceled)
            await trio.sleep(BETWEEN_BATCHES_S)

    async def _tend_processes(self) -> None:
        mended, deleted = await mend_ended(self.database, self.default_lease_s), 0
        if moved := await move_unserved(self.database):
            log.info("processes that have not started now use the newest served version", processes=moved)
        for _ in range(PAGES):
            tended = await tend(
                self.database,
                self._walked_to,
                lease_s=self.default_lease_s,
                keep_events=self.keep_process_events,
                task_days=self.process_task_days,
            )
            mended, deleted, self._walked_to = mended + tended.mended, deleted + tended.deleted, tended.after
            if not self._walked_to:
                break
            await trio.sleep(BETWEEN_BATCHES_S)
        if mended:
            log.warning("replaced lost wake-up jobs of processes", processes=mended)
        if deleted:
            log.info("deleted old rows of processes", rows=deleted)

    async def _prune(self) -> None:
        while deleted := await prune(self.database, self.days):
            log.info("deleted old jobs", jobs=deleted)
            await trio.sleep(BETWEEN_BATCHES_S)
        while deleted := await prune_tables(self.database, self.table_days):
            log.info("deleted old rows", rows=deleted)
            await trio.sleep(BETWEEN_BATCHES_S)

"""The pipeline of a load: one asks, several process, one writes (E1 to E4).

    segments → asker ─(responses)→ workers ─(rows)→ writer → staging → one transaction a segment

The asker runs in the job's scope. Workers and the writer run behind a shield, so that what has come in is processed and
written when the job is stopped, for a bounded time.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable
from typing import Final, Literal
from uuid import UUID

import attrs
import trio

from dataloader.flows.etl.asker import Asker
from dataloader.flows.etl.belt import Fetched, Rows, Shared
from dataloader.flows.etl.config import PipelineConfig
from dataloader.flows.etl.plan import Part, Segment
from dataloader.flows.etl.report import Report
from dataloader.flows.etl.runlog import RunLog
from dataloader.flows.etl.token import CancellationToken
from dataloader.flows.etl.turnstile import Turnstile
from dataloader.flows.etl.workers import Workers
from dataloader.flows.etl.writer import Writer
from dataloader.store.database import Database
from dataloader.store.transaction import Transactions

End = Literal["succeeded", "failed", "canceled"]
WRITER_QUEUE: Final = 4
"""Processed responses that wait for the writer at most, as a multiple of `queue_size`; from 2 on there are warnings."""


@attrs.define(eq=False, kw_only=True)
class Pipeline:
    """One run of a load, by the job `run_id` with `token`.

    `drain_s` tells, when the job was stopped, for how many seconds what has come in may still be written.
    """

    run_id: UUID
    token: int
    load: str
    config: PipelineConfig
    report: Report
    log: RunLog
    turnstile: Turnstile
    database: Database
    transactions: Transactions
    cancel: CancellationToken
    drain_s: Callable[[], float]
    in_processes: bool
    _end: End = attrs.field(init=False, default="succeeded")
    _all: trio.CancelScope = attrs.field(init=False, factory=trio.CancelScope)
    _behind: trio.CancelScope = attrs.field(init=False, factory=lambda: trio.CancelScope(shield=True))
    _is_written: trio.Event = attrs.field(init=False, factory=trio.Event)

    async def run(self, segments: AsyncGenerator[Segment, None]) -> End:
        """Do all of it. `failed` when too many things in a row have failed, `canceled` when the token was cancelled.

        When the job is stopped, what has come in is written before `Cancelled` goes on its way.
        """
        self.report.too_many = self._give_up
        to_workers, fetched = trio.open_memory_channel[Fetched](math.inf)
        to_writer, processed = trio.open_memory_channel[Rows | Part](WRITER_QUEUE * self.config.queue_size)
        shared = Shared(
            run_id=self.run_id,
            token=self.token,
            load=self.load,
            config=self.config,
            report=self.report,
            log=self.log,
            room=trio.Semaphore(self.config.queue_size),
            to_workers=to_workers,
            to_writer=to_writer,
        )
        workers = Workers(shared, fetched, self.in_processes)
        writer = Writer(shared, processed, self.database, self.transactions)
        with self._all:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._process_and_write, workers, writer)
                try:
                    async with to_workers:
                        with self.cancel.scope() as scope:
                            await Asker(shared, self.turnstile).run(segments)
                        if scope.cancelled_caught:
                            self._stop_soon(self.config.drain_timeout)
                    await self._is_written.wait()
                except trio.Cancelled:
                    self._stop_soon(self.drain_s())
                    raise
        return self._end

    async def _process_and_write(self, workers: Workers, writer: Writer) -> None:
        with self._behind:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(writer.run)
                async with workers.shared.to_writer:
                    await workers.run()
        if self._end == "failed":
            await writer.save_failures()
        self._is_written.set()

    def _stop_soon(self, seconds: float) -> None:
        if self._end == "succeeded":
            self._end = "canceled"
        self._behind.deadline = min(self._behind.deadline, trio.current_time() + seconds)

    def _give_up(self) -> None:
        self.log.warning(
            "too many failures in a row: the run ends", phase="requests", failures=self.config.max_failures + 1
        )
        self._end = "failed"
        self._all.cancel()
        self._behind.cancel()

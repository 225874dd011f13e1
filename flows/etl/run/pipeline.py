"""The pipeline of a load: one fetcher, several parsers, one writer (E1 to E4).

    segments → fetcher ─(responses)→ parsers ─(rows)→ writer → staging table → one transaction a segment

The fetcher runs in the job's scope. The parsers and the writer run behind a shield, so that what has come in is
processed and written when the job is stopped, for a bounded time.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Literal

import attrs
import trio

from dataloader.flows.etl.fetch.fetcher import Fetcher
from dataloader.flows.etl.fetch.request_sender import RequestSender
from dataloader.flows.etl.parse.parsers import Parsers
from dataloader.flows.etl.plan.segment import Segment
from dataloader.flows.etl.run.cancellation_token import CancellationToken
from dataloader.flows.etl.run.pipeline_state import PipelineState
from dataloader.flows.etl.write.writer import Writer
from dataloader.store.connection.bridge import Database
from dataloader.store.queue.transaction import Transactions

PipelineEnd = Literal["through", "failed", "canceled"]


@attrs.define(eq=False, kw_only=True)
class Pipeline:
    """One run of a load.

    `drain_s` tells, when the job was stopped, for how many seconds what has come in may still be written; `is_lost`,
    that nothing may.
    """

    shared: PipelineState
    sender: RequestSender
    database: Database
    transactions: Transactions
    cancel: CancellationToken
    drain_s: Callable[[], float]
    is_lost: Callable[[], bool]
    in_processes: bool
    _end: PipelineEnd = attrs.field(init=False, default="through")
    _all: trio.CancelScope = attrs.field(init=False, factory=trio.CancelScope)
    _behind: trio.CancelScope = attrs.field(init=False, factory=lambda: trio.CancelScope(shield=True))
    _is_written: trio.Event = attrs.field(init=False, factory=trio.Event)

    async def run(self, segments: AsyncGenerator[Segment, None]) -> PipelineEnd:
        """Go through all of it.

        `failed` when too many things in a row have failed, `canceled` when the token was cancelled.

        When the job is stopped, what has come in is written before `Cancelled` goes on its way.
        """
        shared = self.shared
        shared.progress.too_many = self._give_up
        parsers = Parsers(shared, self.database, self.in_processes)
        writer = Writer(shared, self.transactions)
        try:
            with self._all:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._process_and_write, parsers, writer)
                    try:
                        async with shared.to_workers:
                            with self.cancel.scope() as scope:
                                await Fetcher(shared, self.sender).run(segments)
                            if scope.cancelled_caught:
                                self._stop_soon(shared.config.drain_timeout)
                        await self._is_written.wait()
                    except trio.Cancelled:
                        self._stop_soon(self.drain_s())
                        raise
        finally:
            # Now that nobody is left who counts any, whatever has ended them.
            if not self.is_lost():
                await writer.save_failures()  # noqa: ASYNC102 - shields itself, with a deadline
        return self._end

    async def _process_and_write(self, parsers: Parsers, writer: Writer) -> None:
        with self._behind:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(writer.run)
                async with self.shared.to_writer:
                    await parsers.run()
        self._is_written.set()

    def _stop_soon(self, seconds: float) -> None:
        if self._end == "through":
            self._end = "canceled"
        self._behind.deadline = min(self._behind.deadline, trio.current_time() + seconds)

    def _give_up(self) -> None:
        failures = self.shared.config.max_failures + 1
        self.shared.log.warning("too many failures in a row: the run ends", phase="requests", failures=failures)
        self._end = "failed"
        self._all.cancel()
        self._behind.cancel()

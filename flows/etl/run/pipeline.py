"""Pipeline of a load: one fetcher, several parsers, one writer.

    segments → fetcher ─(responses)→ parsers ─(rows)→ writer → staging table → one transaction a segment

The fetcher runs in the job's scope. The parsers and the writer are shielded from its cancellation, so that responses
that have arrived are processed and written after a stop, for a bounded time.
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
from dataloader.jobs.calls import Calls
from dataloader.store.connection.bridge import Database
from dataloader.store.queue.transaction import Transactions

PipelineEnd = Literal["through", "failed", "canceled"]


@attrs.define(eq=False, kw_only=True)
class Pipeline:
    """One run of a load.

    After a stop of the job, `drain_s` returns the seconds in which arrived responses may still be written, and
    `is_lost` returns whether nothing may be written. With `calls`, its ETL workers are processes.
    """

    shared: PipelineState
    sender: RequestSender
    database: Database
    transactions: Transactions
    cancel: CancellationToken
    drain_s: Callable[[], float]
    is_lost: Callable[[], bool]
    calls: Calls | None
    _end: PipelineEnd = attrs.field(init=False, default="through")
    _all: trio.CancelScope = attrs.field(init=False, factory=trio.CancelScope)
    _behind: trio.CancelScope = attrs.field(init=False, factory=lambda: trio.CancelScope(shield=True))
    _is_written: trio.Event = attrs.field(init=False, factory=trio.Event)

    async def run(self, segments: AsyncGenerator[Segment, None]) -> PipelineEnd:
        """Load the segments; return `failed` after too many consecutive failures, `canceled` if the token is canceled.

        When the job is stopped, the arrived responses are written before `Cancelled` is raised.
        """
        shared = self.shared
        shared.progress.too_many = self._give_up
        parsers = Parsers(shared, self.database, self.calls)
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
            # The parsers and the writer have ended, so there are no more failures.
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
        self.shared.log.warning(
            "ending the run after too many consecutive failures", phase="requests", failures=failures
        )
        self._end = "failed"
        self._all.cancel()
        self._behind.cancel()

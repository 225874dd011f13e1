"""Pipeline of a load: a source is read, and its rows are written.

    segments → fetcher ─(responses)→ parsers ─(rows)→ writer → staging table → one transaction a segment
    function ─(pieces of rows, segments)────────────↗

The source is read in the job's scope. Processing and the writer are shielded from its cancellation, so that data that
has arrived is processed and written after a stop, for a bounded time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import attrs
import trio

from dataloader.flows.etl.run.cancellation_token import CancellationToken
from dataloader.flows.etl.run.pipeline_state import PipelineState
from dataloader.flows.etl.write.writer import Writer
from dataloader.store.queue.transaction import Transactions

PipelineEnd = Literal["through", "failed", "canceled"]


class SourceReading(Protocol):
    """Source of a run, while it is read: it begins the parts of segments, and sends their rows to the writer."""

    async def read(self) -> None:
        """Read the source to its end."""

    async def process(self) -> None:
        """Process what is read until `read` has ended. This is not canceled when the job is stopped."""


@attrs.define(eq=False, kw_only=True)
class Pipeline:
    """One run of a load.

    After a stop of the job, `drain_s` returns the seconds in which data that has arrived may still be written, and
    `is_lost` returns whether nothing may be written.
    """

    shared: PipelineState
    transactions: Transactions
    cancel: CancellationToken
    drain_s: Callable[[], float]
    is_lost: Callable[[], bool]
    _end: PipelineEnd = attrs.field(init=False, default="through")
    _all: trio.CancelScope = attrs.field(init=False, factory=trio.CancelScope)
    _behind: trio.CancelScope = attrs.field(init=False, factory=lambda: trio.CancelScope(shield=True))
    _is_written: trio.Event = attrs.field(init=False, factory=trio.Event)

    async def run(self, reading: SourceReading) -> PipelineEnd:
        """Load the source; return `failed` after too many consecutive failures, `canceled` if the token is canceled.

        When the job is stopped, the data that has arrived is written before `Cancelled` is raised.
        """
        shared = self.shared
        shared.progress.too_many = self._give_up
        writer = Writer(shared, self.transactions)
        try:
            with self._all:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._process_and_write, reading, writer)
                    try:
                        async with shared.to_workers:
                            with self.cancel.scope() as scope:
                                await reading.read()
                            if scope.cancelled_caught:
                                self._stop_soon(shared.config.drain_timeout)
                        await self._is_written.wait()
                    except trio.Cancelled:
                        self._stop_soon(self.drain_s())
                        raise
        finally:
            # Processing and the writer have ended, so there are no more failures.
            if not self.is_lost():
                await writer.save_failures()  # noqa: ASYNC102 - shields itself, with a deadline
        return self._end

    async def _process_and_write(self, reading: SourceReading, writer: Writer) -> None:
        with self._behind:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(writer.run)
                async with self.shared.to_writer:
                    await reading.process()
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

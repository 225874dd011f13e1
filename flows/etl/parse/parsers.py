"""Parses responses and makes rows of their records, concurrently and outside the event loop.

Each ETL worker has a `Maker` for this: threads.py for threads, processes.py for a separate process.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime

import attrs
import trio

from dataloader.flows.etl.parse.maker import Maker
from dataloader.flows.etl.parse.processes import open_in_process
from dataloader.flows.etl.parse.threads import open_in_threads
from dataloader.flows.etl.parse.transform import metadata_of
from dataloader.flows.etl.run.pipeline_state import Fetched, PipelineState, UnreadAnswer
from dataloader.flows.etl.sources.source import SourceError
from dataloader.jobs.calls import Calls
from dataloader.jobs.error_groups import first_error
from dataloader.jobs.errors import BodyFailed
from dataloader.store.connection.bridge import Database


@attrs.define(eq=False)
class Parsers:
    """ETL workers of a run: `config.workers` of them, in threads, or in processes if there are `calls`."""

    shared: PipelineState
    database: Database
    calls: Calls | None
    limiter: trio.CapacityLimiter = attrs.field(init=False)

    @limiter.default
    def _one_thread_each(self) -> trio.CapacityLimiter:
        return trio.CapacityLimiter(self.shared.config.workers)

    async def run(self) -> None:
        """Work until no more responses arrive."""
        try:
            async with trio.open_nursery() as nursery:
                for _ in range(self.shared.config.workers):
                    nursery.start_soon(self._work)
        except* BodyFailed as failed:
            # Several processes may fail at the same time, for the same reason.
            raise first_error(failed) from None

    async def _work(self) -> None:
        progress = self.shared.progress
        async with self._open_maker() as maker:
            async for fetched in self.shared.fetched:
                self.shared.backpressure.give_place()
                progress.queued -= 1
                progress.active += 1
                began = trio.current_time()
                try:
                    await self._process(fetched, maker)
                finally:
                    progress.active -= 1
                    progress.phases["processing"].add(trio.current_time() - began)

    def _open_maker(self) -> AbstractAsyncContextManager[Maker]:
        if self.calls is None:
            return open_in_threads(self.database, self.limiter)
        return open_in_process(self.calls, self.shared.log)

    async def _process(self, fetched: Fetched, maker: Maker) -> None:
        part = fetched.part
        metadata = metadata_of(
            endpoint=fetched.request.endpoint,
            url=fetched.response.url,
            is_file=part.table.source.walks_are_segments,
            fetched_at=datetime.now(UTC),
        )
        try:
            fetched.page = await maker.read(fetched, metadata)
        except SourceError as error:
            fetched.error = error
        fetched.is_read.set()
        if fetched.page is not None:
            try:
                made = await maker.make(fetched, fetched.page, metadata)
            except SourceError as error:
                fetched.error = error
            else:
                part.ids += ((made_id, fetched.request.segment) for made_id in made.ids)
                await self.shared.hand_on(part, fetched.request, fetched.number, fetched.page, made)
        self.shared.backpressure.hold(-len(fetched.response.body))
        if fetched.error is None:
            await self.shared.answer_done(part)
        else:
            await self._give_up(fetched, fetched.error)

    async def _give_up(self, fetched: Fetched, error: SourceError) -> None:
        """Pass an unreadable response to the fetcher if its request is to be repeated. Otherwise record its failure."""
        part, request = fetched.part, fetched.request
        is_again = self.shared.is_to_be_tried_again(error, fetched.tries)
        if is_again:
            told = {"error": str(error), "tries": fetched.tries}
            self.shared.log.warning("repeating a request whose answer cannot be read", phase="processing", **told)
        if part.table.source.needs_answer and fetched.page is None:
            # The fetcher waits for the response, and retries or reports it.
            await self.shared.drop_answer(part, request)
        elif is_again:
            self.shared.retry_queue.add(UnreadAnswer(part, request, fetched.tries))
        else:
            self.shared.request_failed(part, request, error)
            await self.shared.drop_answer(part, request)

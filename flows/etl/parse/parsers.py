"""Parses responses and makes rows of their records, concurrently and outside the event loop.

Each ETL worker has a `Maker` for this: threads.py for threads, processes.py for a separate process.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime
from typing import Final

import attrs
import trio

from dataloader.flows.etl.parse.maker import Maker
from dataloader.flows.etl.parse.processes import open_in_process
from dataloader.flows.etl.parse.threads import open_in_threads
from dataloader.flows.etl.parse.transform import Processed, metadata_of
from dataloader.flows.etl.run.pipeline_state import Fetched, PipelineState, Rows, UnreadAnswer
from dataloader.flows.etl.sources.source import Page, SourceError
from dataloader.jobs.calls import Calls
from dataloader.jobs.error_groups import first_error
from dataloader.jobs.errors import BodyFailed
from dataloader.store.connection.bridge import Database

MOST_TOLD: Final = 50
"""Maximum names of fields in one log line."""


@attrs.define(eq=False)
class Parsers:
    """ETL workers of a run: `config.workers` of them, in threads, or in processes if there are `calls`."""

    shared: PipelineState
    database: Database
    calls: Calls | None
    _dropped: dict[str, set[str]] = attrs.field(init=False, factory=dict)
    _is_writer_behind: bool = attrs.field(init=False, default=False)
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
                await self._hand_on(fetched, fetched.page, made)
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

    async def _hand_on(self, fetched: Fetched, page: Page, made: Processed) -> None:
        part, progress = fetched.part, self.shared.progress
        counts = {
            "details": int(part.table.detail is not None),
            "records": made.records + len(page.broken),
            "left_out": made.left_out,
            "details_skipped": made.without_id,
            "rows": made.rows,
        }
        progress.count(**counts)
        segment = fetched.request.segment
        progress.processed(page, made, segment or part.segment.name, [part.kept(fetched.request)])
        part.lacks_records |= bool(page.broken or made.refused)
        part.shapes |= made.shapes
        self._tell_of_dropped(part.table.name, made.dropped)
        part.ids += ((made_id, segment) for made_id in made.ids)
        progress.unwritten += made.rows
        self.shared.backpressure.hold(sum(len(lines.text) for lines in made.lines))
        self._look_at_the_writer()
        rows = Rows(part, fetched.request, fetched.number, made.rows, made.lines, counts)
        await self.shared.to_writer.send(rows)

    def _look_at_the_writer(self) -> None:
        """Log when the writer lags behind and when it has caught up. The limits differ, to avoid constant logging."""
        waiting, queue_size = self.shared.to_writer.statistics().current_buffer_used, self.shared.config.queue_size
        told = {"responses": waiting, "rows": self.shared.progress.unwritten}
        if not self._is_writer_behind and waiting > 2 * queue_size:
            self._is_writer_behind = True
            self.shared.log.warning("the writer is slower than the parsers", phase="processing", **told)
        elif self._is_writer_behind and waiting <= queue_size:
            self._is_writer_behind = False
            self.shared.log.info("the writer has caught up", phase="processing", **told)

    def _tell_of_dropped(self, table: str, names: frozenset[str]) -> None:
        """Log each dropped field once: it is left out on purpose, or its name is misspelled."""
        known = self._dropped.setdefault(table, set())
        if not names <= known:
            told = sorted(map(str, names - known))
            known |= names
            self.shared.log.info(
                "ignoring fields: the table has no columns with these names, and no payload",
                phase="processing",
                table=table,
                fields=told[:MOST_TOLD],
            )

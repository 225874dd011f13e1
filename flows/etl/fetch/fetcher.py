"""Sends the requests of the segments, one after the other, and passes the responses on.

It runs in the job's scope, so a stop of the job stops it immediately, even in a pause or while a response arrives. It
reserves a place in the processing queue before it sends a request, so a full queue delays the next request and never a
response. It passes a response on before its source's pause begins.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing
from functools import partial
from typing import Final

import attrs

from dataloader.flows.etl.declare.load import Detail
from dataloader.flows.etl.fetch.rate_limiter import SlotForRequest
from dataloader.flows.etl.fetch.request_sender import RequestSender
from dataloader.flows.etl.plan.segment import Part, Segment
from dataloader.flows.etl.run.pipeline_state import Fetched, PipelineState
from dataloader.flows.etl.sources.source import Request, Response, SourceConnection, SourceError
from dataloader.jobs.text import said_by

MAX_REDIRECTS: Final = 5
"""Maximum redirects of one request. Each is sent in a separate request slot."""


@attrs.define(eq=False)
class Fetcher:
    """Sends the requests of the segments, in order."""

    shared: PipelineState
    sender: RequestSender
    _connections: dict[int, SourceConnection] = attrs.field(init=False, factory=dict)
    _was_full: bool = attrs.field(init=False, default=False)

    async def run(self, segments: AsyncGenerator[Segment, None]) -> None:
        """Send all requests. When this returns, the last rows may not have reached the writer."""
        async with aclosing(segments), AsyncExitStack() as stack:
            async for segment in segments:
                self.shared.progress.segment = segment.name
                self.shared.progress.segments_planned = segment.planned
                for table in segment.tables:
                    if id(table.source) not in self._connections:
                        self._connections[id(table.source)] = await stack.enter_async_context(table.source.open())
                await self._ask_segment(segment)
            await self._until(lambda: not any(part.open for part in self.shared.parts))

    async def _ask_segment(self, segment: Segment) -> None:
        ids: list[tuple[str | int, str]] = []
        for table in segment.tables:
            part = Part(segment=segment, table=table, ends_segment=table is segment.tables[-1])
            self.shared.parts.append(part)
            if table.detail is None:
                async with aclosing(segment.requests()) as requests:
                    async for first in requests:
                        await self._walk(part, first)
            else:
                for request in (*segment.details, *self._requests_of(part, table.detail, ids)):
                    await self._walk(part, request)
                    await self.shared.detail_asked(part, request)
            part.is_asked = True
            await self.shared.close_if_done(part)
            if not part.ends_segment:
                await self._until(part.committed.is_set)
                ids = part.ids

    def _requests_of(self, part: Part, detail: Detail, ids: Sequence[tuple[str | int, str]]) -> Iterator[Request]:
        """Yield the requests for details, one for each ID that is not complete.

        IDs with the same text (1 and "1") are equal. An ID whose request cannot be made is recorded as a failure.
        """
        known = set(part.segment.done)
        for given, segment in ids:
            if str(given) in known:
                continue
            known.add(str(given))
            try:
                request = detail.of(given)
            except Exception as error:  # noqa: BLE001 - any error of a load's own function
                told = f"its request cannot be created: {said_by(error)}"
                self.shared.progress.failed(self.shared.failure(part, "detail", str(given), told, segment=segment))
            else:
                yield attrs.evolve(request, segment=segment) if segment else request

    async def _until(self, is_so: Callable[[], bool]) -> None:
        """Wait until `is_so()`. Meanwhile, repeat the requests whose responses cannot be read."""
        await self._ask_again()
        while not is_so():
            await self.shared.retry_queue.stirred()
            await self._ask_again()

    async def _ask_again(self) -> None:
        """Repeat requests whose responses turned out to be unreadable after the fetcher had continued."""
        while self.shared.retry_queue.unread:
            unread = self.shared.retry_queue.unread.popleft()
            try:
                await self.sender.tried(partial(self._once, unread.part, unread.request), after=unread.tries)
            except SourceError as error:
                self.shared.request_failed(unread.part, unread.request, error)
            await self.shared.drop_answer(unread.part, unread.request)

    async def _walk(self, part: Part, first: Request) -> None:
        # If the next page was known when this request failed, the failed run continued with that page, so a retry sends
        # only this request. Otherwise the walk ended here, and the retry continues it.
        is_alone = part.segment.is_retry and part.table.source.after_failure(first) is not None
        request: Request | None = first
        while request is not None:
            await self._ask_again()
            following = await self._ask(part, request)
            request = None if is_alone else following

    async def _ask(self, part: Part, request: Request) -> Request | None:
        """Send a request, retry it if that may help, and pass the response on. Return the walk's next request."""
        try:
            fetched = await self.sender.tried(partial(self._once, part, request))
        except SourceError as error:
            self.shared.request_failed(part, request, error)
            return None if error.ends_walk else part.table.source.after_failure(request)
        return fetched.page.following if fetched.page is not None else None

    async def _once(self, part: Part, request: Request, tries: int) -> Fetched:
        """Make the `tries`th try and pass the response on. Wait until it is read if the source requires that."""
        fetched = await self._try(part, request, tries)
        if part.table.source.needs_answer:
            await fetched.is_read.wait()
            # If there is a page, the error concerns one of its records, and the ETL worker reports it.
            if fetched.page is None and fetched.error is not None:
                raise fetched.error
        return fetched

    async def _try(self, part: Part, request: Request, tries: int) -> Fetched:
        """Wait for a place in the queue, make the `tries`th try, and follow redirects."""
        await self._take_place()
        is_handed_on = False
        asked = request
        try:
            for _ in range(MAX_REDIRECTS + 1):
                async with self.sender.rate_limiter.slot(part.table.source.name, tries) as slot:
                    response = await self._fetch(slot, part, asked)
                    hop = part.table.source.redirected(response)
                    if hop is None:
                        part.answers += 1
                        fetched = Fetched(part, request, attrs.evolve(response, request=request), part.answers, tries)
                        part.open += 1
                        part.completed.answered(request.key)
                        self.shared.backpressure.hold(len(response.body))
                        self.shared.to_workers.send_nowait(fetched)
                        is_handed_on = True
                        self.shared.progress.queued += 1
                    self.sender.answered(asked.endpoint, response.status, response.took_s, segment=part.segment.name)
                    if hop is None:
                        return fetched
                    asked = hop
            raise SourceError(f"{request.endpoint}: more than {MAX_REDIRECTS} redirects", is_retryable=False)
        finally:
            if not is_handed_on:
                self.shared.backpressure.give_place()

    async def _fetch(self, slot: SlotForRequest, part: Part, request: Request) -> Response:
        """Send one request in its slot; return the response."""
        source = part.table.source
        connection = self._connections[id(source)]

        async def ask(timeout_s: float) -> Response:
            part.sent += 1
            return await connection.fetch(request, timeout_s=timeout_s)

        response = await self.sender.send(slot, request.endpoint, ask, segment=part.segment.name)
        slot.hint_s = source.hint_s(response)
        return response

    async def _take_place(self) -> None:
        room = self.shared.backpressure
        if room.is_full:
            if not self._was_full:
                self.shared.log.warning(
                    "the processing queue is full: the next request waits",
                    phase="requests",
                    queue_size=self.shared.config.queue_size,
                    held_bytes=room.bytes,
                )
            self.shared.progress.waiting = {"for": "a place in the processing queue"}
        # Logged once, until a request does not have to wait.
        self._was_full = room.is_full
        try:
            await room.take_place()
        finally:
            self.shared.progress.waiting = None

"""Messages between the fetcher, the parsers and the writer, and their shared state in one run."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias
from uuid import UUID

import attrs
import trio

from dataloader.flows.etl.declare.pipeline_config import PipelineConfig
from dataloader.flows.etl.declare.pipeline_limits import LIMITS, PipelineLimits
from dataloader.flows.etl.parse.transform import MAX_KEY, Processed, masked_beginning
from dataloader.flows.etl.plan.segment import Part
from dataloader.flows.etl.run.load_log import LoadLog
from dataloader.flows.etl.run.load_progress import LoadProgress
from dataloader.flows.etl.sources.source import Page, Request, Response, SourceError
from dataloader.store.etl.failure_rows import Failure
from dataloader.store.etl.staging import StagedLines

WRITER_QUEUE: Final = 4
"""Maximum processed responses that wait for the writer, as a multiple of `queue_size`. Above 2 the log warns."""
MOST_TOLD: Final = 50
"""Maximum names of fields in one log line."""


@attrs.define(eq=False)
class Fetched:
    """Response for an ETL worker: the part's `number`th, to the request's `tries`th try.

    When `is_read` is set, it has a `page` or an `error`.
    """

    part: Part
    request: Request
    response: Response
    number: int
    tries: int = 1
    page: Page | None = None
    error: SourceError | None = None
    is_read: trio.Event = attrs.field(factory=trio.Event)


@attrs.frozen(eq=False)
class RowBatch:
    """Rows of the part's `answer`th response or piece, possibly none, for the writer.

    `counts` are the counts of the response, which are recorded with its rows. `request` is None if a function has
    yielded the rows.
    """

    part: Part
    request: Request | None
    answer: int
    number: int
    lines: list[StagedLines] = attrs.field(repr=False)
    counts: Mapping[str, int]


@attrs.frozen(eq=False)
class DetailComplete:
    """Notice to the writer that details of the part are complete, although none of their rows will follow."""

    part: Part


@attrs.frozen(eq=False)
class DroppedPart:
    """Request to the writer to drop a part that cannot be completed, with its staged rows."""

    part: Part


ToWriter: TypeAlias = RowBatch | Part | DetailComplete | DroppedPart


@attrs.frozen(eq=False)
class UnreadAnswer:
    """Request whose response to the `tries`th try cannot be read, and which is to be sent again."""

    part: Part
    request: Request
    tries: int


@attrs.define(eq=False)
class RetryQueue:
    """Requests that the fetcher has to send again. Until then their responses count as open in their parts."""

    unread: deque[UnreadAnswer] = attrs.field(factory=deque)
    _stirred: trio.Event = attrs.field(init=False, factory=trio.Event)

    def add(self, unread: UnreadAnswer) -> None:
        """Add a request to send again."""
        self.unread.append(unread)
        self.stir()

    def stir(self) -> None:
        """Wake the tasks in `stirred`: a response was read, or a part was committed."""
        self._stirred.set()

    async def stirred(self) -> None:
        """Wait for the next `add` or `stir`."""
        self._stirred = trio.Event()
        await self._stirred.wait()


@attrs.define(eq=False)
class Backpressure:
    """Limits a run's memory: responses in the `places` of the processing queue, and bytes that are not yet written.

    Only the fetcher takes a place, before it sends a request, so the last response may exceed the limit of bytes by its
    length.
    """

    places: int
    most_bytes: int = LIMITS.most_bytes
    bytes: int = 0
    _freed: trio.Event = attrs.field(init=False, factory=trio.Event)

    @property
    def is_heavy(self) -> bool:
        """Return whether it holds too many bytes."""
        return self.bytes >= self.most_bytes

    @property
    def is_full(self) -> bool:
        """Return whether no request may be sent now."""
        return self.places == 0 or self.is_heavy

    async def take_place(self) -> None:
        """Wait for a place and take it."""
        while self.is_full:
            self._freed = trio.Event()
            await self._freed.wait()
        self.places -= 1

    def give_place(self) -> None:
        """Return a place: its response has left the queue, or did not arrive."""
        self.places += 1
        self._freed.set()

    async def room(self) -> None:
        """Wait until there are not too many bytes."""
        while self.is_heavy:
            self._freed = trio.Event()
            await self._freed.wait()

    def hold(self, number: int) -> None:
        """Add `number`, which may be negative, to the bytes in memory."""
        self.bytes += number
        if number < 0:
            self._freed.set()


@attrs.define(eq=False, kw_only=True)
class PipelineState:
    """Shared state of the parts of a pipeline in one run.

    Attributes:
        run_id: ID of the run's job.
        token: fencing token of the job for the run's writes.
        lease_s: seconds of the job's lease.
        last_failure: number of the last failure that earlier attempts of the job have recorded; 0 for none.
        load: name of the load.
        limits: fixed limits of rows, bytes and times.
        parts: parts that are not committed yet, in order. The fetcher begins them, the writer ends them.
        backpressure: limit of the responses that the fetcher may have in memory.
        retry_queue: requests that the fetcher has to send again.
        to_workers: channel to which the fetcher sends responses.
        fetched: channel from which the parsers receive them.
        to_writer: channel to which the parsers send rows, and then the part itself when all of its rows are sent. The
            fetcher sends details that its last step completes.
        processed: channel from which the writer receives all three.
    """

    run_id: UUID
    token: int
    lease_s: float
    last_failure: int
    load: str
    config: PipelineConfig
    progress: LoadProgress
    log: LoadLog
    limits: PipelineLimits = LIMITS
    parts: deque[Part] = attrs.field(init=False, factory=deque)
    backpressure: Backpressure = attrs.field(init=False)
    retry_queue: RetryQueue = attrs.field(init=False, factory=RetryQueue)
    to_workers: trio.MemorySendChannel[Fetched] = attrs.field(init=False)
    fetched: trio.MemoryReceiveChannel[Fetched] = attrs.field(init=False)
    to_writer: trio.MemorySendChannel[ToWriter] = attrs.field(init=False)
    processed: trio.MemoryReceiveChannel[ToWriter] = attrs.field(init=False)
    _dropped: dict[str, set[str]] = attrs.field(init=False, factory=dict)
    _is_writer_behind: bool = attrs.field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        # `backpressure` limits the responses for the workers.
        self.backpressure = Backpressure(self.config.queue_size, self.limits.most_bytes)
        self.to_workers, self.fetched = trio.open_memory_channel[Fetched](math.inf)
        self.to_writer, self.processed = trio.open_memory_channel[ToWriter](WRITER_QUEUE * self.config.queue_size)

    def failure(
        self,
        part: Part,
        phase: str,
        key: str,
        error: str,
        *,
        sample: str | None = None,
        requests: Sequence[Request] = (),
        times: int = 1,
        segment: str = "",
    ) -> Failure:
        """Return a failure in a part of the run, to report. A retried request keeps its first failure's segment."""
        return Failure(
            load=self.load,
            segment=segment or (requests[0].segment if requests else "") or part.segment.name,
            phase=phase,
            key=masked_beginning(key, MAX_KEY),
            error=masked_beginning(error),
            sample=sample,
            requests=[part.kept(request) for request in requests],
            times=times,
        )

    def is_to_be_tried_again(self, error: SourceError, tries: int) -> bool:
        """Return whether to repeat a request whose `tries`th try has failed with `error`."""
        return error.is_retryable and tries < self.config.attempts

    def request_failed(self, part: Part, request: Request, error: SourceError) -> None:
        """Note that a request failed for good. A list without one of its pages is not whole; without a detail it is."""
        phase = "request" if part.table.detail is None else "detail"
        part.is_whole &= phase == "detail"
        part.completed.failed(request.key)
        key = request.key or request.endpoint
        # If the walk ended here, a retry of this page alone would not load the later pages.
        requests = [] if error.ends_walk and not part.segment.is_retry else [request]
        self.progress.failed(self.failure(part, phase, key, str(error), requests=requests))

    async def hand_on(self, part: Part, request: Request | None, answer: int, page: Page, made: Processed) -> None:
        """Send the rows of a response or piece to the writer, and note its counts and its failed records."""
        counts = {
            "details": int(part.table.detail is not None),
            "records": made.records + len(page.broken),
            "left_out": made.left_out,
            "details_skipped": made.without_id,
            "rows": made.rows,
        }
        self.progress.count(**counts)
        if request is not None:
            segment = request.segment or part.segment.name
            self.progress.processed(page, made, segment, [part.kept(request)])
        part.lacks_records |= bool(page.broken or made.refused)
        part.shapes |= made.shapes
        self._tell_of_dropped(part.table.name, made.dropped)
        self.progress.unwritten += made.rows
        self.backpressure.hold(sum(len(lines.text) for lines in made.lines))
        self._look_at_the_writer()
        await self.to_writer.send(RowBatch(part, request, answer, made.rows, made.lines, counts))

    def _look_at_the_writer(self) -> None:
        """Log when the writer lags behind and when it has caught up. The limits differ, to avoid constant logging."""
        waiting, queue_size = self.to_writer.statistics().current_buffer_used, self.config.queue_size
        told = {"responses": waiting, "rows": self.progress.unwritten}
        if not self._is_writer_behind and waiting > 2 * queue_size:
            self._is_writer_behind = True
            self.log.warning("the writer is slower than the parsers", phase="processing", **told)
        elif self._is_writer_behind and waiting <= queue_size:
            self._is_writer_behind = False
            self.log.info("the writer has caught up", phase="processing", **told)

    def _tell_of_dropped(self, table: str, names: frozenset[str]) -> None:
        """Log each dropped field once: it is left out on purpose, or its name is misspelled."""
        known = self._dropped.setdefault(table, set())
        if not names <= known:
            told = sorted(map(str, names - known))
            known |= names
            self.log.info(
                "ignoring fields: the table has no columns with these names, and no payload",
                phase="processing",
                table=table,
                fields=told[:MOST_TOLD],
            )

    async def detail_asked(self, part: Part, request: Request) -> None:
        """Note that no more requests will be sent for a detail.

        Its rows may already be staged, because the fetcher returns its slot after it has passed the response on.
        """
        await self._tell_writer(part, is_complete=part.completed.asked(request.key))

    async def answer_done(self, part: Part) -> None:
        """Note that a response is processed: its rows are sent to the writer, or it is dropped."""
        part.open -= 1
        await self.close_if_done(part)
        self.retry_queue.stir()

    async def drop_answer(self, part: Part, request: Request) -> None:
        """Note that a response cannot be read. Its request was sent again or has failed."""
        await self._tell_writer(part, is_complete=part.completed.dropped(request.key))
        await self.answer_done(part)

    async def _tell_writer(self, part: Part, *, is_complete: bool) -> None:
        """Notify the writer of a complete detail whose rows are already staged."""
        if is_complete:
            await self.to_writer.send(DetailComplete(part))

    async def close_if_done(self, part: Part) -> None:
        """Send the part to the writer, after its rows, if all of its requests and responses are done."""
        if part.is_asked and part.open == 0 and not part.is_closed:
            part.is_closed = True
            await self.to_writer.send(part)

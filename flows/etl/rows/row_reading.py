"""Reading of a function that yields rows: it is called, its rows go to the writer in pieces, segments are cut.

    function ─► encode in its thread ─(pieces)─► writer ─► staging ─► one transaction a segment

A generator has a dedicated thread for its whole life, because database connections and sessions may need one. When the
job is stopped, the thread is abandoned: the generator is closed there when its current call returns.

If the function raises an error, the segments that have ended are committed, the open one is dropped, and the function
is called again with the last committed state.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import re
from collections import Counter
from collections.abc import AsyncIterable, Awaitable, Callable, Generator, Iterable, Mapping
from contextlib import aclosing, nullcontext, suppress
from functools import partial
from typing import Any, Final, TypeVar

import attrs
import trio

from dataloader.flows.etl.declare.rows import Rows, RowsRun, Yielded
from dataloader.flows.etl.fetch.rate_limiter import RateLimiter
from dataloader.flows.etl.parse.database_reader import Reader, open_reader
from dataloader.flows.etl.parse.transform import Processed, masked_beginning
from dataloader.flows.etl.plan.segment import OpenTable, Part, Segment
from dataloader.flows.etl.rows.request_slots import RunOver, SlotOfFunction
from dataloader.flows.etl.rows.row_taker import NOTHING, Cut, RowTaker
from dataloader.flows.etl.run.pipeline_state import DroppedPart, PipelineState
from dataloader.flows.etl.sources.source import Page, Window
from dataloader.jobs.asyncio_calls import AsyncioCalls, CallTrio
from dataloader.jobs.error_groups import is_outage
from dataloader.jobs.errors import BadRequest
from dataloader.jobs.text import said_by
from dataloader.store.connection.bridge import Database
from dataloader.store.etl.failure_rows import Failure
from dataloader.store.etl.load_state import CHECKPOINT, aio_load_state, checkpoint_state

T = TypeVar("T")

_NAME: Final = re.compile(r"rows (\d{6,})")
_NO_PAGE: Final = Page(records=())
LAST: Final = "last_segments"
"""Count of the segment that ends with the function's last row."""


class FunctionFailed(Exception):  # noqa: N818 - says what has failed
    """The function has raised `error`."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def has_last_segment(done: Mapping[str, Mapping[str, Any]]) -> bool:
    """Return whether a run has committed the rest of its rows, by the counts of its committed segments."""
    return any(LAST in counts for counts in done.values())


def next_number(done: Iterable[str]) -> int:
    """Return the number of a run's next segment after the committed ones with these names."""
    return 1 + max((int(match[1]) for name in done if (match := _NAME.fullmatch(name))), default=0)


@attrs.define(eq=False)
class _OpenSegment:
    """Segment whose rows arrive: its part, the number of pieces, and what to count or report when it ends."""

    part: Part
    pieces: int = 0
    counts: Counter[str] = attrs.field(factory=Counter)
    made: list[Processed] = attrs.field(factory=list)


@attrs.define(eq=False)
class _Call:
    """One call of the function. `is_over` tells its thread that nothing more is taken."""

    taker: RowTaker
    state: Any
    begins_at_start: bool
    is_over: bool = False
    _waits: set[trio.CancelScope] = attrs.field(init=False, factory=set)

    async def within(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Await a function. Raises `RunOver` as soon as the call is over, also in an abandoned thread."""
        if not self.is_over:
            with trio.CancelScope() as scope:
                self._waits.add(scope)
                try:
                    return await function(*args)
                finally:
                    self._waits.discard(scope)
        raise RunOver("the run has ended")

    def end(self) -> None:
        """End the waits of the function. Nothing more is taken, and it gets no more slots."""
        self.is_over = True
        for scope in list(self._waits):
            scope.cancel()


@attrs.define(eq=False, kw_only=True)
class RowReading:
    """Calls the function of a load, and passes its rows on.

    `asyncio_calls` calls a function on asyncio; without it, an async generator runs on Trio. `number` is the number of
    the next segment. `is_one_segment`: all rows of the run are one segment. `is_done`: an earlier attempt of the run
    has committed all rows.
    """

    shared: PipelineState
    source: Rows
    table: OpenTable
    database: Database
    rate_limiter: RateLimiter
    asyncio_calls: AsyncioCalls | None
    number: int
    is_one_segment: bool
    is_done: bool = False
    _open: _OpenSegment | None = attrs.field(init=False, default=None)
    _sent: int = attrs.field(init=False, default=0)
    _has_sent: bool = attrs.field(init=False, default=False)
    _turn: trio.Semaphore = attrs.field(init=False, factory=lambda: trio.Semaphore(1))

    async def read(self) -> None:
        """Call the function until it has yielded all of its rows.

        Raises the function's error if it has failed `attempts` times.
        """
        tries = 0
        while not self.is_done:
            tries += 1
            try:
                async with open_reader(self.database) as reader:
                    await self._read_once(reader)
                self.is_done = True
                self._warn_without_requests()
            except FunctionFailed as failed:
                await self._failed(failed.error, tries)

    async def _failed(self, error: Exception, tries: int) -> None:
        """Wait until the function may be called again. Raises its error after the last try."""
        dropped = await self._drop_open()
        # The next call continues at the state of the last segment, which must be committed first.
        await self._until(lambda: not self.shared.parts)
        if dropped is not None:
            self.shared.progress.take_back_failures(dropped)
        if is_outage(error) or isinstance(error, BadRequest):
            raise error
        told, attempts = masked_beginning(said_by(error)), self.shared.config.attempts
        if tries >= attempts:
            name = f"rows {self.number:06}"
            self.shared.progress.failed(
                Failure(load=self.shared.load, segment=name, phase="request", key=name, error=told, requests=[])
            )
            raise error
        self.shared.log.warning(
            "calling the function again after an error", phase="requests", attempt=f"{tries} of {attempts}", error=told
        )
        first_s, longest_s = self.shared.limits.retry_s
        await trio.sleep(min(first_s * 2.0 ** (tries - 1), longest_s))

    async def process(self) -> None:
        """Wait until `read` has ended: its rows go to the writer directly."""
        async for _ in self.shared.fetched:
            raise AssertionError  # pragma: no cover - there are no responses

    async def _read_once(self, reader: Reader) -> None:
        before = await self.database.run(aio_load_state, self.shared.load)
        if self._no_checkpoints is not None:
            before = None  # of a former declaration: the function must yield all rows
        state = None if before is None else before.of_kind(self.shared.load, CHECKPOINT)["state"]
        has_key = bool(self.table.declared.key)
        taker = RowTaker(
            source=self.source,
            recipe=self.table.recipe,
            piece=self.shared.limits.piece,
            is_cut_anywhere=has_key and state is None and not self.is_one_segment,
            is_cut_at_checkpoints=not self.is_one_segment,
            has_state=state is not None,
            no_checkpoints=self._no_checkpoints,
            reader=reader if self.table.recipe.reads else None,
        )
        call = _Call(taker, state, begins_at_start=before is None)
        try:
            if self.asyncio_calls is not None:
                await self._take_on_asyncio(self.asyncio_calls, call)
            elif self.source.is_async:
                await self._take_async(call)
            else:
                items = await _in_own_thread(self._take_all, call)
                if items is not None:
                    await self._take_items(call, items)
        finally:
            call.end()
        if taker.after_checkpoint and not has_key:
            told = "rows after the last checkpoint are loaded again by the next run, because the table has no key"
            self.shared.progress.remarks[told] += 1
            self.shared.log.warning(told, phase="processing", rows=taker.after_checkpoint)

    @property
    def _no_checkpoints(self) -> str | None:
        """Option of the table because of which each run must load all rows, if any."""
        declared = self.table.declared
        if declared.delete_missing is not None:
            return "delete_missing"
        return "complete history" if declared.history is not None and declared.history.complete else None

    def _items(self, call: _Call, call_trio: CallTrio | None = None) -> Yielded:
        """Call the function. `call_trio` is given if it runs on asyncio.

        Raises `FunctionFailed` for its error, and `BadRequest` if it yields nothing.
        """
        run = RowsRun(
            load=self.shared.load,
            state=call.state,
            new_slot=lambda: SlotOfFunction(
                rate_limiter=self.rate_limiter,
                supplier=self.source.supplier,
                within=call.within,
                turn=self._turn,
                sent=self._note_request,
                call_trio=call_trio,
            ),
        )
        try:
            items: object = self.source.function(run)
        except Exception as error:
            raise FunctionFailed(error) from error
        if isinstance(items, (Iterable, AsyncIterable)):
            return items
        if inspect.iscoroutine(items):
            items.close()
        raise BadRequest(
            "function", f"must yield rows, such as `def rows(run): yield …`, but has returned {type(items).__name__}"
        )

    def _note_request(self) -> None:
        self._has_sent = True
        self._sent += 1
        self.shared.progress.count(requests=1)

    def _warn_without_requests(self) -> None:
        if self.source.supplier is not None and not self._has_sent:
            self.shared.log.warning(
                "the function has sent no request in a block `with run.request()`: the supplier's limits did not apply",
                phase="requests",
                supplier=self.source.supplier,
            )

    def _take_all(self, call: _Call) -> AsyncIterable[Any] | None:
        """Iterate over the function's items, in its thread. Return them instead if they are async."""
        all_items = self._items(call)
        if isinstance(all_items, AsyncIterable):
            return all_items
        items = _items_of(all_items)
        try:
            for item in items:
                self._take(call, call.taker.take(item))
                if call.is_over:
                    return None
        finally:
            # A generator may ignore its end, or fail in its own `finally`.
            with suppress(Exception):
                items.close()
        self._take(call, call.taker.end())
        return None

    def _take(self, call: _Call, taken: Iterable[Processed | Cut]) -> None:
        for message in taken:
            if call.is_over:
                return
            trio.from_thread.run(call.within, self._hand_on, call, message)

    async def _take_on_asyncio(self, calls: AsyncioCalls, call: _Call) -> None:
        try:
            await calls.call(partial(self._take_async, call))
        except asyncio.CancelledError as error:
            # A cancellation of ours would be trio.Cancelled, so the function has raised it.
            message = f"asyncio.CancelledError: {error}"
            raise FunctionFailed(RuntimeError(message)) from error  # noqa: ASYNC104 - asyncio's ends here, not Trio's

    async def _take_async(self, call: _Call, call_trio: CallTrio | None = None) -> None:
        """Call an async generator function, on Trio, or on asyncio with `call_trio`, and iterate over its items."""
        items: Any = self._items(call, call_trio)
        await self._take_items(call, items, call_trio)

    async def _take_items(self, call: _Call, all_items: AsyncIterable[Any], call_trio: CallTrio | None = None) -> None:
        in_trio = call_trio or _directly
        items: Any = aiter(all_items)
        async with aclosing(items) if hasattr(items, "aclose") else nullcontext():
            while not call.is_over:
                try:
                    item = await anext(items)
                except StopAsyncIteration:
                    break
                except Exception as error:
                    raise FunctionFailed(error) from error
                # A list would block the loop, and a transform that reads the database waits for it in a thread.
                if isinstance(item, list) or call.taker.reader is not None:
                    await in_trio(_in_own_thread, self._take, call, call.taker.take(item))
                else:
                    for message in call.taker.take(item):
                        await in_trio(self._hand_on, call, message)
        if not call.is_over:
            for message in call.taker.end():
                await in_trio(self._hand_on, call, message)

    async def _hand_on(self, call: _Call, message: Processed | Cut) -> None:
        if call.is_over:
            return  # the thread was abandoned
        segment = self._open = self._open or self._begin()
        if isinstance(message, Cut):
            await self._end(call, segment, message)
            return
        await self.shared.backpressure.room()
        segment.pieces += 1
        segment.counts.update(records=message.records, left_out=message.left_out, rows=message.rows)
        segment.made.append(attrs.evolve(message, lines=[]))
        await self.shared.hand_on(segment.part, None, segment.pieces, _NO_PAGE, message)

    def _begin(self) -> _OpenSegment:
        segment = Segment(
            name=f"rows {self.number:06}",
            window=Window(),
            tables=[self.table],
            requests=_no_requests,
            number=self.number,
            has_same_data=False,
        )
        self.number += 1
        part = Part(segment=segment, table=self.table, ends_segment=True)
        self.shared.parts.append(part)
        self.shared.progress.segment = segment.name
        return _OpenSegment(part)

    async def _end(self, call: _Call, segment: _OpenSegment, cut: Cut) -> None:
        part = segment.part
        if cut.state is not NOTHING:
            part.segment.state = checkpoint_state(cut.state)
        part.segment.is_last_of_all = cut.is_last and call.begins_at_start
        if cut.is_last:
            part.segment.counts[LAST] = 1
        for made in segment.made:
            self.shared.progress.processed(_NO_PAGE, made, part.segment.name, [])
        self._open = None
        part.sent, self._sent = self._sent, 0
        part.is_asked = True
        await self.shared.close_if_done(part)
        if not self.table.declared.key:
            await part.committed.wait()
            # Rows after a segment that was not committed would be duplicated by the next run.
            call.is_over |= not is_committed(part)

    async def _drop_open(self) -> str | None:
        """Drop the open segment, if any. Return its name."""
        segment, self._open = self._open, None
        if segment is None:
            return None
        self.shared.progress.uncount(segment.counts)
        await self.shared.to_writer.send(DroppedPart(segment.part))
        return segment.part.segment.name

    async def _until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            await self.shared.retry_queue.stirred()


def is_committed(part: Part) -> bool:
    """Return whether the segment of an ended part is in its table."""
    return part.segment.is_whole


def _items_of(all_items: Iterable[Any]) -> Generator[object, None, None]:
    """Yield the items of the function. Raises `FunctionFailed` for any error of it."""
    items = None
    try:
        items = iter(all_items)
        yield from items
    except Exception as error:
        raise FunctionFailed(error) from error
    finally:
        close = getattr(items, "close", None)
        if close is not None:
            close()


async def _in_own_thread(function: Callable[..., T], *args: Any) -> T:
    """Call a function in a dedicated thread. On cancellation the thread is abandoned."""
    return await trio.to_thread.run_sync(
        function, *args, abandon_on_cancel=True, limiter=trio.CapacityLimiter(math.inf)
    )


async def _directly(function: Callable[..., Awaitable[Any]], *args: Any) -> Any:
    """Await a Trio-flavored function on Trio."""
    return await function(*args)


def _no_requests() -> Any:
    raise AssertionError  # pragma: no cover - nothing requests the rows of a function

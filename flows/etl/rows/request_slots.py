"""Request slots for a function that sends its own requests to a supplier: `with run.request()`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Final

import attrs
import trio

from dataloader.flows.etl.fetch.rate_limiter import RateLimiter, SlotForRequest
from dataloader.jobs.asyncio_calls import CallTrio
from dataloader.jobs.errors import BadRequest

_BLOCK: Final[ContextVar[SlotOfFunction | None]] = ContextVar("_BLOCK", default=None)
"""Last block that the current task or thread has entered."""


class RunOver(Exception):  # noqa: N818 - a state, not a defect
    """The run has ended: its function sends no more requests, and no more of its rows are taken."""


@attrs.define(eq=False, kw_only=True)
class SlotOfFunction:
    """Slot for one request: `with` in the function's thread, `async with` on Trio, or on asyncio with `call_trio`.

    `within` awaits a function until the run ends, and raises `RunOver` then. `turn` is the run's, for one request at a
    time. `sent` is called when the slot begins.
    """

    rate_limiter: RateLimiter
    supplier: str | None
    within: Callable[..., Awaitable[Any]]
    turn: trio.Semaphore
    sent: Callable[[], None]
    call_trio: CallTrio | None = None
    _slot: AbstractAsyncContextManager[SlotForRequest] | None = attrs.field(init=False, default=None)

    async def __aenter__(self) -> None:
        self._begin()
        if self.call_trio is None:
            await self.within(self._enter)
            return
        try:
            await self.call_trio(self.within, self._enter)
        except asyncio.CancelledError:
            # The slot may have begun before the cancellation.
            await self.call_trio(self._leave)  # noqa: ASYNC102 - the limiter shields the return of a slot
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await (self._leave() if self.call_trio is None else self.call_trio(self._leave))  # noqa: ASYNC102 - as above

    def _begin(self) -> None:
        block = _BLOCK.get()
        if self.supplier is not None and block is not None and block.is_of_same_run(self):
            raise BadRequest("run.request()", "is not allowed inside another block of it; end that block first")
        _BLOCK.set(self)

    def is_of_same_run(self, other: SlotOfFunction) -> bool:
        """Return whether this slot is held by the run of another one."""
        return self._slot is not None and self.turn is other.turn

    async def _enter(self) -> None:
        if self.supplier is not None:
            await self.turn.acquire()
        slot = self.rate_limiter.slot(self.supplier, 1)
        try:
            await slot.__aenter__()
        except BaseException:
            self._end_turn()
            raise
        self._slot = slot
        self.sent()

    async def _leave(self) -> None:
        slot, self._slot = self._slot, None
        if slot is not None:
            try:
                # The function's error is its own: the slot is returned in the same way after each request.
                await slot.__aexit__(None, None, None)
            finally:
                self._end_turn()

    def _end_turn(self) -> None:
        if self.supplier is not None:
            self.turn.release()

    def __enter__(self) -> None:
        if self.call_trio is not None or trio.lowlevel.in_trio_task():
            raise BadRequest("run.request()", "needs `async with` in an async generator, not `with`")
        self._begin()
        trio.from_thread.run(self.within, self._enter)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        trio.from_thread.run(self._leave)

"""Request slots for a function that sends its own requests to a supplier: `with run.request()`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType

import attrs
import trio

from dataloader.flows.etl.fetch.rate_limiter import RateLimiter, SlotForRequest
from dataloader.jobs.asyncio_calls import CallTrio


@attrs.define(eq=False)
class SlotOfFunction:
    """Slot for one request: `with` in the function's thread, `async with` on Trio, or on asyncio with `call_trio`.

    `sent` is called when it begins.
    """

    rate_limiter: RateLimiter
    supplier: str | None
    sent: Callable[[], None]
    call_trio: CallTrio | None = None
    _slot: AbstractAsyncContextManager[SlotForRequest] | None = attrs.field(init=False, default=None)

    async def __aenter__(self) -> None:
        await (self._enter() if self.call_trio is None else self.call_trio(self._enter))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await (self._leave() if self.call_trio is None else self.call_trio(self._leave))

    async def _enter(self) -> None:
        slot = self.rate_limiter.slot(self.supplier, 1)
        await slot.__aenter__()
        self._slot = slot
        self.sent()

    async def _leave(self) -> None:
        slot, self._slot = self._slot, None
        if slot is not None:
            # The function's error is its own: the slot is returned in the same way after each request.
            await slot.__aexit__(None, None, None)

    def __enter__(self) -> None:
        trio.from_thread.run(self._enter)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        trio.from_thread.run(self._leave)

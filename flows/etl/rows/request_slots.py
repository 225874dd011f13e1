"""Request slots for a function that sends its own requests to a supplier: `with run.request()`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType

import attrs
import trio

from dataloader.flows.etl.fetch.rate_limiter import RateLimiter, SlotForRequest


@attrs.define(eq=False)
class SlotOfFunction:
    """Slot for one request: `with` in the function's thread, `async with` on Trio. `sent` is called when it begins."""

    rate_limiter: RateLimiter
    supplier: str | None
    sent: Callable[[], None]
    _slot: AbstractAsyncContextManager[SlotForRequest] | None = attrs.field(init=False, default=None)

    async def __aenter__(self) -> None:
        slot = self.rate_limiter.slot(self.supplier, 1)
        await slot.__aenter__()
        self._slot = slot
        self.sent()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        slot, self._slot = self._slot, None
        if slot is not None:
            # The function's error is its own: the slot is returned in the same way after each request.
            await slot.__aexit__(None, None, None)

    def __enter__(self) -> None:
        trio.from_thread.run(self.__aenter__)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        trio.from_thread.run(self.__aexit__, kind, error, traceback)

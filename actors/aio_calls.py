"""`AsyncioCalls` of a run: asyncio-flavored functions that a library on top of the queue calls from Trio."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import attrs
import outcome
import trio

from dataloader.actors.aio_loop import AioLoop
from dataloader.actors.aio_operation import AioOperation
from dataloader.jobs.asyncio_calls import CallTrio
from dataloader.jobs.logger import get_logger

log = get_logger(__name__)

T = TypeVar("T")


@attrs.frozen(eq=False)
class RunAioCalls:
    """Calls in the loop of asyncio handlers."""

    _loop: AioLoop

    async def call(self, function: Callable[[CallTrio], Awaitable[T]]) -> T:
        """See `AsyncioCalls.call`."""
        async with trio.open_nursery() as nursery:

            async def call_trio(function: Callable[..., Awaitable[Any]], *args: object) -> Any:
                operation = AioOperation(nursery, function, *args)
                await operation.wait()
                return operation.result()

            # Raised outside of the nursery, which would wrap it into an exception group.
            ended = await outcome.acapture(self._loop.run, function, call_trio, left_behind=_log_left)
        return ended.unwrap()


def _log_left(tasks: int) -> None:
    log.warning("cancelling asyncio tasks that a generator has left running", tasks=tasks)

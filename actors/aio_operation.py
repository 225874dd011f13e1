"""Trio-flavored functions that asyncio tasks wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Generic, ParamSpec, TypeVar

import outcome
import trio

P = ParamSpec("P")
T = TypeVar("T")


class AioOperation(Generic[T]):
    """Trio-flavored function that runs in a separate task while an asyncio task waits for it."""

    def __init__(
        self, nursery: trio.Nursery, function: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Start the function."""
        self._ended: asyncio.Future[outcome.Outcome[T] | None] = asyncio.get_running_loop().create_future()
        self._scope = trio.CancelScope()

        async def run() -> None:
            ended: outcome.Outcome[T] | None = None
            try:
                with self._scope:
                    try:
                        ended = outcome.Value(await function(*args, **kwargs))
                    except Exception as error:  # noqa: BLE001 - the caller gets it
                        ended = outcome.Error(error)
            finally:
                self._ended.set_result(ended)

        nursery.start_soon(run)

    async def wait(self, sooner: asyncio.Future[Any] | None = None) -> None:
        """Return when the function has ended or `sooner` is done. A cancellation cancels it and waits for its end."""
        cancelled: asyncio.CancelledError | None = None
        waited_for = {self._ended} if sooner is None else {self._ended, sooner}
        while not any(future.done() for future in waited_for):
            try:
                await asyncio.wait(waited_for, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError as error:  # noqa: ASYNC103 - raised below, once the operation has ended
                cancelled, waited_for = error, {self._ended}
                self._scope.cancel()
        if cancelled is not None:
            raise cancelled

    def result(self) -> T:
        """Return the result of the ended function. Raises its error, or `CancelledError` if the run was stopped."""
        ended = self._ended.result()
        if ended is None:
            raise asyncio.CancelledError
        return ended.unwrap()

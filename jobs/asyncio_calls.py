"""Calls of asyncio-flavored functions from Trio, for libraries on top of the queue: `job.resource(AsyncioCalls)`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

CallTrio = Callable[..., Awaitable[Any]]
"""Awaits a Trio-flavored function with its arguments, from asyncio. A cancellation cancels that function."""


class AsyncioCalls(Protocol):
    """Calls in the asyncio loop of the process's handlers, for one run of a job."""

    async def call(self, function: Callable[[CallTrio], Awaitable[T]]) -> T:
        """Await an asyncio-flavored function in a task of the loop.

        A cancellation cancels its task, and is raised when the task has ended. Tasks that the function leaves running
        are cancelled.
        """

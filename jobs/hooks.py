"""Declarations of a task registry besides tasks: resources, opened once per process, and wrappers of each run."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Generic, TypeAlias, TypeVar

import attrs

from dataloader.jobs.job import AnyJob

T = TypeVar("T")

Around: TypeAlias = Callable[[AnyJob], AbstractContextManager[object]]
"""Returns the context manager in which a handler runs, in the handler's own task or thread."""


@attrs.frozen(eq=False)
class Resource(Generic[T]):
    """Resource that a process opens once for its jobs, such as a connection pool. Created by `Tasks.resource`.

    A call returns a new context manager, as the decorated function does, for use in other programs.
    """

    function: Callable[[], AbstractAsyncContextManager[T]]
    asyncio: bool = False

    @property
    def name(self) -> str:
        """Name of the decorated function, for messages."""
        return str(getattr(self.function, "__qualname__", self.function))

    def __call__(self) -> AbstractAsyncContextManager[T]:
        """Return a new context manager, which opens and closes the resource."""
        return self.function()


def resource_of(function: Callable[[], AbstractAsyncContextManager[T]], *, asyncio: bool) -> Resource[T]:
    """Return the declaration of `function`. Raises `ValueError` if it does not return an async context manager."""
    if inspect.isasyncgenfunction(function) or inspect.iscoroutinefunction(function):
        message = (
            f"resource {function.__qualname__!r}: is not an async context manager; "
            "add @contextlib.asynccontextmanager below @tasks.resource"
        )
        raise ValueError(message)
    return Resource(function, asyncio)


def around_of(function: Around) -> Around:
    """Return `function` unchanged. Raises `ValueError` if it does not return a context manager."""
    is_async = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
    is_async = is_async or inspect.isasyncgenfunction(getattr(function, "__wrapped__", None))
    if is_async or inspect.isgeneratorfunction(function):
        message = (
            f"around {function.__qualname__!r}: is not a context manager; add @contextlib.contextmanager below"
            " @tasks.around. It must not be async, because it wraps handlers of all flavors"
        )
        raise ValueError(message)
    return function

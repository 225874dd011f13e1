"""What a registry of tasks may declare besides tasks: resources, opened once a process, and what wraps each run."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Generic, TypeAlias, TypeVar

import attrs

from dataloader.jobs.job import AnyJob

T = TypeVar("T")

Around: TypeAlias = Callable[[AnyJob], AbstractContextManager[object]]
"""Makes the context manager in which a handler runs, in the handler's own task or thread."""


@attrs.frozen(eq=False)
class Resource(Generic[T]):
    """Something that a process opens once for its jobs, such as a pool of connections. Made by `Tasks.resource`.

    Called, it gives what the decorated function does: a new context manager, for a program of its own.
    """

    function: Callable[[], AbstractAsyncContextManager[T]]
    asyncio: bool = False

    @property
    def name(self) -> str:
        """The decorated function's, for messages."""
        return str(getattr(self.function, "__qualname__", self.function))

    def __call__(self) -> AbstractAsyncContextManager[T]:
        """A new context manager, which opens and closes one."""
        return self.function()


def resource_of(function: Callable[[], AbstractAsyncContextManager[T]], *, asyncio: bool) -> Resource[T]:
    """The declaration that `function` is. Raises `ValueError` for what makes no async context manager."""
    if inspect.isasyncgenfunction(function) or inspect.iscoroutinefunction(function):
        message = f"resource {function.__qualname__!r}: put @contextlib.asynccontextmanager below @tasks.resource"
        raise ValueError(message)
    return Resource(function, asyncio)


def around_of(function: Around) -> Around:
    """`function` as it is. Raises `ValueError` for what makes no context manager."""
    is_async = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
    is_async = is_async or inspect.isasyncgenfunction(getattr(function, "__wrapped__", None))
    if is_async or inspect.isgeneratorfunction(function):
        message = (
            f"around {function.__qualname__!r}: put @contextlib.contextmanager below @tasks.around; it is no async"
            " function, since it wraps handlers of every flavour"
        )
        raise ValueError(message)
    return function

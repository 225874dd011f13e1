"""Checks of functions that are declared as handlers, and of what they return: mistakes that no retry can repair."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, Final

from dataloader.jobs.outcomes import GiveUp

_UNRUN: Final[dict[type, str]] = {
    CoroutineType: "a coroutine, which nothing awaits: the handler, and its decorator's wrapper, must be async",
    GeneratorType: "a generator, which nothing runs: return a value, and report progress by job.progress",
    AsyncGeneratorType: "an async generator, which nothing runs: return a value, and report progress by job.progress",
}


def check_handler(handler: Callable[..., Any]) -> None:
    """Raise `ValueError` unless a worker can call `handler` with the job alone and run all of it."""
    # Not what it wraps: a decorator may run an async function or a generator to its end.
    if inspect.isgeneratorfunction(handler) or inspect.isasyncgenfunction(handler):
        raise ValueError("a handler must not yield: return a value, and report progress by job.progress")
    try:
        # Of a decorated function that of the wrapper, which is called.
        signature = inspect.signature(handler, follow_wrapped=False)
    except ValueError:  # some functions written in C have none
        return
    try:
        signature.bind(None)
    except TypeError:
        raise ValueError(f"a handler must take one argument, the job; this one takes {signature}") from None


def result_of(value: object) -> object:
    """Return the value of a handler, or `GiveUp` if it is a coroutine or generator, which nothing would run."""
    unrun = _UNRUN.get(type(value))
    return value if unrun is None else GiveUp(f"the handler returned {unrun}")

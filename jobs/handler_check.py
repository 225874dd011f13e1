"""Checks of functions declared as handlers, and of their results: mistakes that no retry can repair."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, Final

from dataloader.jobs.outcomes import GiveUp

_UNRUN: Final[dict[type, str]] = {
    CoroutineType: "a coroutine that is never awaited; make the handler and the wrappers of its decorators async",
    GeneratorType: "a generator that is never run; return a value, and report progress with job.progress",
    AsyncGeneratorType: "an async generator that is never run; return a value, and report progress with job.progress",
}


def check_handler(handler: Callable[..., Any]) -> None:
    """Raise `ValueError` unless a worker can call `handler` with only the job and run all of it."""
    # The wrapped function is not checked: a decorator may run an async function or a generator to its end.
    if inspect.isgeneratorfunction(handler) or inspect.isasyncgenfunction(handler):
        raise ValueError("a handler must not yield; return a value, and report progress with job.progress")
    try:
        # For a decorated function, this is the signature of the wrapper, which is called.
        signature = inspect.signature(handler, follow_wrapped=False)
    except ValueError:  # some functions written in C have none
        return
    try:
        signature.bind(None)
    except TypeError:
        raise ValueError(f"a handler must take one argument, the job, not {signature}") from None


def result_of(value: object) -> object:
    """Return a handler's result, or `GiveUp` for a coroutine or generator, which would never run."""
    unrun = _UNRUN.get(type(value))
    return value if unrun is None else GiveUp(f"the handler returned {unrun}")

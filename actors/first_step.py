"""First step of a coroutine: up to its first wait, in the caller's task and in a separate context.

A handler that never waits needs no separate Trio task, which takes longer to start and to end than such a handler. So
one task can run many of them, one after another; the first that waits keeps the task.
"""

from __future__ import annotations

from collections.abc import Coroutine
from contextvars import Context
from typing import Any, Self

import trio


class Begun:
    """Rest of a coroutine that has made its first step and waits. Await it in the task that has made the step.

    It forwards Trio's values without a frame in between. Trio's `Task.iter_await_frames` follows `cr_frame` and
    `cr_await`.
    """

    cr_frame = None

    def __init__(self, coroutine: Coroutine[Any, Any, None], wait: object) -> None:
        """Store `wait`, which the coroutine has yielded; Trio must get it first."""
        self.cr_await = coroutine
        self.send = coroutine.send
        self.throw = coroutine.throw
        self.close = coroutine.close
        self._wait = wait

    def __await__(self) -> Self:
        return self

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> object:
        return self._wait


def begin(coroutine: Coroutine[Any, Any, None], context: Context) -> Begun | None:
    """Run `coroutine` in `context` up to its first wait. Return the rest of it; None if it has ended without a wait.

    Meanwhile `context` is the context of the caller's task, and it stays so if the coroutine waits: asyncio's loops and
    threads that call back use it.
    """
    task = trio.lowlevel.current_task()
    before, task.context = task.context, context
    try:
        wait = context.run(coroutine.send, None)
    except StopIteration:
        task.context = before
        return None
    except BaseException:
        task.context = before
        raise
    return Begun(coroutine, wait)

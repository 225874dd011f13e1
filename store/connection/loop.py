"""Asyncio loop for the database driver within Trio: the standard library's, with Trio waiting for its selector.

Trio waits until the selector's own descriptor is readable or the next timer is due. Then all ready callbacks run in one
turn of Trio's scheduler. An operation's first step runs in the turn of its caller, and its last step wakes the caller.
So an operation takes two turns, however many callbacks the driver needs; a turn is as long as all the other tasks take
in it. The loop asks the system for ready sockets once each time the descriptor is readable, and when an operation
begins while others wait. Other rounds of callbacks do not ask. A KeyboardInterrupt never interrupts a callback.

Rejected: trio-asyncio for this loop. It runs one callback a turn, and needs a task and an event each time a socket
becomes readable. An operation takes eight turns and half as much CPU again, and its support ends with Python 3.13.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Executor
from contextlib import asynccontextmanager, suppress
from contextvars import Context
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar, TypeVarTuple

import outcome
import trio

P = ParamSpec("P")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

ROUNDS_A_TURN: Final = 10
"""Maximum number of rounds of callbacks in one turn: callbacks may schedule others, and must not delay other tasks."""
CLOSE_S: Final = 5.0


class Sockets(selectors.DefaultSelector):
    """Selector of the loop. `select` asks the system once after `is_ready` was set, and else returns no socket."""

    is_ready = False

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return the sockets that are ready, without waiting for any."""
        del timeout
        if not self.is_ready:
            return []
        self.is_ready = False
        return super().select(0)


class Loop(asyncio.SelectorEventLoop):
    """Loop of the driver. Call functions with `run`; create it with `open_loop`."""

    # Private names of the standard library's loop that are used here; the same from Python 3.4 to 3.14.
    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]
    _stopping: bool
    _run_once: Callable[[], None]

    def __init__(self) -> None:
        self._in_turn = False
        self._waiting = 0
        self._sockets = Sockets()
        super().__init__(self._sockets)
        self._stopping = True  # makes a round check the selector without waiting for it
        self._rest = trio.CancelScope()
        self._rest_until = math.inf

    async def run(self, function: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run an asyncio-flavored function to its end.

        A cancellation from Trio cancels its asyncio task; `trio.Cancelled` is raised when that has ended. An
        `asyncio.CancelledError` with another cause is raised as it is.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        waiter, is_waiting = trio.lowlevel.current_task(), False
        answer: outcome.Outcome[T] | None = None
        raise_cancel: Callable[[], None] | None = None

        async def aio_answer() -> None:
            nonlocal answer
            answer = await outcome.acapture(function, *args, **kwargs)
            if is_waiting:
                trio.lowlevel.reschedule(waiter, answer)

        task = self._begin(aio_answer())
        if answer is not None:
            await trio.lowlevel.cancel_shielded_checkpoint()
            return answer.unwrap()

        def abort(raised: Callable[[], None]) -> trio.lowlevel.Abort:
            nonlocal raise_cancel
            raise_cancel = raised
            task.cancel()
            return trio.lowlevel.Abort.FAILED

        is_waiting = True
        self._waiting += 1
        try:
            result: T = await trio.lowlevel.wait_task_rescheduled(abort)
        except asyncio.CancelledError:
            if raise_cancel is not None:
                raise_cancel()
            raise
        finally:
            self._waiting -= 1
        return result

    @trio.lowlevel.enable_ki_protection
    def _begin(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task for `coroutine` and run its first step."""
        self._sockets.is_ready = self._waiting > 0  # their answers may have come
        self._in_turn = True  # the turn follows immediately: nothing has to be woken for it
        self._in_turn = True  # the turn follows immediately: nothing has to be woken for it
        task = self.create_task(coroutine)
        self._turn()
        return task

    @trio.lowlevel.enable_ki_protection
    def _turn(self) -> None:
        """Run the ready callbacks, and those that they schedule."""
        self._in_turn = True
        # If Trio is a guest of asyncio, another loop is running. With a host's trio-asyncio a context variable says
        # which loop runs.
        hosts = asyncio._get_running_loop()  # noqa: SLF001 - made for authors of loops
        asyncio._set_running_loop(self)  # noqa: SLF001
        by_context = asyncio._get_running_loop() is not self  # noqa: SLF001
        if by_context:
            asyncio.set_event_loop(self)
        try:
            for _ in range(ROUNDS_A_TURN):
                self._run_once()
                if not self._ready:
                    break
        finally:
            if by_context:
                asyncio.set_event_loop(hosts)
            asyncio._set_running_loop(None if by_context else hosts)  # noqa: SLF001
            self._in_turn = False
        if self._ready or self._next_timer() < self._rest_until:
            self._rest.cancel()

    def is_running(self) -> bool:
        """Return True within a turn, as in a loop that runs by itself, because callbacks may check it."""
        return self._in_turn

    @property
    def is_idle(self) -> bool:
        """Return True while the loop has no task and no callback to run."""
        return not self._ready and not asyncio.all_tasks(self)

    async def run_what_is_answered(self) -> None:
        """Run callbacks whenever a socket is ready, until cancelled."""
        while True:
            await trio.lowlevel.wait_readable(self._sockets.fileno())
            self._sockets.is_ready = True
            self._turn()

    async def run_what_is_due(self) -> None:
        """Run timers that are due, and callbacks that were scheduled outside of a turn, until cancelled."""
        while True:
            self._rest_until = self._next_timer()
            rest_s = 0 if self._ready else self._rest_until - self.time()
            with trio.CancelScope(deadline=trio.current_time() + rest_s) as self._rest:
                await trio.sleep_forever()
            self._turn()

    def _next_timer(self) -> float:
        return self._scheduled[0].when() if self._scheduled else math.inf

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Schedule a callback, as every loop does; outside of a turn, also start the next turn."""
        handle = super().call_soon(callback, *args, context=context)
        if not self._in_turn:
            self._rest.cancel()
        return handle

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Run `func` in a Trio thread, which does not delay the process's exit: a name server may never answer."""
        del executor
        future = self.create_future()

        def settle(result: outcome.Outcome[T]) -> None:
            if future.cancelled():
                return
            match result:
                case outcome.Value(value):
                    future.set_result(value)
                case outcome.Error(error):
                    future.set_exception(error)

        def deliver(result: outcome.Outcome[T]) -> None:
            with suppress(RuntimeError):  # the loop is closed, and nothing waits for the result
                self.call_soon_threadsafe(settle, result)

        trio.lowlevel.start_thread_soon(partial(func, *args), deliver)
        return future


@asynccontextmanager
async def open_loop() -> AsyncIterator[Loop]:
    """Open a loop for the length of a block.

    It continues when the block is cancelled, so that cleanup can still use it. Tasks that are left after the block are
    cancelled, and awaited for up to `CLOSE_S` seconds.
    """
    loop = Loop()
    life = trio.CancelScope(shield=True)

    async def live() -> None:
        with life:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(loop.run_what_is_answered)
                nursery.start_soon(loop.run_what_is_due)

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(live)
            try:
                yield loop
            finally:
                for task in asyncio.all_tasks(loop):
                    task.cancel()
                with trio.move_on_after(CLOSE_S, shield=True):
                    while not loop.is_idle:  # noqa: ASYNC110 - asyncio's tasks cannot set a Trio event
                        await trio.sleep(0.01)
                life.cancel()
    finally:
        loop.close()

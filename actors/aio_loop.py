"""Asyncio loop in which asyncio-flavored handlers run: trio-asyncio's, which only this file imports.

It is opened in a separate task: trio-asyncio assigns each task that has its context variable to that loop, and Trio's
handlers must not be assigned. The loop's task factory records the asyncio tasks of each run. Tasks that a handler
leaves behind are cancelled and awaited. The run has ended only when they have, so that none of them works on a job
that another worker has. The database has its own loop (store/connection/loop.py), which takes half as much CPU time.
"""

from __future__ import annotations

import asyncio
import contextvars
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import Any, Final, NoReturn, Protocol, TypeVar

import attrs
import outcome
import trio

from dataloader.jobs.logger import get_logger

log = get_logger(__name__)

T = TypeVar("T")

CANCEL_EVERY_S: Final = 5.0
"""Interval in seconds at which tasks that a handler has left behind are cancelled, until they end."""
MAX_THREADS: Final = 32

_tasks_of_run: contextvars.ContextVar[set[asyncio.Task[Any]] | None] = contextvars.ContextVar("tasks", default=None)


class _TrioLoop(Protocol):
    """The part of trio-asyncio's loop that we use, besides asyncio's own names."""

    async def run_aio_coroutine(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in an asyncio task; a Trio cancellation cancels that task."""


@attrs.frozen(eq=False)
class AioLoop:
    """Open loop. Its methods are Trio-flavored."""

    _loop: _TrioLoop

    async def run(
        self,
        function: Callable[..., Awaitable[T]],
        *args: object,
        left_behind: Callable[[int], None] = lambda _tasks: None,
    ) -> T:
        """Run an asyncio-flavored function, and end the tasks that it leaves behind.

        Args:
            function: the function.
            args: its arguments.
            left_behind: called with the number of tasks that still run when the function has ended, if there are any.

        A cancellation from Trio cancels the function's asyncio task; `trio.Cancelled` is raised when that has ended.
        """
        tasks: set[asyncio.Task[Any]] = set()
        _tasks_of_run.set(tasks)
        try:
            ended = await self._loop.run_aio_coroutine(_aio_captured(function, *args))
        finally:
            # The task that ends the others must not belong to the run, or it would wait for itself.
            _tasks_of_run.set(None)
            if left := sum(not task.done() for task in tasks):
                left_behind(left)
            # Shielded, like the wait for a thread: the tasks run on, awaited or not. A task that ignores a cancellation
            # is cancelled again.
            while running := [task for task in tasks if not task.done()]:
                with trio.move_on_after(CANCEL_EVERY_S, shield=True):
                    await self._loop.run_aio_coroutine(_aio_cancel_and_wait(running))
        return ended.unwrap()

    async def hold(
        self,
        make: Callable[[], AbstractAsyncContextManager[Any]],
        opened: Callable[[Any], None],
        closing: trio.Event,
    ) -> None:
        """Enter an asyncio-flavored context manager, pass its value to `opened`, and leave it after `closing` is set.

        It is entered and left in the same asyncio task.
        """
        leave = asyncio.Event()

        async def pass_on() -> None:
            await closing.wait()
            leave.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(pass_on)
            ended = await outcome.acapture(self.run, _aio_hold, make, opened, leave)
            nursery.cancel_scope.cancel()
        try:
            ended.unwrap()
        except asyncio.CancelledError as error:
            # A cancellation of ours would be trio.Cancelled, so the user's code has cancelled this task.
            message = f"asyncio.CancelledError: {error}"
            raise RuntimeError(message) from error  # noqa: ASYNC104 - asyncio's cancellation ends here, not Trio's


@asynccontextmanager
async def open_aio_loop() -> AsyncIterator[AioLoop]:
    """Open a loop for the length of a block. The task that opens it should do nothing else."""
    with warnings.catch_warnings():
        # Its import uses a class that Python 3.12 has deprecated.
        warnings.simplefilter("ignore", DeprecationWarning)
        import trio_asyncio  # noqa: PLC0415 - it changes asyncio for the whole process, so only if a task needs it

    class Threads(trio_asyncio.TrioExecutor):  # type: ignore[misc]
        """Threads of `asyncio.to_thread`, as many as asyncio has at most, separate from those of Trio's handlers.

        A cancelled caller waits until its thread has ended. It is then cancelled even if the thread returned a value:
        asyncio cancels only once, so the cancellation must not be lost.
        """

        async def submit(self, function: Callable[..., T], *args: object) -> T:
            try:
                result: T = await super().submit(function, *args)
            finally:
                await trio.lowlevel.checkpoint_if_cancelled()  # noqa: ASYNC102 - it must raise the cancellation
            return result

    async with trio_asyncio.open_loop() as loop:
        # The default handler ends the loop, and with it all job handlers.
        loop.set_exception_handler(_report)
        loop.set_task_factory(_contained_task)
        loop.set_default_executor(Threads(max_workers=MAX_THREADS))
        loop.stop = _refuse_to_stop
        try:
            yield AioLoop(loop)
        finally:
            del loop.stop


async def serve_aio_loop(closing: trio.Event, *, task_status: trio.TaskStatus[AioLoop]) -> None:
    """Keep a loop open until `closing` is set; pass it to `task_status.started`."""
    async with open_aio_loop() as loop:
        task_status.started(loop)
        await closing.wait()


async def _aio_captured(function: Callable[..., Awaitable[T]], *args: object) -> outcome.Outcome[T]:
    """Return the function's result or error as a value; raise a cancellation.

    A raised SystemExit would end the loop.
    """
    try:
        return outcome.Value(await function(*args))
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # noqa: BLE001 - raised where it is awaited
        return outcome.Error(error)


async def _aio_hold(
    make: Callable[[], AbstractAsyncContextManager[Any]], opened: Callable[[Any], None], leave: asyncio.Event
) -> None:
    async with make() as value:
        opened(value)
        await leave.wait()


async def _aio_cancel_and_wait(tasks: list[asyncio.Task[Any]]) -> None:
    """Cancel `tasks` and return when they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


def _refuse_to_stop() -> NoReturn:
    raise RuntimeError("all asyncio handlers share this loop; a handler cannot stop it")


def _report(_loop: object, context: dict[str, Any]) -> None:
    error = context.get("exception")
    log.error("an asyncio error was never retrieved", said=context.get("message"), exc_info=error)


def _contained_task(
    loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T] | Generator[Any, None, T], **options: Any
) -> asyncio.Task[T]:
    """Create a task that belongs to the run in whose context it begins; this is the loop's task factory."""
    task: asyncio.Task[T] = asyncio.Task(_Contained(coroutine), loop=loop, **options)
    tasks = _tasks_of_run.get()
    if tasks is not None:
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    return task


@attrs.frozen(eq=False)
class _Contained(Coroutine[Any, Any, T]):
    """Coroutine that cannot end the loop: asyncio lets `SystemExit` of a task through to the caller of the loop."""

    _coroutine: Any

    def send(self, value: Any) -> Any:
        """Forward to the coroutine; `SystemExit` becomes `RuntimeError`."""
        try:
            return self._coroutine.send(value)
        except SystemExit as error:
            raise _exit_in_task(error) from error

    def throw(
        self,
        kind: type[BaseException] | BaseException,
        value: BaseException | object = None,
        traceback: TracebackType | None = None,
    ) -> Any:
        """Forward to the coroutine; `SystemExit` becomes `RuntimeError`."""
        del value, traceback
        try:
            return self._coroutine.throw(kind)
        except SystemExit as error:
            raise _exit_in_task(error) from error

    def close(self) -> None:
        """Close the coroutine."""
        self._coroutine.close()

    def __await__(self) -> Generator[Any, None, T]:
        """Return the coroutine's iterator."""
        result: Generator[Any, None, T] = self._coroutine.__await__()
        return result


def _exit_in_task(error: SystemExit) -> RuntimeError:
    return RuntimeError(f"an asyncio task called sys.exit({error.code!r})")

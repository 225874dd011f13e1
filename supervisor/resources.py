"""Opens the resources of a registry's tasks before the first claim, and closes them after the last run.

Each resource is entered and left in one Trio or asyncio task of its own, so it may have a nursery.
They open in the order of their declaration and close in the reverse order, each within a deadline.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

import attrs
import outcome
import trio

from dataloader.actors.aio_loop import AioLoop, serve_aio_loop
from dataloader.jobs.error_groups import only_error
from dataloader.jobs.errors import ConfigError, Draining
from dataloader.jobs.hooks import Resource
from dataloader.jobs.logger import get_logger
from dataloader.jobs.secrets.masking import mask_text
from dataloader.jobs.tasks import Tasks

log = get_logger(__name__)

OPEN_S: Final = 60.0
"""The time in which a resource must open, in seconds."""
CLOSE_S: Final = 3.0
"""The time in which a resource must close, in seconds; then it is cancelled."""


@attrs.frozen
class Opened:
    """The opened `resources` by their declarations, and the loop of asyncio handlers if one is needed."""

    resources: dict[object, Any]
    aio: AioLoop | None


@asynccontextmanager
async def open_resources(tasks: Tasks, *, until: trio.Event, aio: AioLoop | None = None) -> AsyncIterator[Opened]:
    """The resources of `tasks`, open for the length of a block; `aio` is the loop of asyncio handlers if there is one.

    Raises `ConfigError` for a resource that can't be opened, and `Draining` if `until` is set before all are open.
    """
    needs_loop = any(task.asyncio and not task.in_child for task in tasks.values()) or any(
        r.asyncio for r in tasks.resources
    )
    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        try:
            async with AsyncExitStack() as stack:
                if aio is None and needs_loop:
                    aio = await stack.enter_async_context(_open_loop(nursery))
                resources: dict[object, Any] = {}
                for resource in tasks.resources:
                    resources[resource] = await stack.enter_async_context(_open(resource, aio, nursery, until))
                yield Opened(resources, aio)
        except Exception as error:  # noqa: BLE001 - raised again below, without this nursery's group around it
            failure = error
    if failure is not None:
        raise failure


@asynccontextmanager
async def _open_loop(nursery: trio.Nursery) -> AsyncIterator[AioLoop]:
    closing = trio.Event()
    loop: AioLoop = await nursery.start(serve_aio_loop, closing)
    try:
        yield loop
    finally:
        closing.set()


@asynccontextmanager
async def _open(
    resource: Resource[Any], aio: AioLoop | None, nursery: trio.Nursery, until: trio.Event
) -> AsyncIterator[Any]:
    held = _Held(resource, aio)
    value: Any = None

    async def stop_opening() -> None:
        await until.wait()
        opening.cancel()

    with trio.move_on_after(OPEN_S) as opening:
        async with trio.open_nursery() as watching:
            watching.start_soon(stop_opening)
            # Raised outside of the nursery, which would wrap it into an exception group.
            ended = await outcome.acapture(nursery.start, held.hold)
            watching.cancel_scope.cancel()
        try:
            value = ended.unwrap()
        except Exception as error:
            raise ConfigError(f"resource {resource.name}: could not be opened: {_said(error)}") from error
    if opening.cancelled_caught:
        if until.is_set():
            raise Draining("the supervisor was drained before its resources were open")
        raise ConfigError(f"resource {resource.name}: did not open within {OPEN_S:g} s")
    try:
        yield value
    finally:
        await held.close()  # noqa: ASYNC102 - it has a shield and a deadline of its own


class _Held:
    """One resource, in the task that enters and leaves it."""

    def __init__(self, resource: Resource[Any], aio: AioLoop | None) -> None:
        """Not open yet."""
        self._resource = resource
        self._aio = aio
        self._scope = trio.CancelScope()
        self._closing = trio.Event()
        self._closed = trio.Event()

    async def hold(self, *, task_status: trio.TaskStatus[Any]) -> None:
        """Open it, and leave it after `close` is called; `started` gives the value that it yields."""

        def opened(value: Any) -> None:
            # From now on only `close` ends it, when no run needs it any more.
            self._scope.shield = True
            task_status.started(value)

        try:
            with self._scope:
                if self._aio is not None and self._resource.asyncio:
                    await self._aio.hold(self._resource, opened, self._closing)
                else:
                    async with self._resource() as value:
                        opened(value)
                        await self._closing.wait()
        except Exception as error:
            if not self._scope.shield:
                raise
            self._tell(error)
        except SystemExit as error:  # raised by the user's code: it ends the resource, not the process
            if not self._scope.shield:
                raise RuntimeError(_said(error)) from error
            self._tell(error)
        finally:
            self._closed.set()

    def _tell(self, error: BaseException) -> None:
        event = "a resource could not be closed" if self._closing.is_set() else "a resource has failed"
        log.error(event, resource=self._resource.name, error=_said(error))

    async def close(self) -> None:
        """Close it within the deadline, or cancel it then."""
        self._closing.set()
        with trio.move_on_after(CLOSE_S, shield=True) as waiting:
            await self._closed.wait()
        if waiting.cancelled_caught:
            log.error("a resource does not close: it is cancelled", resource=self._resource.name, after_s=CLOSE_S)
            self._scope.cancel()


def _said(error: BaseException) -> str:
    error = only_error(error)
    return mask_text(f"{type(error).__name__}: {error}")

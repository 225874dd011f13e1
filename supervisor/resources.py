"""Opens the resources of a registry's tasks before the first claim, and closes them after the last run.

Each resource is entered and left in one dedicated Trio or asyncio task, so it may have a nursery. Resources open in the
order of their declaration and close in the reverse order, each within a deadline. A resource that raises
`StoreUnavailable` is opened again, as the rest of the start waits for the database.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

import attrs
import outcome
import trio

from dataloader.actors.aio_loop import AioLoop, serve_aio_loop
from dataloader.jobs.error_groups import first_error, is_outage, only_error
from dataloader.jobs.errors import ConfigError, Draining, StoreUnavailable
from dataloader.jobs.growing_pauses import Pauses
from dataloader.jobs.hooks import Resource
from dataloader.jobs.logger import get_logger
from dataloader.jobs.outages import Outages, always_serves
from dataloader.jobs.secrets.masking import mask_text
from dataloader.jobs.tasks import Tasks
from dataloader.jobs.text import said_by

log = get_logger(__name__)

OPEN_S: Final = 60.0
"""Seconds in which a resource must open."""
AWAY_PAUSES_S: Final = (0.5, 10.0)
"""Pauses before a resource is opened again that could not reach its database: the first, and the longest."""
CLOSE_S: Final = 3.0
"""Seconds in which a resource must close; then it is cancelled."""


@attrs.frozen
class Opened:
    """Opened `resources` by their declarations, and the loop of asyncio handlers if one is needed."""

    resources: dict[object, Any]
    aio: AioLoop | None


@asynccontextmanager
async def open_resources(tasks: Tasks, *, until: trio.Event, aio: AioLoop | None = None) -> AsyncIterator[Opened]:
    """Open the resources of `tasks` for the duration of a block. `aio` is the loop of asyncio handlers, if one runs.

    Raises `ConfigError` for a resource that cannot be opened, and `Draining` if `until` is set before all are open.
    """
    needs_loop = any((task.asyncio and not task.in_child) or task.calls_asyncio for task in tasks.values()) or any(
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
        except Exception as error:  # noqa: BLE001 - raised again below, outside this nursery's exception group
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
    # The queue's database was available at this start, so the outage is in a resource's database.
    outages = Outages(always_serves, Pauses(*AWAY_PAUSES_S), most=math.inf)
    while True:
        held = _Held(resource, aio)
        try:
            value = await _opened(held, resource.name, outages, nursery, until)
        except StoreUnavailable as error:
            log.warning("a resource waits for the database", resource=resource.name, error=str(error))
            with trio.move_on_after(outages.pauses.next()):
                await until.wait()
        else:
            break
    try:
        yield value
    finally:
        await held.close()  # noqa: ASYNC102 - it has its own shield and deadline


async def _opened(held: _Held, name: str, outages: Outages, nursery: trio.Nursery, until: trio.Event) -> Any:
    """Open a resource. Raises `ConfigError`, `Draining`, or `StoreUnavailable` if only its database is unavailable."""

    async def stop_opening() -> None:
        await until.wait()
        opening.cancel()

    with trio.move_on_after(OPEN_S) as opening:
        async with trio.open_nursery() as watching:
            watching.start_soon(stop_opening)
            # Raised outside the nursery, which would wrap it in an exception group.
            ended = await outcome.acapture(nursery.start, held.hold)
            watching.cancel_scope.cancel()
        try:
            return ended.unwrap()
        except Exception as error:
            if is_outage(error) and await outages.may_repeat(error):  # noqa: ASYNC120 - a cancellation would replace it
                raise StoreUnavailable(str(first_error(error))) from error
            raise ConfigError(f"resource {name}: could not be opened: {_masked_cause(error)}") from error
    if until.is_set():
        raise Draining("the supervisor was drained before its resources were open")
    raise ConfigError(f"resource {name}: did not open within {OPEN_S:g} s")


class _Held:
    """One resource, in the task that enters and leaves it."""

    def __init__(self, resource: Resource[Any], aio: AioLoop | None) -> None:
        """Prepare the resource without opening it."""
        self._resource = resource
        self._aio = aio
        self._scope = trio.CancelScope()
        self._closing = trio.Event()
        self._closed = trio.Event()

    async def hold(self, *, task_status: trio.TaskStatus[Any]) -> None:
        """Open the resource, and leave it when `close` is called. `started` gives the value that it yields."""

        def opened(value: Any) -> None:
            # From now on only `close` ends it, when no run needs it anymore.
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
                raise RuntimeError(_masked_cause(error)) from error
            self._tell(error)
        finally:
            self._closed.set()

    def _tell(self, error: BaseException) -> None:
        event = "a resource could not be closed" if self._closing.is_set() else "a resource failed"
        log.error(event, resource=self._resource.name, error=_masked_cause(error))

    async def close(self) -> None:
        """Close the resource within the deadline, or cancel it."""
        self._closing.set()
        with trio.move_on_after(CLOSE_S, shield=True) as waiting:
            await self._closed.wait()
        if waiting.cancelled_caught:
            log.error("cancelling a resource that does not close", resource=self._resource.name, after_s=CLOSE_S)
            self._scope.cancel()


def _masked_cause(error: BaseException) -> str:
    error = only_error(error)
    return mask_text(said_by(error))

"""Pool of this process's children: warm ones for each task, started on demand, ended when idle for long.

A child runs one job at a time. It is ended, with all that it has started, in these cases: after a stop, after an error
of the child such as exhausted memory, if the function has left processes or threads behind, and after `max_jobs` jobs.
"""

from __future__ import annotations

import math
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import attrs
import trio

from dataloader.actors.children import wire
from dataloader.actors.children.child import Child
from dataloader.actors.job_runs import Run
from dataloader.actors.wake import Wake
from dataloader.jobs.errors import ConfigError
from dataloader.jobs.logger import get_logger
from dataloader.jobs.module_names import Place, place_of
from dataloader.jobs.task import Task
from dataloader.jobs.tasks import Tasks
from dataloader.jobs.telemetry import Telemetry

log = get_logger(__name__)

HURRIED_GRACE_S = 6.0
"""Maximum grace period in seconds while the process drains, which bounds the drain."""
MAX_CALLERS = 1_000
"""Number of runs for which a child answers calls, one after another, before it is replaced."""


def places_of(tasks: Tasks) -> dict[str, tuple[Place, list[Place]]]:
    """Return where children find the functions of tasks with `process=True` or `dask=`, and their wrappers.

    Raises `ConfigError` if another process cannot find a function, or if this platform has no such children.
    """
    own = [task for task in tasks.values() if task.in_child]
    if own and not sys.platform.startswith("linux"):
        raise ConfigError(f"task {own[0].name!r}: {_how(own[0])} needs Linux, for the guards of its processes")
    try:
        around = [place_of(what) for what in tasks.wraps] if own else []
    except ValueError as error:
        raise ConfigError(f"@tasks.around: a wrapper of tasks with {_how(own[0])} {error}") from None
    places = {}
    for task in own:
        try:
            places[task.name] = place_of(task.handler), around
        except ValueError as error:
            raise ConfigError(f"task {task.name!r}: {_how(task)}: its function {error}") from None
    return places


def _how(task: Task) -> str:
    return "process=True" if task.process else f"dask={task.dask!r}"


@attrs.define(eq=False, kw_only=True)
class Children:
    """Pool of children. `grace_s` is the time from SIGTERM to SIGKILL, `idle_s` the time idle children are kept."""

    tasks: Tasks
    grace_s: float
    idle_s: float
    telemetry: Telemetry
    _places: Mapping[str, tuple[Place, list[Place]]] = attrs.field(init=False)
    _idle: dict[Place | str, list[Child]] = attrs.field(factory=dict, init=False)
    _changed: Wake = attrs.field(factory=Wake, init=False)
    _running: int = attrs.field(default=0, init=False)
    _closed: bool = attrs.field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        """Refuse tasks that children cannot run."""
        self.learn()

    def learn(self) -> None:
        """Read the present tasks. Raises `ConfigError` if children cannot run one of them."""
        self._places = places_of(self.tasks)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """End children that were idle for `idle_s` seconds, until cancelled."""
        task_status.started()
        while True:
            ends_at = min((one.idle_since for some in self._idle.values() for one in some), default=math.inf)
            left_s = ends_at + self.idle_s - trio.current_time()
            if left_s > 0:
                await self._changed.wait(left_s)
                continue
            # Take all of them out before the first wait, because jobs begin and end meanwhile.
            ended = []
            for some in self._idle.values():
                ended += [one for one in some if one.idle_since <= ends_at]
                some[:] = [one for one in some if one.idle_since > ends_at]
            self._show()
            async with trio.open_nursery() as nursery:
                for child in ended:
                    nursery.start_soon(self._end, child, "idle")

    async def close(self) -> None:
        """End all idle children. Runs end their own."""
        self._closed = True
        async with trio.open_nursery() as nursery:
            for some in self._idle.values():
                while some:
                    nursery.start_soon(self._end, some.pop(), "drain")
        self._show()

    def lend(self, task: Task, run: Run) -> AbstractAsyncContextManager[Child]:
        """Lend a child for a run of `task`, with its guard armed while the run's lease and key are safe.

        The child is kept for the next job if the block sets its `idle_since`. Raises `BodyFailed` if no child can be
        started.
        """
        place, around = self._places[task.name]
        declared = wire.BodySetup(
            path=sys.path,
            module=place.module,
            name=place.name,
            around=[(one.module, one.name) for one in around],
            asyncio=task.asyncio,
            memory_mb=task.memory_mb,
        )
        return self._lend(task.name, declared, task.max_jobs, run)

    def lend_to_calls(self, place: Place, run: Run) -> AbstractAsyncContextManager[Child]:
        """Lend a child that answers calls for a run, as `lend` does. Raises `ConfigError` if this is not Linux."""
        if not sys.platform.startswith("linux"):
            raise ConfigError("processes=True needs Linux, for the guards of its processes")
        declared = wire.BodySetup(
            path=sys.path, module=place.module, name=place.name, around=[], asyncio=False, memory_mb=None, calls=True
        )
        return self._lend(place, declared, MAX_CALLERS, run)

    @asynccontextmanager
    async def _lend(self, what: Place | str, declared: wire.BodySetup, max_jobs: int, run: Run) -> AsyncIterator[Child]:
        child = await self._armed(what, declared, run)
        self._running += 1
        self._show()
        try:
            yield child
        finally:
            self._running -= 1
            idle = self._idle.setdefault(what, [])
            if child.idle_since == math.inf:
                await self._end(child, "stop")  # noqa: ASYNC102 - it has its own shields and deadlines
            elif child.jobs >= max_jobs:
                await self._end(child, "max_jobs")  # noqa: ASYNC102 - as above
            elif self._closed:
                await self._end(child, "drain")  # noqa: ASYNC102 - as above
            else:
                child.disarm()
                idle.append(child)
                self._changed.set()
            self._show()

    async def _armed(self, what: Place | str, declared: wire.BodySetup, run: Run) -> Child:
        idle = self._idle.setdefault(what, [])
        while idle:
            child = idle.pop()  # the last one used has the warmest caches
            if await self._arm(child, run):
                return child
        began = trio.current_time()
        child = await Child.start(declared)
        self.telemetry.child_started(trio.current_time() - began)
        if not await self._arm(child, run):
            raise RuntimeError("a child process has ended before its first job")
        return child

    async def _arm(self, child: Child, run: Run) -> bool:
        """Arm a child's guard. Return False if the child has ended; it is then cleaned up, as after an error."""
        child.idle_since = math.inf
        try:
            if await child.arm(run.lease.body_is_killed()):
                return True
        except BaseException:
            await child.end()  # noqa: ASYNC102 - it has its own shields and deadlines
            raise
        await self._end(child, "died")
        return False

    async def _end(self, child: Child, why: str) -> None:
        self.telemetry.child_ended(why)
        await child.end()

    def _show(self) -> None:
        self.telemetry.children_now(self._running, sum(map(len, self._idle.values())))

"""The tree: what runs, in which order it comes up and goes down, and how often each part may fail.

    root                                          (shielded from the host's cancellation; ended by a drain alone)
     ├─ service: store        asyncio loop, pool, sessions          first up, last down
     ├─ service: watchdog     a thread that sees the loop blocked
     ├─ service: server       the embedded PostgreSQL    5 in 60 s   where there is one; down when all others are
     ├─ service: web          own listening socket      5 in 60 s   up before the database is, and during the drain
     ├─ service: heartbeat    leases, cancel requests  10 in 60 s   down after the recorder
     ├─ service: overdue      runs that do not stop    10 in 60 s   down after the recorder
     ├─ service: keeper       the lock session         10 in 60 s   down after the recorder
     ├─ service: releaser     keys of ended jobs       10 in 60 s   down after the recorder
     ├─ service: children     idle child processes     10 in 60 s   down after the queues
     ├─ service: clusters     Dask's, if tasks name it 10 in 60 s   down after the queues
     ├─ service: recorder     outcomes, in batches                  down when all queues are and all is written
     ├─ kept running: listener 20 in 60 s · poller, stager, scheduler, period ends, notifier, bulk operations, delays,
     │                 reaper, pruner, history, messages 10 in 60 s each
     ├─ service: the tasks' resources, and asyncio's loop for them  up before the queues, down after them
     └─ queues
         └─ a queue: dispatcher (its claims 20 in 60 s) + runners   intake scope ⊃ one scope a job that waits

Nested nurseries do not order a cancellation: it reaches all tasks immediately. So nothing here is cancelled from
outside; we end each nursery when the parts that need it have ended.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

import trio

from dataloader.actors.dispatcher import Dispatcher
from dataloader.jobs.errors import ActorGaveUp, ConfigError, Draining, StoreError, StoreUnavailable
from dataloader.jobs.growing_pauses import Pauses
from dataloader.jobs.logger import get_logger
from dataloader.jobs.tasks import Tasks
from dataloader.store import migrations
from dataloader.store.connection.server_check import TESTED, check_server
from dataloader.store.processes.outbox_rows import know_sinks
from dataloader.store.queue.worker_rows import aio_show
from dataloader.supervisor.declare import declare
from dataloader.supervisor.entries import check_capacity
from dataloader.supervisor.parts import Parts
from dataloader.supervisor.resources import Opened, open_resources
from dataloader.supervisor.restarts import RestartBudget, keep_running
from dataloader.supervisor.watchdog import watch_loop

log = get_logger(__name__)

SERVER: Final = RestartBudget(5, 60)
SERVICE: Final = RestartBudget(10, 60)
WEB: Final = RestartBudget(5, 60)
HELPER: Final = RestartBudget(10, 60)
LISTENER: Final = RestartBudget(20, 60)
CLAIMS: Final = RestartBudget(20, 60)
WEB_END_S: Final = 8.0
"""Seconds for open HTTP requests and the HTTP server's shutdown."""
LEAVE_S: Final = 3.0
"""Seconds for the last writes, above all to free the keys and remove the worker's row."""


async def live(
    parts: Parts,
    *,
    migrate: bool,
    gave_up: Callable[[ActorGaveUp], None],
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run the whole tree until it is drained. Calls `started` when the database is ready and every queue claims.

    Raises `SchemaError` and `ConfigError` if the database cannot serve this process.
    """
    keep = partial(keep_running, gave_up=gave_up)
    async with trio.open_nursery() as web:
        if parts.web is not None:
            web.start_soon(keep, "web", parts.web, WEB)
            web.start_soon(_answer_waits, parts)
        async with trio.open_nursery() as cutting:
            async with trio.open_nursery() as services:
                services.start_soon(watch_loop, parts.telemetry, parts.overdue.loop_blocked)
                if parts.server is not None:
                    services.start_soon(keep, "the embedded PostgreSQL", parts.server, SERVER)
                if await _prepare(parts, migrate=migrate):
                    services.start_soon(keep, "heartbeat", parts.heartbeat.run, SERVICE)
                    services.start_soon(keep, "overdue", parts.overdue.run, SERVICE)
                    services.start_soon(keep, "keeper", parts.keeper.run, SERVICE)
                    services.start_soon(keep, "releaser", parts.releaser.run, SERVICE)
                    services.start_soon(keep, "children", parts.children.run, SERVICE)
                    services.start_soon(keep, "clusters", parts.clusters.run, SERVICE)
                    await _work_with_resources(parts, keep, cutting, task_status)
                else:
                    task_status.started()
                services.cancel_scope.cancel()
            cutting.cancel_scope.cancel()
        parts.over.set()
        web.cancel_scope.deadline = trio.current_time() + WEB_END_S


async def _work_with_resources(
    parts: Parts,
    keep: Callable[..., Awaitable[None]],
    cutting: trio.Nursery,
    task_status: trio.TaskStatus[None],
) -> None:
    """Open the tasks' resources before the first claim, and close them after the last write."""
    try:
        async with open_resources(parts.tasks, until=parts.drain.requested) as opened:
            parts.services.resources.update(opened.resources)
            parts.services.aio = opened.aio
            await _work_with_later_resources(parts, keep, cutting, task_status)
            await parts.children.close()
            parts.clusters.close()
            await _leave(parts)
    except (Draining, ConfigError) as error:
        await _leave(parts)  # noqa: ASYNC120 - the root of the tree is never cancelled
        if isinstance(error, ConfigError):
            raise
        task_status.started()


async def _work_with_later_resources(  # noqa: ASYNC128 - `_work` calls it
    parts: Parts,
    keep: Callable[..., Awaitable[None]],
    cutting: trio.Nursery,
    task_status: trio.TaskStatus[None],
) -> None:
    """Hold the resources of tasks that are added later, until the last write or, if adding them fails, until `closing`.

    They are closed in the same order as resources that were there at the start: the last ones first.
    """
    held: list[tuple[trio.Event, trio.Event]] = []

    async def hold(tasks: Tasks, closing: trio.Event, *, task_status: trio.TaskStatus[Opened]) -> None:
        async with open_resources(tasks, until=parts.drain.requested, aio=parts.services.aio) as opened:
            task_status.started(opened)
            closed = trio.Event()
            held.append((closing, closed))
            await closing.wait()
        closed.set()

    async with trio.open_nursery() as later:
        parts.hold_resources = partial(later.start, hold)
        await _work(parts, keep, cutting, task_status)
        for closing, closed in reversed(held):
            closing.set()
            await closed.wait()


async def _work(
    parts: Parts,
    keep: Callable[..., Awaitable[None]],
    cutting: trio.Nursery,
    task_status: trio.TaskStatus[None],
) -> None:
    """Run the recorder, the helpers and the queues, until they are drained.

    Writes are shielded, so a cancel scope's deadline would not end them: a task in `cutting` closes the connections.
    """
    async with trio.open_nursery() as recording:
        await recording.start(parts.recorder.run, parts.to_record)
        with parts.services.to_recorder:
            async with trio.open_nursery() as helpers:
                for name, helper in parts.helpers.items():
                    helpers.start_soon(keep, name, helper, LISTENER if name == "listener" else HELPER)
                parts.start_helper = lambda name, helper: helpers.start_soon(keep, name, helper, HELPER)
                async with trio.open_nursery() as queues:

                    async def start(dispatcher: Dispatcher) -> None:
                        keep_claims = partial(keep, f"the claims of {dispatcher.queue}", budget=CLAIMS)
                        await queues.start(dispatcher.run, keep_claims)

                    for dispatcher in parts.dispatchers:
                        await start(dispatcher)
                    parts.start_claims, parts.start_removal = start, queues.start_soon
                    parts.ready = True
                    task_status.started()
                    report = await parts.drain.carry_out(parts.dispatchers, parts.recorder, parts.keeper)
                    parts.reported(report)
                    if report.unrecorded and not report.stuck:
                        await parts.cut_off()
                    # A check of parked jobs may still wait for its answer, hence the pause. While a handler is stuck,
                    # the connections stay open, however long it runs, so that its outcome can be written.
                    if not report.stuck:
                        cutting.start_soon(_cut_off_after, parts, LEAVE_S)
                if report.stuck:
                    cutting.start_soon(_cut_off_after, parts, LEAVE_S)
                helpers.cancel_scope.cancel()


def _migration_log() -> Callable[[str], None]:
    """Return a function that logs names of migrations, at level debug for an empty database, which takes a second."""
    is_empty = False

    def log_name(name: str) -> None:
        nonlocal is_empty
        is_empty = is_empty or name.startswith("0001")
        level = log.debug if is_empty else log.info
        if name.endswith("indexes"):
            level("building indexes, which waits for all older transactions", migration=name)
        else:
            level("the schema is being migrated", migration=name)

    return log_name


async def _cut_off_after(parts: Parts, pause_s: float) -> None:
    await trio.sleep(pause_s)
    await parts.cut_off()


async def _answer_waits(parts: Parts) -> None:
    await parts.drain.requested.wait()
    parts.answer_waits()


async def _prepare(parts: Parts, *, migrate: bool) -> bool:
    """Wait for the database, migrate its schema and check its capacity. Return False if a drain began first."""
    prepared = False
    version: int | None = None
    pauses = Pauses(0.2, 5.0)
    async with trio.open_nursery() as nursery:

        async def stop_waiting() -> None:
            await parts.drain.requested.wait()
            nursery.cancel_scope.cancel()

        nursery.start_soon(stop_waiting)
        while not prepared:
            try:
                if version is None:
                    version = await check_server(parts.database)
                if migrate:
                    applied = await migrations.migrate(parts.database, tell=_migration_log())
                    if applied:
                        log.info("the schema is up to date", migrations=len(applied), newest=applied[-1])
                else:
                    await migrations.check(parts.database)
                await parts.locks.ping(parts.runs.shortest_lease_s())
                check_capacity(parts.locks, sum(dispatcher.slots.count for dispatcher in parts.dispatchers))
                await declare(parts.database, parts.tasks, parts.worker.name, stores_schedules=parts.stores_schedules)
                await know_sinks(parts.database, parts.settings.sinks)
                await parts.retry_delays.learn()
                # Before the first claim, so that readers do not see these queues without a worker.
                await parts.database.write(aio_show, parts.worker)
                parts.outage.worked("start")
                prepared = True
            except StoreUnavailable as error:
                pause_s = pauses.next()
                parts.outage.failed("start", error, again_in_s=round(pause_s, 1))
                await trio.sleep(pause_s)
        nursery.cancel_scope.cancel()
    if version is not None and version > TESTED:
        log.warning(
            "this version of PostgreSQL is newer than the tested versions", version=version, newest_tested=TESTED
        )
    return prepared


async def _leave(parts: Parts) -> None:
    """Free the last keys, wake their next jobs, and remove the worker's row. Other workers can do without either."""
    try:
        await parts.locks.release()
        await parts.heartbeat.leave()
    except StoreError as error:
        log.warning("the process could not sign off from the database", error=str(error))

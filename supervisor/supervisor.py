"""Supervisor for a Trio program: `async with open_supervisor(settings, tasks) as supervisor`.

It runs inside any Trio run, with or without a trio-asyncio loop of the host, and handles no signals. The tree runs in
one shielded task, so that its jobs are released even if the host is cancelled. Leaving the block drains. Leaving it by
an error or a cancellation stops the jobs immediately. Both end within the drain's bound, except for handlers that never
stop: those are reported and waited for, since a Trio program cannot leave a thread behind.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import trio

from dataloader.actors.job_runs import Run
from dataloader.actors.signals import Signals
from dataloader.jobs.client.bulk import Bulk
from dataloader.jobs.client.client import Client
from dataloader.jobs.client.jobs import Jobs
from dataloader.jobs.client.limits import Limits
from dataloader.jobs.client.loads import Loads
from dataloader.jobs.client.processes import ProcessClient
from dataloader.jobs.client.schedules import Schedules
from dataloader.jobs.error_groups import first_error
from dataloader.jobs.errors import ActorGaveUp, ConfigError, Draining, SchemaError
from dataloader.jobs.logger import get_logger
from dataloader.jobs.tasks import Tasks
from dataloader.store.connection.bridge import Database
from dataloader.store.embedded.postgres import EmbeddedPostgres
from dataloader.supervisor.changes import Changes
from dataloader.supervisor.drain import DrainReport
from dataloader.supervisor.open_parts import open_parts
from dataloader.supervisor.parts import Parts
from dataloader.supervisor.setting_lists import Worker
from dataloader.supervisor.settings import Settings
from dataloader.supervisor.tree import live
from dataloader.web.services import ServiceState

log = get_logger(__name__)


class Supervisor:
    """Running supervisor. Created by `open_supervisor`."""

    def __init__(self, parts: Parts, signals: Signals | None = None) -> None:
        """Wrap `parts` that are open; `live` runs them."""
        self._parts = parts
        self.signals = signals
        self._changes = Changes(parts)
        self._started = trio.Event()
        self._drained = trio.Event()
        self._impossible: Exception | None = None
        self.failure: ActorGaveUp | None = None
        self.report: DrainReport | None = None

    @property
    def url(self) -> str | None:
        """Address of the HTTP API; None without `with_web`."""
        return self._parts.url

    @property
    def worker(self) -> str:
        """Name of this process, as in `claimed_by`."""
        return self._parts.worker.name

    @property
    def state(self) -> ServiceState:
        """Current state of this process, as in `/status`: its queues with slots, its listener, its message sources."""
        return self._parts.state()

    @property
    def client(self) -> Client:
        """Client as from `open_client`, over the supervisor's database. The audit log names the worker."""
        return Client.over(self._parts.performer)

    @property
    def jobs(self) -> Jobs:
        """Jobs and queues, over the supervisor's database. Once a drain has begun, `enqueue` raises `Draining`.

        The audit log names the worker as the operator; with `jobs.signed(Operator(name))` it has another name.
        """
        return Jobs(self._parts.performer)

    @property
    def schedules(self) -> Schedules:
        """Schedules, over the supervisor's database. The audit log names the worker as the operator."""
        return Schedules(self._parts.performer)

    @property
    def bulk(self) -> Bulk:
        """Bulk operations. The audit log names the worker as the operator."""
        return Bulk(self._parts.performer)

    @property
    def limits(self) -> Limits:
        """Limits of tasks and suppliers, over the supervisor's database.

        The audit log names the worker as the operator.
        """
        return Limits(self._parts.performer)

    @property
    def loads(self) -> Loads:
        """Loads, their runs and their failures, over the supervisor's database."""
        return Loads(self._parts.performer)

    @property
    def processes(self) -> ProcessClient:
        """Durable processes, over the supervisor's database. The audit log names the worker as the operator."""
        return ProcessClient(self._parts.performer)

    @property
    def database(self) -> Database:
        """Database of the queue, for the functions of `dataloader.store`."""
        return self._parts.database

    async def add_tasks(self, tasks: Tasks) -> None:
        """Add all declarations of `tasks`, as if they had been there at the start. Return when they are in effect.

        Resources are opened, limits and schedules are stored, and jobs that have waited for the tasks become ready. An
        entry that names its tasks does not change.

        Raises:
            ValueError: a name is taken, or limits contradict each other (`BadRequest`). Nothing has changed then, nor
                after the other errors.
            ConfigError: a resource could not be opened, or a child process would not find a function.
            Draining: a drain has begun.
            StoreUnavailable: the database cannot be reached; it may have stored the declarations.
        """
        await self._changes.add_tasks(tasks)

    async def add_queue(self, queue: str, concurrency: int, *, tasks: Sequence[str] | None = None) -> None:
        """Run up to `concurrency` jobs of a queue concurrently, from now on. With `tasks`, only jobs of those tasks.

        Raises `ConfigError` for an entry that `Settings.workers` would refuse at the start, and `Draining`.
        """
        await self._changes.add_queue(Worker(queue, concurrency, None if tasks is None else tuple(tasks)))

    async def remove_queue(self, queue: str) -> tuple[str, ...]:
        """Claim no more jobs of a queue, let the running ones finish within the drain's timeout, and release the rest.

        Return the IDs of jobs whose handlers do not stop, usually none. A cancellation ends the wait, not the removal.

        Raises `BadRequest` for a queue that is not served, and `Draining`.
        """
        return await self._changes.remove_queue(queue)

    async def drain(self) -> DrainReport:
        """Claim no new jobs, let running ones finish within the drain's timeout, and release the rest. Report."""
        self._parts.drain.request()
        return await self.wait_drained()

    def request_drain(self) -> None:
        """Begin a drain without waiting for it."""
        self._parts.drain.request()

    def hurry(self) -> None:
        """Stop the running jobs now and release them. Begins a drain if none has begun."""
        self._parts.drain.hurry()

    async def wait_draining(self) -> None:
        """Return when a drain has begun, for any reason."""
        await self._parts.drain.requested.wait()

    async def wait_drained(self) -> DrainReport:
        """Return the report when a drain has ended. Does not begin one."""
        await self._drained.wait()
        return self.report or DrainReport(0, 0, (), 0)

    async def ready(self) -> None:
        """Return when the database is ready and every queue claims.

        Raises `SchemaError` or `ConfigError` if that is impossible, or `Draining` if a drain began first.
        """
        await self._started.wait()
        if self._impossible is not None:
            raise self._impossible
        if not self._parts.ready:
            raise Draining("the supervisor was drained before the database was ready")

    async def live(self, *, migrate: bool) -> None:
        """Run the tree until it ends. Called once, by `open_starting`."""
        try:
            async with trio.open_nursery() as nursery:
                self._parts.reported = self._reported
                await nursery.start(partial(live, self._parts, migrate=migrate, gave_up=self._gave_up))
                self._started.set()
        except* (SchemaError, ConfigError) as group:
            self._impossible = first_error(group)
        finally:
            self._started.set()
            self._drained.set()

    def _reported(self, report: DrainReport) -> None:
        self.report = report
        self._drained.set()

    def _gave_up(self, error: ActorGaveUp) -> None:
        log.critical("a part of the supervisor gave up; draining and exiting", cause=str(error))
        self.failure = self.failure or error
        self._parts.drain.request()


def _say_unstoppable(run: Run) -> None:
    log.critical("a handler continues without a lease; another worker may run its job", job_id=str(run.job.job_id))


@asynccontextmanager
async def open_starting(
    settings: Settings,
    tasks: Tasks,
    *,
    with_web: bool,
    server: EmbeddedPostgres | None = None,
    unstoppable: Callable[[Run], None] = _say_unstoppable,
    stores_schedules: bool = True,
    signals: Signals | None = None,
) -> AsyncIterator[Supervisor]:
    """Open a supervisor as `open_supervisor` does, but enter the block while it may still wait for its database.

    For callers that must be able to end it meanwhile.
    """
    failure: Exception | None = None
    if settings.pipeline.of_one:
        _point_out_unknown_loads(settings, tasks)
    async with trio.open_nursery() as nursery:

        async def run(*, task_status: trio.TaskStatus[Supervisor]) -> None:
            # Bounded by the drain that leaving the block begins.
            with trio.CancelScope(shield=True):
                opening = open_parts(
                    settings,
                    tasks,
                    with_web=with_web,
                    server=server,
                    unstoppable=unstoppable,
                    stores_schedules=stores_schedules,
                    signals=signals,
                )
                async with opening as parts:
                    supervisor = Supervisor(parts, signals)
                    task_status.started(supervisor)
                    await supervisor.live(migrate=settings.migrate)

        try:
            # A cancellation here would leave it running without an owner. `started` is called without a wait.
            with trio.CancelScope(shield=True):
                supervisor: Supervisor = await nursery.start(run)
            try:
                yield supervisor
            except BaseException:
                supervisor.hurry()
                raise
            supervisor.request_drain()
        except Exception as error:  # noqa: BLE001 - raised again below, outside this nursery's exception group
            failure = error
    failure = failure or supervisor.failure
    if failure is not None:
        raise failure


def _point_out_unknown_loads(settings: Settings, tasks: Tasks) -> None:
    """Warn about settings for a load that does not exist (a misspelled name), unless the process has no loads."""
    from dataloader.flows.etl.flow.flow import loads_of  # noqa: PLC0415 - only processes with such settings need it

    if loads := loads_of(tasks):
        for sentence in settings.pipeline.of_no_load(loads):
            log.warning(sentence)


@asynccontextmanager
async def open_supervisor(
    settings: Settings,
    tasks: Tasks,
    *,
    with_web: bool = False,
    server: EmbeddedPostgres | None = None,
    stores_schedules: bool = True,
    signals: Signals | None = None,
) -> AsyncIterator[Supervisor]:
    """Open a supervisor for the duration of a block. It claims and runs jobs, and with `with_web` serves the HTTP API.

    `settings.db_dsn` must be set. Without your own database, use that of `embedded_postgres` and pass it as `server`:
    the supervisor then restarts it if it ends. A process that only runs one job passes `stores_schedules=False`: the
    stored schedules stay, whatever its program declares. `signals`, for tests, report the supervisor's actions
    (`dataloader.testing.Signals`).

    Raises `SchemaError` or `ConfigError` if it cannot work with the database, `AddressError` if the HTTP address is in
    use, and `ActorGaveUp` at the end if a part gave up.
    """
    starting = open_starting(
        settings, tasks, with_web=with_web, server=server, stores_schedules=stores_schedules, signals=signals
    )
    async with starting as supervisor:
        await supervisor.ready()
        yield supervisor

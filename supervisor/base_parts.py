"""Parts that most other parts of a process need: its name, tasks, runs, locks, libraries and drain."""

from __future__ import annotations

import os
import secrets
from functools import partial

import attrs

from dataloader.actors.job_runs import Runs
from dataloader.actors.outage import Outage
from dataloader.actors.outbox_poster import OutboxPoster
from dataloader.actors.signals import Signals
from dataloader.flows.libraries import Libraries, libraries_of
from dataloader.jobs.contract import Operator
from dataloader.jobs.outcomes import StopReason
from dataloader.jobs.process_outbox import MESSAGES, ProcessOutbox, sink_task
from dataloader.jobs.tasks import Tasks
from dataloader.jobs.telemetry import Telemetry
from dataloader.store.connection.bridge import Database
from dataloader.store.queue.enqueuer import Enqueuer
from dataloader.store.queue.lock_session import LockSession
from dataloader.supervisor.drain import Drain
from dataloader.supervisor.settings import Settings


@attrs.frozen(kw_only=True)
class BaseParts:
    """Parts that most other parts need."""

    settings: Settings
    tasks: Tasks
    database: Database
    signals: Signals | None
    name: str
    runs: Runs
    locks: LockSession
    drain: Drain
    enqueuer: Enqueuer
    poster: OutboxPoster
    libraries: Libraries
    stores_schedules: bool
    outage: Outage = attrs.field(factory=Outage)
    telemetry: Telemetry = attrs.field(factory=Telemetry)

    @property
    def operator(self) -> Operator:
        """Name of this process in the audit."""
        return Operator(self.name)


def base_parts(
    settings: Settings, tasks: Tasks, database: Database, *, stores_schedules: bool, signals: Signals | None
) -> BaseParts:
    """Make the shared parts of a process."""
    name = f"{settings.instance}:{os.getpid()}:{secrets.token_hex(4)}"
    runs, outage = Runs(settings.default_lease_s), Outage()
    poster, libraries = _libraries(settings, database, outage)
    return BaseParts(
        settings=settings,
        tasks=tasks,
        database=database,
        signals=signals,
        name=name,
        runs=runs,
        outage=outage,
        locks=LockSession(database, name, lost=partial(_keys_lost, runs)),
        drain=Drain(runs, settings.drain_timeout_s),
        enqueuer=Enqueuer(database, default_lease_s=settings.default_lease_s),
        poster=poster,
        libraries=libraries,
        stores_schedules=stores_schedules,
    )


def _keys_lost(runs: Runs, tokens: list[int]) -> None:
    for token in tokens:
        run = runs.by_token(token)
        if run is not None:
            run.stop(StopReason.KEY_LOST)


def _libraries(settings: Settings, database: Database, outage: Outage) -> tuple[OutboxPoster, Libraries]:
    """Return the deliverer of process events, and the libraries on top of the queue."""
    poster = OutboxPoster(
        database=database, outage=outage, sinks=settings.sinks, default_lease_s=settings.default_lease_s
    )
    return poster, libraries_of(
        attrs.evolve(settings.pipeline, tables_at_once=settings.tables_at_once),
        settings.sinks,
        ProcessOutbox(poster.wake.set, bool(settings.sinks), settings.default_lease_s),
    )


def has_outbox(settings: Settings, tasks: Tasks) -> bool:
    """Return True if durable processes may produce events or messages that this process can deliver."""
    return bool(settings.sinks) or sink_task(MESSAGES) in tasks

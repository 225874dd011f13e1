"""Creates every part of a process from its settings and connects them; tree.py then runs them.

Base parts, parts that run jobs, parts that hold leases, clients and helpers are created in this order, each group in
its own module. Only these modules know which part calls which. No code here runs a part or waits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from dataloader.actors.job_runs import Run
from dataloader.actors.signals import Signals
from dataloader.flows.notify.tasks import TASKS as NOTIFY_TASKS
from dataloader.flows.processes.deliver import webhook_tasks
from dataloader.jobs.message_source import MessageReader, MessageSource
from dataloader.jobs.tasks import Tasks
from dataloader.store.connection.bridge import Database
from dataloader.supervisor.base_parts import base_parts
from dataloader.supervisor.entries import check_tasks
from dataloader.supervisor.helper_parts import helper_parts
from dataloader.supervisor.lease_parts import lease_parts
from dataloader.supervisor.own_performer import own_performer
from dataloader.supervisor.parts import Parts
from dataloader.supervisor.running_parts import running_parts
from dataloader.supervisor.settings import Settings


def make_parts(
    settings: Settings,
    tasks: Tasks,
    database: Database,
    *,
    unstoppable: Callable[[Run], None],
    stores_schedules: bool = True,
    signals: Signals | None = None,
) -> Parts:
    """Return all parts of a process that serves the settings' entries over an open database."""
    check_tasks(settings.workers, tasks)
    # A separate registry, since the supervisor may add tasks to it.
    tasks = tasks.beside([*(NOTIFY_TASKS if settings.notify else ()), *webhook_tasks(settings.sinks)])
    base = base_parts(settings, tasks, database, stores_schedules=stores_schedules, signals=signals)
    running = running_parts(base)
    leases = lease_parts(base, running, unstoppable)
    performer = own_performer(base, running)
    # Messages that are read when the drain begins are still enqueued.
    reader = partial(_reader, enqueue=base.enqueuer.enqueue, consumer=base.name, draining=base.drain.requested.is_set)
    readers = [reader(source) for source in tasks.message_sources]
    listener, helpers = helper_parts(base, running, leases, performer.waits)
    return Parts(
        settings=settings,
        tasks=tasks,
        worker=running.worker,
        database=database,
        performer=performer,
        runs=base.runs,
        outage=base.outage,
        locks=base.locks,
        telemetry=base.telemetry,
        services=running.services,
        retry_delays=running.retry_delays,
        period_ends=leases.period_ends,
        to_record=running.to_record,
        entries=running.entries,
        recorder=leases.recorder,
        heartbeat=leases.heartbeat,
        overdue=leases.overdue,
        keeper=running.keeper,
        releaser=leases.releaser,
        children=running.children,
        clusters=running.clusters,
        helpers=helpers | {f"messages of {reader.state.source}": reader.run for reader in readers},
        listener=listener,
        readers=readers,
        reader=reader,
        drain=base.drain,
        stores_schedules=base.stores_schedules,
        measures=(*base.telemetry.measures, *base.libraries.measures),
    )


def _reader(source: MessageSource, **services: Any) -> MessageReader:
    return source.reader(**services)

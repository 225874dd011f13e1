"""Parts that claim jobs and run their handlers."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any

import attrs
import trio

from dataloader.actors.children.pool import Children
from dataloader.actors.cluster.clusters import Clusters
from dataloader.actors.cluster.connection import Tls
from dataloader.actors.direct_start import DirectStart
from dataloader.actors.dispatcher import Dispatcher
from dataloader.actors.lock_session_keeper import Keeper
from dataloader.actors.recorder import open_channel
from dataloader.actors.recorder_messages import ToRecord
from dataloader.actors.retry_delays import RetryDelays
from dataloader.actors.run_services import RunServices
from dataloader.actors.slots import Slots
from dataloader.jobs.notices import QUEUE as NOTIFICATIONS
from dataloader.jobs.notices import SLOTS as NOTIFICATION_SLOTS
from dataloader.jobs.notices import Targets
from dataloader.jobs.process_outbox import QUEUE as DELIVERIES
from dataloader.jobs.process_outbox import SLOTS as DELIVERY_SLOTS
from dataloader.jobs.program_version import program_version
from dataloader.jobs.task import Task
from dataloader.jobs.tasks import Tasks
from dataloader.jobs.telemetry import Telemetry
from dataloader.store.connection.bridge import Database
from dataloader.store.processes.answers import Answers
from dataloader.store.queue.transaction import Transactions
from dataloader.store.queue.worker_rows import WorkerRow
from dataloader.supervisor.base_parts import BaseParts, has_outbox
from dataloader.supervisor.entries import Entries
from dataloader.supervisor.setting_lists import Worker
from dataloader.supervisor.settings import Settings


@attrs.frozen(kw_only=True)
class RunningParts:
    """Parts between a claim and the recorder."""

    services: RunServices
    answers: Answers
    retry_delays: RetryDelays
    children: Children
    clusters: Clusters
    keeper: Keeper
    entries: Entries
    worker: WorkerRow
    to_record: trio.MemoryReceiveChannel[ToRecord]


def running_parts(base: BaseParts) -> RunningParts:
    """Return the parts that claim and run jobs of the served entries."""
    settings, tasks, database = base.settings, base.tasks, base.database
    to_recorder, to_record = open_channel()
    transactions = Transactions(database, default_lease_s=settings.default_lease_s)
    retry_delays = RetryDelays(database=database, tasks=tasks, outage=base.outage, signals=base.signals)
    answers = Answers(database)
    children = Children(
        tasks=tasks, grace_s=settings.child_grace_s, idle_s=settings.child_idle_s, telemetry=base.telemetry
    )
    clusters = _clusters(settings, tasks, base.telemetry)
    services = RunServices(
        to_recorder=to_recorder,
        transactions=transactions,
        enqueuer=base.enqueuer,
        telemetry=base.telemetry,
        max_lines=settings.log_lines_per_job,
        logged_from=settings.job_log_level,
        retry_delays=retry_delays.by_task,
        resources={
            Database: database,
            Transactions: transactions,
            Answers: answers,
            Targets: Targets({target.name: target for target in settings.notify}),
            **base.libraries.resources,
        },
        around=tasks.wraps,
        children=children,
        clusters=clusters,
    )
    keeper = Keeper(
        locks=base.locks, runs=base.runs, outage=base.outage, period_s=settings.heartbeat_s, signals=base.signals
    )
    entries = _entries(base, services, keeper)
    base.enqueuer.starter = DirectStart(tasks=tasks, dispatchers=entries.direct, locks=base.locks)
    return RunningParts(
        services=services,
        answers=answers,
        retry_delays=retry_delays,
        children=children,
        clusters=clusters,
        keeper=keeper,
        entries=entries,
        worker=WorkerRow(
            base.name, socket.gethostname(), os.getpid(), program_version(), entries.slots, tasks, entries.only_tasks
        ),
        to_record=to_record,
    )


def _entries(base: BaseParts, services: RunServices, keeper: Keeper) -> Entries:
    """Return the served entries, each with its dispatcher and slots."""
    settings = base.settings

    def dispatcher(entry: Worker, of_entry: Mapping[str, Task[Any]]) -> Dispatcher:
        return Dispatcher(
            queue=entry.queue,
            slots=Slots(queue=entry.queue, count=entry.concurrency, tasks=of_entry, runs=base.runs, services=services),
            database=base.database,
            locks=base.locks,
            answered=keeper.answered,
            outage=base.outage,
            tasks=of_entry,
            telemetry=base.telemetry,
            backoff_s=settings.claim_backoff_s,
            poll_s=settings.poll_s,
            by_lanes=entry.tasks is not None,
            signals=base.signals,
        )

    entries = Entries(tasks=base.tasks, make=dispatcher)
    for entry in _workers_served(settings, base.tasks):
        entries.add(entry)
    return entries


def _clusters(settings: Settings, tasks: Tasks, telemetry: Telemetry) -> Clusters:
    return Clusters(
        tasks=tasks,
        default=settings.dask,
        tls=Tls.of(settings.dask_tls_ca, settings.dask_tls_cert, settings.dask_tls_key),
        instance=settings.instance,
        grace_s=settings.child_grace_s,
        idle_s=settings.child_idle_s,
        max_lines=settings.log_lines_per_job,
        telemetry=telemetry,
    )


def _workers_served(settings: Settings, tasks: Tasks) -> list[Worker]:
    """Return the entries of the settings, and those for notifications and deliveries."""
    named = {entry.queue for entry in settings.workers}
    own = [
        *([Worker(NOTIFICATIONS, NOTIFICATION_SLOTS)] if settings.notify else []),
        *([Worker(DELIVERIES, DELIVERY_SLOTS)] if has_outbox(settings, tasks) else []),
    ]
    return [*settings.workers, *(entry for entry in own if entry.queue not in named)]

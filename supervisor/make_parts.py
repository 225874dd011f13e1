"""Makes every part of a process from its settings and connects them; tree.py then runs them.

The one place that knows which part calls which. Nothing here runs or waits.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs

from dataloader.actors.bulk import BulkWorker
from dataloader.actors.children.pool import Children
from dataloader.actors.cluster.clusters import Clusters
from dataloader.actors.cluster.connection import Tls
from dataloader.actors.direct_start import DirectStart
from dataloader.actors.dispatcher import Dispatcher
from dataloader.actors.heartbeat import Heartbeat
from dataloader.actors.history_watch import HistoryWatch
from dataloader.actors.job_runs import Run, Runs
from dataloader.actors.listener import Listener
from dataloader.actors.lock_session_keeper import Keeper
from dataloader.actors.notifier import Notifier
from dataloader.actors.outage import Outage
from dataloader.actors.outbox_poster import OutboxPoster
from dataloader.actors.overdue import OverdueWatch
from dataloader.actors.period_ends import PeriodEnds
from dataloader.actors.poller import Poller
from dataloader.actors.pruner import Pruner
from dataloader.actors.reaper import Reaper
from dataloader.actors.recorder import Recorder, open_channel
from dataloader.actors.releaser import Releaser
from dataloader.actors.retry_delays import RetryDelays
from dataloader.actors.run_services import RunServices
from dataloader.actors.run_sums import RunSums
from dataloader.actors.scheduler import Scheduler
from dataloader.actors.signals import Signals
from dataloader.actors.slots import Slots
from dataloader.actors.stager import Stager
from dataloader.actors.wake import Wake
from dataloader.flows.libraries import Libraries, libraries_of
from dataloader.flows.notify.tasks import TASKS as NOTIFY_TASKS
from dataloader.flows.processes.deliver import webhook_tasks
from dataloader.jobs.contract import Operator
from dataloader.jobs.message_source import MessageReader, MessageSource
from dataloader.jobs.notices import QUEUE as NOTIFICATIONS
from dataloader.jobs.notices import SLOTS as NOTIFICATION_SLOTS
from dataloader.jobs.notices import Targets
from dataloader.jobs.outcomes import StopReason
from dataloader.jobs.process_outbox import MESSAGES, ProcessOutbox, Sink, sink_task
from dataloader.jobs.process_outbox import QUEUE as DELIVERIES
from dataloader.jobs.process_outbox import SLOTS as DELIVERY_SLOTS
from dataloader.jobs.process_telemetry import ProcessTelemetry
from dataloader.jobs.program_version import program_version
from dataloader.jobs.states import Status
from dataloader.jobs.tasks import Task, Tasks
from dataloader.jobs.telemetry import Telemetry
from dataloader.store.connection.bridge import Database, Session
from dataloader.store.limits.database_limits import DatabaseLimits
from dataloader.store.processes.answers import Answers
from dataloader.store.processes.database_processes import DatabaseProcesses
from dataloader.store.processes.outbox_rows import know_sinks
from dataloader.store.queue.bulk import DatabaseBulkActs
from dataloader.store.queue.database_jobs import DatabaseJobs
from dataloader.store.queue.enqueuer import Enqueuer
from dataloader.store.queue.leases import aio_rehearse
from dataloader.store.queue.lock_session import LockSession
from dataloader.store.queue.queue_states import ServedQueues
from dataloader.store.queue.transaction import Transactions
from dataloader.store.queue.waits import Waits
from dataloader.store.queue.worker_rows import WorkerRow
from dataloader.store.schedules.database_schedules import DatabaseSchedules
from dataloader.supervisor.declare import declare
from dataloader.supervisor.drain import Drain
from dataloader.supervisor.entries import Entries, check_tasks
from dataloader.supervisor.parts import Parts
from dataloader.supervisor.setting_lists import Worker
from dataloader.supervisor.settings import Settings


def make_parts(
    settings: Settings,
    tasks: Tasks,
    database: Database,
    *,
    unstoppable: Callable[[Run], None],
    signals: Signals | None = None,
) -> Parts:
    """All parts of a process that serves the settings' entries over an open database."""
    name = f"{settings.instance}:{os.getpid()}:{secrets.token_hex(4)}"
    check_tasks(settings.workers, tasks)
    # A registry of our own: the supervisor may add tasks to it.
    tasks = tasks.beside([*(NOTIFY_TASKS if settings.notify else ()), *webhook_tasks(settings.sinks)])
    runs = Runs(settings.default_lease_s)
    outage = Outage()
    locks = LockSession(database, name, lost=partial(_keys_lost, runs))
    telemetry = Telemetry()
    poster, libraries = _libraries(settings, database, outage)
    to_recorder, to_record = open_channel()
    transactions = Transactions(database, default_lease_s=settings.default_lease_s)
    enqueuer = Enqueuer(database, default_lease_s=settings.default_lease_s)
    retry_delays = RetryDelays(database=database, tasks=tasks, outage=outage, signals=signals)
    answers = Answers(database)
    children = Children(tasks=tasks, grace_s=settings.child_grace_s, idle_s=settings.child_idle_s, telemetry=telemetry)
    clusters = _clusters(settings, tasks, telemetry)
    services = RunServices(
        to_recorder=to_recorder,
        transactions=transactions,
        enqueuer=enqueuer,
        telemetry=telemetry,
        max_lines=settings.log_lines_per_job,
        logged_from=settings.job_log_level,
        retry_delays=retry_delays.by_task,
        resources={
            Database: database,
            Transactions: transactions,
            Answers: answers,
            Targets: Targets({target.name: target for target in settings.notify}),
            **libraries.resources,
        },
        around=tasks.wraps,
        children=children,
        clusters=clusters,
    )
    keeper = Keeper(locks=locks, runs=runs, outage=outage, period_s=settings.heartbeat_s, signals=signals)

    def dispatcher(entry: Worker, of_entry: Mapping[str, Task[Any]]) -> Dispatcher:
        return Dispatcher(
            queue=entry.queue,
            slots=Slots(queue=entry.queue, count=entry.concurrency, tasks=of_entry, runs=runs, services=services),
            database=database,
            locks=locks,
            answered=keeper.answered,
            outage=outage,
            tasks=of_entry,
            telemetry=telemetry,
            backoff_s=settings.claim_backoff_s,
            poll_s=settings.poll_s,
            by_lanes=entry.tasks is not None,
            signals=signals,
        )

    entries = Entries(tasks=tasks, make=dispatcher)
    for entry in _served(settings, tasks):
        entries.add(entry)
    worker = WorkerRow(
        name, socket.gethostname(), os.getpid(), program_version(), entries.slots, tasks, entries.only_tasks
    )
    enqueuer.starter = DirectStart(tasks=tasks, dispatchers=entries.direct, locks=locks)
    releaser = Releaser(locks, outage)
    recording = Session(database, "recorder")
    recorder = Recorder(
        session=recording,
        locks=locks,
        runs=runs,
        outage=outage,
        telemetry=telemetry,
        released=releaser.wake,
        sums=RunSums(recording, outage),
        signals=signals,
    )
    period_ends = PeriodEnds(database=database, outage=outage, runs=runs, tasks=tasks, signals=signals)
    heartbeat = Heartbeat(
        session=Session(database, "heartbeat", on_connect=aio_rehearse),
        locks=locks,
        database=database,
        worker=worker,
        runs=runs,
        outage=outage,
        period_s=settings.heartbeat_s,
        clock_read=period_ends.clock_read,
        signals=signals,
    )
    overdue = OverdueWatch(
        runs=runs, look_s=settings.heartbeat_s, cancel_grace_s=settings.cancel_grace_s, unstoppable=unstoppable
    )

    def attend() -> None:
        heartbeat.wake.set()
        keeper.wake.set()

    runs.attend = attend
    stager = Stager(
        database=database,
        served=entries.groups,
        outage=outage,
        sweep_s=settings.claim_backoff_s,
        poll_s=settings.poll_s,
    )
    scheduler = Scheduler(
        database=database,
        outage=outage,
        telemetry=telemetry,
        poll_s=settings.poll_s,
        default_lease_s=settings.default_lease_s,
    )
    notifier = Notifier(
        database=database, outage=outage, targets=settings.notify, default_lease_s=settings.default_lease_s
    )
    bulk = BulkWorker(database=database, outage=outage)
    waits, drain = Waits(database), Drain(runs, settings.drain_timeout_s)
    jobs = DatabaseJobs(
        database=database,
        operator=Operator(name),
        enqueuer=enqueuer,
        served=ServedQueues(database),
        waits=waits,
        draining=drain.requested.is_set,
    )
    # What is read while the drain begins is still enqueued.
    reader = partial(_reader, enqueue=enqueuer.enqueue, consumer=name, draining=drain.requested.is_set)
    readers = [reader(source) for source in tasks.message_sources]

    def lane_told(lane: str) -> None:
        entries.told(lane)
        if not lane:
            retry_delays.wake.set()
            period_ends.wake.set()

    listener = Listener(
        database=database,
        queues=entries.wakes,
        stager=stager.wake,
        added=stager.added,
        scheduler=scheduler.wake,
        notifier=notifier.wake,
        bulk=bulk.wake,
        heartbeat=heartbeat.wake,
        runs=runs,
        outage=outage,
        waits=waits,
        answers=answers,
        lane_told=lane_told,
        signals=signals,
    )
    anew = partial(_begin_anew, database, tasks, name, settings.sinks, listener)
    history = HistoryWatch(database=database, telemetry=telemetry, changed=anew, signals=signals)
    locks.on_termination, heartbeat.restored = partial(_set_all, keeper.wake, history.wake), history.tables_restored
    return Parts(
        settings=settings,
        tasks=tasks,
        worker=worker,
        database=database,
        jobs=jobs,
        schedules=DatabaseSchedules(
            database=database, operator=Operator(name), default_lease_s=settings.default_lease_s
        ),
        limits=DatabaseLimits(database=database, operator=Operator(name)),
        processes=DatabaseProcesses(
            database=database,
            operator=Operator(name),
            answers=answers,
            telemetry=libraries.resources[ProcessTelemetry],
            default_lease_s=settings.default_lease_s,
            draining=drain.requested.is_set,
            acted=poster.wake.set if settings.sinks else None,
        ),
        bulk=DatabaseBulkActs(database=database, operator=Operator(name)),
        runs=runs,
        outage=outage,
        locks=locks,
        telemetry=telemetry,
        services=services,
        retry_delays=retry_delays,
        period_ends=period_ends,
        to_record=to_record,
        entries=entries,
        recorder=recorder,
        heartbeat=heartbeat,
        overdue=overdue,
        keeper=keeper,
        releaser=releaser,
        children=children,
        clusters=clusters,
        helpers={
            "listener": listener.run,
            "stager": stager.run,
            "scheduler": scheduler.run,
            "bulk acts": bulk.run,
            "retry delays": retry_delays.run,
            "poller": Poller(
                database=database,
                outage=outage,
                poll_s=settings.poll_s,
                dispatchers=entries.dispatchers,
                stager=stager,
                scheduler=scheduler,
                bulk=bulk.wake,
                limits_changed=partial(lane_told, ""),
            ).run,
            "period ends": period_ends.run,
            **({"notifier": notifier.run} if settings.notify else {}),
            **({"outbox": poster.run} if _has_outbox(settings, tasks) else {}),
            "reaper": Reaper(
                database=database,
                outage=outage,
                telemetry=telemetry,
                period_s=settings.reaper_period_s,
                jumped=heartbeat.wake,
                went_back=scheduler.clock_went_back,
                default_lease_s=settings.default_lease_s,
            ).run,
            "history": history.run,
            "pruner": _pruner(settings, database, outage).run,
            **{f"messages of {reader.state.source}": reader.run for reader in readers},
        },
        listener=listener,
        readers=readers,
        reader=reader,
        drain=drain,
        measures=(*telemetry.measures, *libraries.measures),
    )


def _set_all(*wakes: Wake) -> None:
    for wake in wakes:
        wake.set()


async def _begin_anew(database: Database, tasks: Tasks, worker: str, sinks: Sequence[Sink], listener: Listener) -> None:
    """Declare what may be missing in a database that was restored, and have everything looked at again."""
    await declare(database, tasks, worker)
    await know_sinks(database, sinks)
    listener.wake_all()


def _keys_lost(runs: Runs, tokens: list[int]) -> None:
    for token in tokens:
        run = runs.by_token(token)
        if run is not None:
            run.stop(StopReason.KEY_LOST)


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


def _libraries(settings: Settings, database: Database, outage: Outage) -> tuple[OutboxPoster, Libraries]:
    """The libraries on top of the queue, and who posts what their durable processes tell."""
    poster = OutboxPoster(
        database=database, outage=outage, sinks=settings.sinks, default_lease_s=settings.default_lease_s
    )
    return poster, libraries_of(
        attrs.evolve(settings.pipeline, tables_at_once=settings.tables_at_once),
        settings.sinks,
        ProcessOutbox(poster.wake.set, bool(settings.sinks), settings.default_lease_s),
    )


def _pruner(settings: Settings, database: Database, outage: Outage) -> Pruner:
    """The deletion of what is older than the settings keep it."""
    days = {
        Status.SUCCEEDED: settings.retain_succeeded_days,
        Status.FAILED: settings.retain_failed_days,
        Status.CANCELED: settings.retain_canceled_days,
        Status.LOST: settings.retain_lost_days,
    }
    table_days = {
        "dl_audit": settings.retain_audit_days,
        "dl_bulk": settings.retain_audit_days,
        "dl_errors": settings.retain_errors_days,
        "dl_schedule_events": settings.retain_schedule_events_days,
        "dl_run_stats": settings.retain_stats_days,
    }
    return Pruner(
        database=database,
        outage=outage,
        days=days,
        table_days=table_days,
        duplicates_of=settings.cancel_duplicates_of,
        default_lease_s=settings.default_lease_s,
        keep_process_events=settings.keep_process_events,
        process_task_days=settings.retain_process_tasks_days,
    )


def _has_outbox(settings: Settings, tasks: Tasks) -> bool:
    """Whether durable processes may tell something that this process could deliver."""
    return bool(settings.sinks) or sink_task(MESSAGES) in tasks


def _served(settings: Settings, tasks: Tasks) -> list[Worker]:
    """The entries of the settings, and those for notifications and deliveries."""
    named = {entry.queue for entry in settings.workers}
    own = [
        *([Worker(NOTIFICATIONS, NOTIFICATION_SLOTS)] if settings.notify else []),
        *([Worker(DELIVERIES, DELIVERY_SLOTS)] if _has_outbox(settings, tasks) else []),
    ]
    return [*settings.workers, *(entry for entry in own if entry.queue not in named)]


def _reader(source: MessageSource, **services: Any) -> MessageReader:
    return source.reader(**services)

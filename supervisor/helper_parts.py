"""Parts that only have to be kept running: listener, timers, helpers and cleanup."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from dataloader.actors.bulk import BulkWorker
from dataloader.actors.history_watch import HistoryWatch
from dataloader.actors.listener import Listener
from dataloader.actors.notifier import Notifier
from dataloader.actors.outage import Outage
from dataloader.actors.poller import Poller
from dataloader.actors.pruner import Pruner
from dataloader.actors.reaper import Reaper
from dataloader.actors.scheduler import Scheduler
from dataloader.actors.stager import Stager
from dataloader.actors.wake import set_all
from dataloader.jobs.states import Status
from dataloader.store.connection.bridge import Database
from dataloader.store.processes.outbox_rows import know_sinks
from dataloader.store.queue.notifications import BulkBegun, SchedulesChanged, SomethingFailed
from dataloader.store.queue.waits import Waits
from dataloader.supervisor.base_parts import BaseParts, has_outbox
from dataloader.supervisor.declare import declare
from dataloader.supervisor.lease_parts import LeaseParts
from dataloader.supervisor.running_parts import RunningParts
from dataloader.supervisor.settings import Settings


def helper_parts(
    base: BaseParts, running: RunningParts, leases: LeaseParts, waits: Waits
) -> tuple[Listener, dict[str, Callable[[], Awaitable[None]]]]:
    """Return the listener, and all parts that only have to be kept running by name, including the listener."""
    settings, database, outage, signals = base.settings, base.database, base.outage, base.signals
    entries, heartbeat, keeper = running.entries, leases.heartbeat, running.keeper
    stager = Stager(
        database=database,
        outage=outage,
        sweep_s=settings.claim_backoff_s,
        poll_s=settings.poll_s,
    )
    scheduler = Scheduler(
        database=database,
        outage=outage,
        telemetry=base.telemetry,
        poll_s=settings.poll_s,
        default_lease_s=settings.default_lease_s,
    )
    notifier = Notifier(
        database=database, outage=outage, targets=settings.notify, default_lease_s=settings.default_lease_s
    )
    bulk = BulkWorker(database=database, outage=outage)

    def lane_told(lane: str) -> None:
        entries.told(lane)
        if not lane:
            running.retry_delays.wake.set()
            leases.period_ends.wake.set()

    listener = Listener(
        database=database,
        queues=entries.wakes,
        stager=stager.wake,
        added=stager.added,
        heartbeat=heartbeat.wake,
        wakes={SchedulesChanged: scheduler.wake, SomethingFailed: notifier.wake, BulkBegun: bulk.wake},
        runs=base.runs,
        outage=outage,
        waits=waits,
        answers=running.answers,
        lane_told=lane_told,
        signals=signals,
    )
    declared_anew = partial(_declare_anew, base, listener)
    history = HistoryWatch(database=database, telemetry=base.telemetry, changed=declared_anew, signals=signals)
    base.locks.on_termination = partial(set_all, keeper.wake, history.wake)
    heartbeat.restored = history.tables_restored
    poller = Poller(
        database=database,
        outage=outage,
        poll_s=settings.poll_s,
        dispatchers=entries.dispatchers,
        stager=stager,
        scheduler=scheduler,
        bulk=bulk.wake,
        limits_changed=partial(lane_told, ""),
    )
    reaper = Reaper(
        database=database,
        outage=outage,
        telemetry=base.telemetry,
        period_s=settings.reaper_period_s,
        jumped=heartbeat.wake,
        went_back=scheduler.clock_went_back,
        default_lease_s=settings.default_lease_s,
    )
    return listener, {
        "listener": listener.run,
        "stager": stager.run,
        "scheduler": scheduler.run,
        "bulk operations": bulk.run,
        "retry delays": running.retry_delays.run,
        "poller": poller.run,
        "period ends": leases.period_ends.run,
        **({"notifier": notifier.run} if settings.notify else {}),
        **({"outbox": base.poster.run} if has_outbox(settings, base.tasks) else {}),
        "reaper": reaper.run,
        "history": history.run,
        "pruner": _pruner(settings, database, outage).run,
    }


async def _declare_anew(base: BaseParts, listener: Listener) -> None:
    """Declare tasks and sinks again, since a restored database may lack them, and wake all parts."""
    await declare(base.database, base.tasks, base.name, stores_schedules=base.stores_schedules)
    await know_sinks(base.database, base.settings.sinks)
    listener.wake_all()


def _pruner(settings: Settings, database: Database, outage: Outage) -> Pruner:
    """Return the part that deletes rows past their retention."""
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

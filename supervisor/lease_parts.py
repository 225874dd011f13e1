"""Parts that renew leases, record outcomes and release keys."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import attrs

from dataloader.actors.heartbeat import Heartbeat
from dataloader.actors.job_runs import Run
from dataloader.actors.overdue import OverdueWatch
from dataloader.actors.period_ends import PeriodEnds
from dataloader.actors.recorder import Recorder
from dataloader.actors.releaser import Releaser
from dataloader.actors.run_sums import RunSums
from dataloader.actors.wake import set_all
from dataloader.store.connection.bridge import Session
from dataloader.store.queue.leases import aio_rehearse
from dataloader.supervisor.base_parts import BaseParts
from dataloader.supervisor.running_parts import RunningParts


@attrs.frozen(kw_only=True)
class LeaseParts:
    """Parts that a process keeps until all outcomes are recorded."""

    period_ends: PeriodEnds
    releaser: Releaser
    recorder: Recorder
    heartbeat: Heartbeat
    overdue: OverdueWatch


def lease_parts(base: BaseParts, running: RunningParts, unstoppable: Callable[[Run], None]) -> LeaseParts:
    """Return the parts that renew leases and record outcomes."""
    settings, database, outage, runs = base.settings, base.database, base.outage, base.runs
    keeper = running.keeper
    period_ends = PeriodEnds(database=database, outage=outage, runs=runs, tasks=base.tasks, signals=base.signals)
    releaser = Releaser(base.locks, outage)
    session = Session(database, "recorder")
    heartbeat = Heartbeat(
        session=Session(database, "heartbeat", on_connect=aio_rehearse),
        locks=base.locks,
        database=database,
        worker=running.worker,
        runs=runs,
        outage=outage,
        period_s=settings.heartbeat_s,
        clock_read=period_ends.clock_read,
        signals=base.signals,
    )
    runs.attend = partial(set_all, heartbeat.wake, keeper.wake)
    return LeaseParts(
        period_ends=period_ends,
        releaser=releaser,
        recorder=Recorder(
            session=session,
            locks=base.locks,
            runs=runs,
            outage=outage,
            telemetry=base.telemetry,
            released=releaser.wake,
            sums=RunSums(session, outage),
            signals=base.signals,
        ),
        heartbeat=heartbeat,
        overdue=OverdueWatch(
            runs=runs, look_s=settings.heartbeat_s, cancel_grace_s=settings.cancel_grace_s, unstoppable=unstoppable
        ),
    )

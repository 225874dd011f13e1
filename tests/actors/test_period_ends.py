"""End of a work period for the runs of a task that stops them then, without a database (S4)."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
import trio

from dataloader.actors.job_runs import Run, Runs
from dataloader.actors.lease import Lease
from dataloader.actors.outage import Outage
from dataloader.actors.period_ends import PeriodEnds
from dataloader.jobs.ids import uuid7
from dataloader.jobs.model import ClaimedJob
from dataloader.jobs.outcomes import StopReason
from dataloader.jobs.work_periods import WorkPeriods
from dataloader.store.queue.worker_rows import ClockReading

pytestmark = pytest.mark.requirement("S4")

MARGIN_S = 1.0
HOUR_S = 3_600
NIGHT = WorkPeriods.parsed(["DAILY 22:00-06:00"], ZoneInfo("UTC"))
ALWAYS = WorkPeriods.parsed([], ZoneInfo("UTC"))
AT_FIVE = datetime(2026, 11, 23, 5, tzinfo=UTC)


def shows(instant, *, way_s=0.0):
    """Return a reading of the database's clock: `instant` now, or at some moment of the last `way_s` seconds."""
    now = trio.current_time()
    return ClockReading(now - way_s, now, instant)


def begin(runs, token=1):
    """Return a run of the task `t` that has just begun."""
    job = ClaimedJob(
        job_id=uuid7(), token=token, queue="q", task="t", args="{}", lock_key=None, lock_hash=None, partition_key="",
        attempt=1, max_attempts=5, lease_s=60,
    )  # fmt: skip
    run = Run(job=job, lease=Lease(60, math.inf), claimed_at=trio.current_time())
    runs.add(run)
    return run


async def body_of(run):
    """Run a handler that does not end by itself; return the time at which it was stopped."""
    with trio.fail_after(100 * HOUR_S), run.open_scope():
        await trio.sleep_forever()
    return trio.current_time()


def begin_at_five():
    """Return the ends of the periods of the task `t`, at five o'clock, one hour before it closes."""
    ends = PeriodEnds(database=None, outage=Outage(), runs=Runs(), tasks=["t"])
    ends.learned(shows(AT_FIVE), {"t": [(NIGHT, MARGIN_S)]})
    return ends


async def test_a_run_stops_before_the_period_end_and_a_later_run_before_the_next_one(autojump_clock):
    ends = begin_at_five()
    began = trio.current_time()
    first = begin(ends.runs)
    assert await body_of(first) == began + HOUR_S - MARGIN_S
    assert first.stopped_by() is StopReason.PERIOD_END
    await trio.sleep(17 * HOUR_S)  # just after ten in the evening
    later = begin(ends.runs, 2)
    assert await body_of(later) == began + 25 * HOUR_S - MARGIN_S


async def test_of_the_tasks_and_its_suppliers_periods_the_first_that_closes_counts(autojump_clock):
    ends = begin_at_five()
    run = begin(ends.runs)
    early = WorkPeriods.parsed(["MON 05:00-05:10"], ZoneInfo("UTC"))
    ends.learned(shows(AT_FIVE), {"t": [(NIGHT, MARGIN_S), (early, 20)]})
    assert run.deadline == trio.current_time() + 580


async def test_after_a_jump_of_the_databases_clock_runs_have_another_close(autojump_clock):
    ends = begin_at_five()
    run, began = begin(ends.runs), trio.current_time()
    # Slow answers that may be right, and one that is within the drift of the clock.
    for way_s in (0.0, 5.0, 20.0):
        ends.clock_read(shows(AT_FIVE, way_s=way_s))
        assert run.deadline == began + HOUR_S - MARGIN_S
    ends.clock_read(shows(AT_FIVE + timedelta(minutes=20), way_s=2))
    assert run.deadline == began + 40 * 60 - MARGIN_S
    ends.clock_read(shows(AT_FIVE - timedelta(minutes=30)))
    assert run.deadline == began + 90 * 60 - MARGIN_S
    ends.clock_read(shows(AT_FIVE + timedelta(hours=2)))
    assert await body_of(run) == began
    assert run.stopped_by() is StopReason.PERIOD_END


async def test_changed_periods_apply_to_running_jobs_and_a_stop_keeps_its_reason(autojump_clock):
    ends = begin_at_five()
    run = begin(ends.runs)
    ends.learned(shows(AT_FIVE), {"t": [(ALWAYS, MARGIN_S)]})
    assert run.deadline == math.inf
    ends.learned(shows(AT_FIVE), {})
    assert run.deadline == math.inf
    assert ends.runs.period_end is None
    ends.learned(shows(AT_FIVE), {"t": [(NIGHT, MARGIN_S)]})
    await trio.sleep(HOUR_S)
    assert run.is_stopped
    ends.learned(shows(AT_FIVE + timedelta(hours=1)), {})
    run.renewed(trio.current_time())
    assert run.stopped_by() is StopReason.PERIOD_END


async def test_a_start_at_the_very_opening_is_not_stopped_because_two_clocks_differ(autojump_clock):
    ends = begin_at_five()
    ends.clock_read(shows(AT_FIVE.replace(hour=21, minute=59, second=59, microsecond=900_000)))
    run = begin(ends.runs)
    assert run.deadline > trio.current_time() + 7 * HOUR_S

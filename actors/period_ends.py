"""Stops runs at the close of a work period, if their task requires it, by the deadline of each run.

It reads the periods from the database when limits have changed, as a notification or the poll reports, and once an hour
if there are any. The closes follow from them and from the database's clock, which each process heartbeat reads. If that
clock jumps, all deadlines are computed again.

The database decides by its clock and zone data whether a period is open, as in the claim. If its zone data differ from
this machine's, the difference may begin at any time. So this actor also reads the periods again when a run starts in a
period that is closed by the last reading.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

import attrs
import trio

from dataloader.actors.job_runs import Runs
from dataloader.actors.outage import Outage
from dataloader.actors.signals import Signals
from dataloader.actors.wake import Wake
from dataloader.actors.woken import work_when_woken
from dataloader.jobs.growing_pauses import jittered
from dataloader.jobs.logger import get_logger
from dataloader.jobs.work_periods import WorkPeriods, closes_at
from dataloader.store.connection.bridge import Database
from dataloader.store.limits.limit_rows import aio_stopping_tasks
from dataloader.store.queue.worker_rows import ClockReading

log = get_logger(__name__)

RETRY_S: Final = 2.0
LEARN_EVERY_S: Final = 3_600.0
_EPOCH: Final = datetime.fromtimestamp(0, UTC)


@attrs.define(eq=False)
class DatabaseClock:
    """Seconds by which the database's clock, counted from 1970, is ahead of Trio's: within the last reading's bounds.

    A reading that agrees with the known value changes nothing, however long its answer took.
    """

    ahead_s: float = math.nan

    def read(self, reading: ClockReading) -> bool:
        """Apply a reading; return whether it has moved the clock."""
        shown = reading.shown.timestamp()
        least, most = shown - reading.answered_at, shown - reading.asked_at
        if math.isnan(self.ahead_s):
            self.ahead_s = (least + most) / 2
        elif not least <= self.ahead_s <= most:
            self.ahead_s = min(max(self.ahead_s, least), most)
        else:
            return False
        return True


@attrs.define(eq=False, kw_only=True)
class PeriodEnds:
    """Work periods of those of `tasks` whose runs are stopped at the close, and their closes by Trio's clock."""

    database: Database
    outage: Outage
    runs: Runs
    tasks: Collection[str]
    signals: Signals | None = None
    wake: Wake = attrs.field(factory=Wake)
    _clock: DatabaseClock = attrs.field(factory=DatabaseClock, init=False)
    _periods: Mapping[str, Sequence[tuple[WorkPeriods, float]]] = attrs.field(factory=dict, init=False)
    _ends: dict[str, float] = attrs.field(factory=dict, init=False)
    _learned_at: float = attrs.field(default=-math.inf, init=False)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Read the periods at the start and whenever limits have changed, until cancelled."""
        task_status.started()
        self.wake.set()
        await work_when_woken("period ends", self.wake, self._learn, self.outage, pause_s=RETRY_S)

    async def _learn(self) -> float | None:
        reading, periods = await self.database.run(aio_stopping_tasks, list(self.tasks))
        self.learned(reading, periods)
        return jittered(LEARN_EVERY_S) if periods else None

    def learned(self, reading: ClockReading, periods: Mapping[str, Sequence[tuple[WorkPeriods, float]]]) -> None:
        """Set the tasks whose runs are stopped when one of their periods closes, each with its margin in seconds."""
        self._clock.read(reading)
        self._periods, self._learned_at = periods, trio.current_time()
        self.runs.period_end = self._end_for_a_start if periods else None
        self._set()
        if self.signals is not None:
            self.signals.period_ends.emit(tuple(periods))

    def clock_read(self, reading: ClockReading) -> None:
        """Apply a reading of the database's clock. If it has jumped, the runs get other deadlines."""
        if self._clock.read(reading) and self._ends:
            self._set()

    def _set(self) -> None:
        """Compute the closes again, and apply them to the present runs."""
        now = trio.current_time()
        former, self._ends = self._ends, {task: self._end(task, now) for task in self._periods}
        for run in self.runs:
            if run.job.task in former or run.job.task in self._ends:
                run.period_ends_at(self._ends.get(run.job.task, math.inf))

    def _end_for_a_start(self, task: str) -> float:
        """Return when a run that starts now has to end: at the last computed close; at the next, if that has passed."""
        if task not in self._periods:
            return math.inf
        now = trio.current_time()
        if self._ends.get(task, -math.inf) <= now:
            self._ends[task] = self._end(task, now)
            if self._ends[task] <= now and now - self._learned_at > RETRY_S:
                self.wake.set()
        return self._ends[task]

    def _end(self, task: str, now: float) -> float:
        """Return when the periods of a task close next; `now` if one is closed."""
        instant = _EPOCH + timedelta(seconds=now + self._clock.ahead_s)
        closes = closes_at(self._periods[task], instant)
        return math.inf if closes is None else now + (closes - instant).total_seconds()

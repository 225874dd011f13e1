"""Watches for handlers that go on after they had to end: reports them, and calls `unstoppable` for lost jobs (Q8).

Apart from the heartbeat, since it does not use the database: a beat may wait long for a silent database, and just then
this watch is needed. It keeps what it has seen of a run, and forgets it when the run's body has ended.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import attrs
import trio

from dataloader.actors.job_runs import Run, Runs
from dataloader.jobs.lease_margin import margin_s
from dataloader.jobs.logger import get_logger
from dataloader.jobs.outcomes import StopReason
from dataloader.store.queue.lease_clock import slept_s

log = get_logger(__name__)

LOOK_EVERY_S: Final = 1.0
SUSPENDED_S: Final = 0.5
"""A look that comes later than this shows that the process was suspended, or blocked. No handler could stop then."""


@attrs.define(eq=False)
class _Seen:
    """Since when a body that had to end has been seen to go on, and what has been done about it."""

    since: float = math.inf
    is_told: bool = False
    is_given_up: bool = False


@attrs.define(eq=False, kw_only=True)
class OverdueWatch:
    """Looks at all runs of this process, every `look_s` seconds and at each moment when one must have ended.

    `unstoppable` is called once for each run that goes on although its lease is gone.
    """

    runs: Runs
    look_s: float
    cancel_grace_s: float
    unstoppable: Callable[[Run], None]
    _seen: dict[Run, _Seen] = attrs.field(factory=dict, init=False)

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await self.runs.wait_any()
            planned = self._next_look()
            await trio.sleep_until(planned)
            self._look(late_s=trio.current_time() - planned)

    def loop_blocked(self, for_s: float) -> None:
        """The watchdog's thread says that the loop has been blocked for `for_s` seconds.

        If no heartbeat can have renewed any lease by now, `unstoppable` is called with one of the runs.
        """
        runs = [run for run in self.runs if not run.body_ended and not self._is_given_up(run)]
        # The grace is added as for a process that stood still: should the loop go on, its handlers can still stop.
        if runs and for_s > max(run.job.lease_s for run in runs) + self.cancel_grace_s:
            self._give_up(runs[0], self._seen.setdefault(runs[0], _Seen()))

    def _next_look(self) -> float:
        """Soon, and no later than the moment when a body must have ended: another worker may run its job then."""
        now = trio.current_time()
        moments, slept = [now + min(self.look_s, LOOK_EVERY_S)], slept_s()
        for run in self.runs:
            if not run.body_ended:
                moments += (run.deadline, run.lease.until - slept)
        moments += [seen.since + self.cancel_grace_s for seen in self._seen.values()]
        return min(moment for moment in moments if moment > now)

    def _look(self, *, late_s: float) -> None:
        """Report handlers that continue after they were stopped, and those that continue without a lease.

        `late_s` is the time that has passed since the moment for which this look was planned.
        """
        now, slept = trio.current_time(), slept_s()
        self._seen = {run: seen for run, seen in self._seen.items() if not run.body_ended}
        if late_s > SUSPENDED_S:
            for seen in self._seen.values():
                seen.since += late_s
        for run in self.runs:
            stopped_at = min(run.stopped_at, run.deadline)
            if run.body_ended or now < stopped_at:
                continue
            # The grace counts from the first look after the stop, not from the stop: if the whole process stood still
            # since, the handler had no time to end.
            seen = self._seen.setdefault(run, _Seen())
            seen.since = min(seen.since, now)
            has_had_its_grace = now - seen.since >= self.cancel_grace_s
            if has_had_its_grace and not seen.is_told:
                seen.is_told = True
                log.error(
                    "a handler does not stop: it keeps its key and lease until it returns",
                    job_id=str(run.job.job_id),
                    task=run.job.task,
                    why=None if run.stop_reason is None else run.stop_reason.value,
                    for_s=round(now - stopped_at, 1),
                )
            # A handler that had half of the margin in which to stop gets no grace beyond the end of its lease.
            lease_until = run.lease.until - slept
            was_in_time = lease_until - seen.since >= margin_s(run.job.lease_s) / 2
            lease_is_gone = now >= lease_until and (was_in_time or has_had_its_grace)
            job_is_gone = run.stop_reason is StopReason.LEASE_LOST and has_had_its_grace
            # A job that has committed needs no lease: nobody will run it again. But it may lose its key.
            is_harmless = run.committed and run.stopped_by() is not StopReason.KEY_LOST
            if (lease_is_gone or job_is_gone) and not is_harmless:
                self._give_up(run, seen)

    def _is_given_up(self, run: Run) -> bool:
        seen = self._seen.get(run)
        return seen is not None and seen.is_given_up

    def _give_up(self, run: Run, seen: _Seen) -> None:
        if not seen.is_given_up:
            seen.is_given_up = True
            self.unstoppable(run)

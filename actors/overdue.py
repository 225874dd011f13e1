"""Watches for handlers that continue after they had to end: reports them, and calls `unstoppable` for lost jobs.

It is separate from the heartbeat because it does not use the database. A heartbeat may wait long for a silent database,
and this watch is needed just then. It remembers what it has seen of a run until the run's body has ended.
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
"""Delay of a check in seconds that shows that the process was suspended or blocked: no handler could stop."""


@attrs.define(eq=False)
class _OverdueBody:
    """Overdue body: the time `since` when it was seen, and whether it was reported and given up."""

    since: float = math.inf
    is_told: bool = False
    is_given_up: bool = False


@attrs.define(eq=False, kw_only=True)
class OverdueWatch:
    """Watch over all runs of this process, every `look_s` seconds and at each time when a body must have ended.

    `unstoppable` is called once for each run that continues although its lease is gone.
    """

    runs: Runs
    look_s: float
    cancel_grace_s: float
    unstoppable: Callable[[Run], None]
    _seen: dict[Run, _OverdueBody] = attrs.field(factory=dict, init=False)

    async def run(self) -> None:
        """Check until cancelled."""
        while True:
            await self.runs.wait_any()
            planned = self._next_look()
            await trio.sleep_until(planned)
            self._look(late_s=trio.current_time() - planned)

    def loop_blocked(self, for_s: float) -> None:
        """Handle the watchdog thread's report that the loop has been blocked for `for_s` seconds.

        If no heartbeat can have renewed any lease by now, `unstoppable` is called with one of the runs.
        """
        runs = [run for run in self.runs if not run.body_ended and not self._is_given_up(run)]
        # Add the grace period, as for a suspended process: if the loop continues, its handlers can still stop.
        if runs and for_s > max(run.job.lease_s for run in runs) + self.cancel_grace_s:
            self._give_up(runs[0], self._seen.setdefault(runs[0], _OverdueBody()))

    def _next_look(self) -> float:
        """Return the time of the next check: soon, and no later than the time when a body must have ended.

        After that, another worker may run its job.
        """
        now = trio.current_time()
        moments, slept = [now + min(self.look_s, LOOK_EVERY_S)], slept_s()
        for run in self.runs:
            if not run.body_ended:
                moments += (run.deadline, run.lease.until - slept)
        moments += [seen.since + self.cancel_grace_s for seen in self._seen.values()]
        return min(moment for moment in moments if moment > now)

    def _look(self, *, late_s: float) -> None:
        """Report handlers that continue after they were stopped, and those that continue without a lease.

        `late_s` is the time in seconds by which this check is late.
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
            # The grace period counts from the first check after the stop, not from the stop: if the whole process was
            # suspended since, the handler had no time to end.
            seen = self._seen.setdefault(run, _OverdueBody())
            seen.since = min(seen.since, now)
            has_had_its_grace = now - seen.since >= self.cancel_grace_s
            if has_had_its_grace and not seen.is_told:
                seen.is_told = True
                log.error(
                    "a handler does not stop; it keeps its key and lease until it returns",
                    job_id=str(run.job.job_id),
                    task=run.job.task,
                    why=None if run.stop_reason is None else run.stop_reason.value,
                    for_s=round(now - stopped_at, 1),
                )
            # A handler that had half of the margin in which to stop gets no grace period beyond the end of its lease.
            lease_until = run.lease.until - slept
            was_in_time = lease_until - seen.since >= margin_s(run.job.lease_s) / 2
            lease_is_gone = now >= lease_until and (was_in_time or has_had_its_grace)
            job_is_gone = run.stop_reason is StopReason.LEASE_LOST and has_had_its_grace
            # A committed job needs no lease, because no worker will run it again. But it may lose its key.
            is_harmless = run.committed and run.stopped_by() is not StopReason.KEY_LOST
            if (lease_is_gone or job_is_gone) and not is_harmless:
                self._give_up(run, seen)

    def _is_given_up(self, run: Run) -> bool:
        seen = self._seen.get(run)
        return seen is not None and seen.is_given_up

    def _give_up(self, run: Run, seen: _OverdueBody) -> None:
        if not seen.is_given_up:
            seen.is_given_up = True
            self.unstoppable(run)

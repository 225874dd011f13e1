"""Ends the work of a process in order, and reports the result.

    claims off ─► jobs finish, until the deadline ─► running jobs stop and are released ─► all is recorded

Every wait has its own deadline. So a database outage, a handler that swallows its cancellation or a thread that never
returns delays the drain by seconds only: after `drain_timeout_s` + `BOUND_S` seconds the report lists the open jobs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import attrs
import trio

from dataloader.actors.dispatcher import Dispatcher
from dataloader.actors.job_runs import Runs
from dataloader.actors.lock_session_keeper import Keeper
from dataloader.actors.recorder import Recorder
from dataloader.jobs.logger import get_logger
from dataloader.jobs.outcomes import StopReason
from dataloader.jobs.states import Step

log = get_logger(__name__)

BOUND_S: Final = 8.25
"""Time after the drain's deadline in which stopped jobs clean up and their outcomes are written."""


@attrs.frozen
class DrainReport:
    """Result of a drain: the numbers of jobs that have finished, and that were `returned` to the queue.

    `stuck` has the IDs of jobs whose handler did not stop. `unrecorded` counts jobs whose outcome could not be written.
    """

    finished: int
    returned: int
    stuck: tuple[str, ...]
    unrecorded: int

    @property
    def is_clean(self) -> bool:
        """True if every job has finished or was returned to the queue."""
        return not self.stuck and not self.unrecorded


@attrs.define(eq=False)
class Drain:
    """Drain of one process.

    `request` begins it, and `hurry` stops the jobs immediately. Both may be called more than once, from any Trio task.
    """

    runs: Runs
    timeout_s: float
    requested: trio.Event = attrs.field(factory=trio.Event)
    hurried: trio.Event = attrs.field(factory=trio.Event)
    deadline: float = math.inf

    def request(self) -> None:
        """Begin the drain: no new claims; running jobs may finish until the deadline."""
        if not self.requested.is_set():
            self.deadline = trio.current_time() + self.timeout_s
            self.requested.set()

    def hurry(self) -> None:
        """Stop the running jobs now and return them to the queue."""
        self.request()
        self.deadline = min(self.deadline, trio.current_time())
        self.hurried.set()

    async def carry_out(self, dispatchers: Sequence[Dispatcher], recorder: Recorder, keeper: Keeper) -> DrainReport:
        """Wait for the request, then end the work of `dispatchers`. Return when all is done or at the bound."""
        await self.requested.wait()
        dispatchers = list(dispatchers)
        before = recorder.tally.copy()
        log.info("draining: no new jobs are claimed", running=len(self.runs), for_at_most_s=self.timeout_s)
        for dispatcher in dispatchers:
            dispatcher.intake.cancel(reason="drain")
        with trio.move_on_at(self.deadline):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._until_done, dispatchers, nursery)
                await self.hurried.wait()
                nursery.cancel_scope.cancel()
        self._stop_all()
        with trio.move_on_at(min(self.deadline, trio.current_time()) + BOUND_S):
            for dispatcher in dispatchers:
                await dispatcher.closed.wait()
            self._stop_all()
            await self._until_done(dispatchers)
            await keeper.settle()
        recorder.insisting = False
        # A claim that is still in progress may add jobs: they are stopped as soon as they are added.
        self.runs.closed = True
        for run in self.runs:
            run.leave()
        claiming = [dispatcher.queue for dispatcher in dispatchers if not dispatcher.closed.is_set()]
        if claiming:
            log.error("a claim did not end; its jobs are recovered when their leases expire", queues=claiming)
        elif not keeper.locks.settled:
            log.error("the reply to a claim was lost; its jobs, if any, are recovered when their leases expire")
        tally = recorder.tally - before
        returned = tally[Step.RETURN] + tally[Step.CLOSE]
        stuck = tuple(str(run.job.job_id) for run in self.runs if not run.body_ended)
        report = DrainReport(
            finished=tally.total() - returned,
            returned=returned,
            stuck=stuck,
            unrecorded=len(self.runs) - len(stuck) + (len(claiming) or not keeper.locks.settled),
        )
        counts = {"finished": report.finished, "returned": report.returned}
        if report.is_clean:
            log.info("drained", **counts)
        elif stuck:
            log.error(
                "not drained: handlers did not stop; if the process ends, their jobs run again after their leases end",
                handlers=len(stuck),
                **counts,
                stuck=stuck,
                unrecorded=report.unrecorded,
            )
        else:
            log.error(
                "not drained: some outcomes could not be written; those jobs run again after their leases end",
                **counts,
                unrecorded=report.unrecorded,
            )
        return report

    def _stop_all(self) -> None:
        left = [run for run in self.runs if not run.body_ended]
        if running := sum(run.stop_reason is None for run in left):
            log.info("draining: running jobs are stopped and released", running=running)
        for run in left:
            run.stop(StopReason.DRAIN)

    async def _until_done(self, dispatchers: Sequence[Dispatcher], waiting: trio.Nursery | None = None) -> None:
        """Return when no claim is in progress and every run is removed. If `waiting` is given, cancel it then."""
        for dispatcher in dispatchers:
            await dispatcher.closed.wait()
        while self.runs:
            await self.runs.wait_removed()
        if waiting is not None:
            waiting.cancel_scope.cancel()

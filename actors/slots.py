"""Slots of one queue of this process, and the start of a handler in each.

Claimed jobs start immediately: the dispatcher claims no more jobs than there are free slots. A slot is free again when
its handler has ended, before the recorder has written that. If more ends than half of the slots are unrecorded, each
further one takes a slot. So there may be one and a half times as many running rows as slots.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from contextvars import Context, copy_context
from typing import Any, Final

import attrs
import trio

from dataloader.actors import runner
from dataloader.actors.first_step import Begun, begin
from dataloader.actors.job_runs import Run, Runs
from dataloader.actors.lease import Lease
from dataloader.actors.run_services import RunServices
from dataloader.actors.shared_scope import SharedScope
from dataloader.actors.wake import Wake
from dataloader.jobs.model import ClaimedJob
from dataloader.jobs.task import Task
from dataloader.store.queue.claim import Claim
from dataloader.store.queue.lease_clock import lease_time, slept_s

STARTS_PER_TURN: Final = 24
TURN_S: Final = 0.001
"""Maximum time in seconds for which jobs are started in one turn of the event loop, at most `STARTS_PER_TURN`.

A job takes about 20 µs, plus its handler's time until the first wait. For a handler with a separate Trio task, that
time passes in the next turn, so it counts as measured when handlers of the task last ran.
"""
WAITS_AGAIN_WITHIN: Final = 16
"""Number of handlers without a wait after which handlers of their task share a Trio task again.

A handler that waits in a shared Trio task ends the turn, which costs mixed handlers a fifth of their rate.
"""
FADES: Final = 0.9
"""Factor by which the remembered computing time of a task's handlers falls after each run that took less."""
MAX_TURNS: Final = 10
"""Maximum number of turns of the event loop in which more slots may become free for one claim."""
BEGIN_SHARE: Final = 0.8
"""Share of a supplier's margin within which a handler must begin. The rest is for the time to its first line."""


@attrs.define
class _WaitingTask:
    """Task whose handler has waited: how long its handlers compute, and the number of later runs without a wait.

    `computes_s`: seconds from the start to the first wait or the end. A short run lowers the value only gradually.
    """

    computes_s: float = 0.0
    ended_since: int = 0


@attrs.define(eq=False, kw_only=True)
class Slots:
    """The slots of a queue.

    Attributes:
        count: the number of slots.
        running: the jobs whose handlers have not ended, and the reserved slots.
        reserved: the slots that are kept for jobs whose enqueue statement is under way.
        unrecorded: the jobs whose handlers have ended and whose ends are not recorded yet.
        wake: set when a slot becomes free.
    """

    queue: str
    count: int
    tasks: Mapping[str, Task[Any]]
    runs: Runs
    services: RunServices
    running: int = 0
    reserved: int = 0
    unrecorded: int = 0
    wake: Wake = attrs.field(factory=Wake)
    _nursery: trio.Nursery = attrs.field(init=False)
    _limiter: trio.CapacityLimiter = attrs.field(init=False)
    _context: Context = attrs.field(init=False)
    _waiting_tasks: dict[str, _WaitingTask] = attrs.field(factory=dict, init=False)
    """The tasks of which one of the last handlers has waited."""

    def open(self, nursery: trio.Nursery) -> None:
        """Start handlers in `nursery` from now on."""
        self._nursery = nursery
        self._limiter = trio.CapacityLimiter(self.count)
        self._context = copy_context()

    @property
    def used(self) -> int:
        """The number of slots in use."""
        return self.running + max(self.unrecorded - self.count // 2, 0)

    @property
    def free(self) -> int:
        """The number of free slots."""
        return self.count - self.used

    async def wait_free(self, wanted: int) -> None:
        """Wait until a slot is free, or until `wanted` are while each turn of the event loop frees more of them."""
        while self.free <= 0:
            await self.wake.wait(math.inf)
        for _ in range(MAX_TURNS):
            before = self.free
            if before >= min(wanted, self.count):
                break
            await trio.lowlevel.cancel_shielded_checkpoint()
            if self.free <= before:
                break

    async def wait_unreserved(self) -> None:
        """Wait until no slot is reserved."""
        while self.reserved:
            await self.wake.wait(math.inf)

    async def wait_recorded(self) -> None:
        """Wait until the end of every run is recorded."""
        while self.running or self.unrecorded:
            await self.wake.wait(math.inf)

    def _handler_ended(self) -> None:
        self.running -= 1
        self.unrecorded += 1
        self.wake.set()

    def _recorded(self) -> None:
        self.unrecorded -= 1
        self.wake.set()

    def reserve(self) -> None:
        """Reserve a free slot."""
        self.running += 1
        self.reserved += 1

    def unreserve(self) -> None:
        """Free a reserved slot that is not needed."""
        self.reserved -= 1
        self.running -= 1
        self.wake.set()

    def start_reserved(self, job: ClaimedJob, sent_at: float) -> None:
        """Start a job in a reserved slot; the statement that added it was sent at `sent_at`."""
        self.reserved -= 1
        self.wake.set()
        self.services.telemetry.started_at_once(self.queue)
        run = self._add(job, sent_at, trio.current_time(), lease_time() - sent_at)
        self._nursery.start_soon(self._run, run)

    def start_all(self, claim: Claim) -> None:
        """Start the jobs of a claim.

        All runs are added without a checkpoint in between, so that a lost key or a cancel request finds each of them.
        """
        self.running += len(claim.jobs)
        now = trio.current_time()
        runs = [
            self._add(job, claim.sent_at, now, waited_s)
            for job, waited_s in zip(claim.jobs, claim.waited_s, strict=True)
        ]
        if len(runs) == 1:
            self._nursery.start_soon(self._run, runs[0])
        elif runs:
            self._nursery.start_soon(self._run_in_turns, deque(runs))

    def _add(self, job: ClaimedJob, sent_at: float, now: float, waited_s: float) -> Run:
        lease = Lease(job.lease_s, sent_at + job.lease_s)
        run = Run(job=job, claimed_at=now, lease=lease, when_ended=self._handler_ended, when_recorded=self._recorded)
        margin_s = None if job.more is None else job.more.get("margin_s")
        if margin_s is not None:
            run.begin_by = sent_at - slept_s() + BEGIN_SHARE * margin_s
        self.runs.add(run)
        self.services.telemetry.picked_up(self.queue, waited_s)
        return run

    async def _run_in_turns(self, runs: deque[Run]) -> None:
        """Run the jobs, a few in each turn of the event loop, so that other tasks run in between.

        They run one after another in this task while no handler waits. The first that waits keeps this task, and
        another task runs the rest. A handler that is known to wait has a separate task from the beginning.
        """
        while runs:
            shared, ends_at = SharedScope(), time.monotonic() + TURN_S
            for _ in range(STARTS_PER_TURN):
                if not runs or time.monotonic() > ends_at:
                    break
                run = runs.popleft()
                if (waiting := self._waiting_tasks.get(run.job.task)) is not None:
                    ends_at -= waiting.computes_s
                    self._nursery.start_soon(self._run, run)
                elif (rest := self._begin(run, shared.of)) is not None:
                    shared.keep()
                    if runs:
                        self._nursery.start_soon(self._run_in_turns, runs)
                    await rest
                    return
            shared.close()
            if runs:
                await trio.lowlevel.cancel_shielded_checkpoint()

    async def _run(self, run: Run) -> None:
        """Run a job in this task."""
        if (rest := self._begin(run, Run.open_scope)) is not None:
            await rest

    def _begin(self, run: Run, scope_of: runner.ScopeOf) -> Begun | None:
        """Run a job up to its handler's first wait. Return the rest of it, None if it has ended without a wait."""
        task = self.tasks.get(run.job.task)
        if task is None:  # a row by SQL may have put a job into another task's limit queue
            runner.release_unstarted(run, self.services, "job released: this process does not have its task")
            return None
        began = time.monotonic()
        # With a separate context, so that nothing that a handler leaves there reaches the next one.
        rest = begin(runner.run_claimed(run, task, self.services, self._limiter, scope_of), self._context.copy())
        if rest is not None or task.name in self._waiting_tasks:
            self._note(task.name, time.monotonic() - began, waits=rest is not None)
        return rest

    def _note(self, task: str, computed_s: float, *, waits: bool) -> None:
        """Remember the seconds that a handler has computed until its first wait or its end."""
        waiting = self._waiting_tasks.setdefault(task, _WaitingTask())
        waiting.computes_s = max(computed_s, FADES * waiting.computes_s)
        waiting.ended_since = 0 if waits else waiting.ended_since + 1
        if waiting.ended_since == WAITS_AGAIN_WITHIN:
            del self._waiting_tasks[task]

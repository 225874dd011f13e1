"""Claims jobs for one queue and starts a runner for each: exactly as many as there are free slots, in one statement.

Woken by the listener (a job became ready), by the recorder (slots came free) and by the poller, in case notifications
are lost; by itself if the poller, whose connection is another one, has no answer. A claimed job never waits in a
buffer. Cancelling the `intake` scope of a queue ends its claims and lets its jobs finish; each job has a scope of its
own that stops it.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final

import attrs
import trio

from dataloader.actors import runner
from dataloader.actors.claim_cursor import Ask, ClaimCursor, largest_claim
from dataloader.actors.filer import Filer
from dataloader.actors.job_runs import Run, Runs
from dataloader.actors.lane_looks import LaneLooks
from dataloader.actors.lease import Lease
from dataloader.actors.outage import Outage
from dataloader.actors.run_services import RunServices
from dataloader.actors.wake import Wake
from dataloader.jobs.errors import StoreError, StoreUnavailable, Unstorable
from dataloader.jobs.growing_pauses import jittered
from dataloader.jobs.logger import get_logger
from dataloader.jobs.model import ClaimedJob
from dataloader.jobs.tasks import Task
from dataloader.store.connection.bridge import Database
from dataloader.store.limits.limit_rows import aio_count_ours, aio_known
from dataloader.store.limits.own_lanes import aio_open_lanes
from dataloader.store.queue.claim import Claim
from dataloader.store.queue.lease_clock import lease_time, slept_s
from dataloader.store.queue.lock_session import LockSession
from dataloader.store.queue.make_ready import KEYS, unpark
from dataloader.store.queue.poll import Polled

log = get_logger(__name__)

STARTS_A_TURN: Final = 12
"""Jobs started in one turn of the event loop: some 50 µs each, and what their handlers do until their first wait."""

UNPOLLED: Final = 1.5
"""So many times as long as a poll comes at the latest: then a queue claims without having been told of a job."""

BEGIN_SHARE: Final = 0.8
"""The share of a supplier's margin in which a body has to begin: the rest is for its way to its first line."""


@attrs.define(eq=False, kw_only=True)
class Dispatcher:
    """One queue of this process. `running` counts its slots in use, including jobs that ended but are not recorded.

    With `by_lanes` it is an entry that takes jobs of its `tasks` alone: it claims from their lanes, which it opens, and
    looks at no others. `reserved` of the slots are kept for jobs that are just being added as ours. `answered` is
    called after each claim that the lock session has answered. `closed` is set when the intake was cancelled and no
    claim is under way any more, nor such an addition, and `ended` when all its runs are recorded.
    """

    queue: str
    concurrency: int
    database: Database
    locks: LockSession
    answered: Callable[[], None]
    runs: Runs
    outage: Outage
    tasks: Mapping[str, Task[Any]]
    services: RunServices
    backoff_s: float
    poll_s: float
    by_lanes: bool = False
    running: int = 0
    reserved: int = 0
    intake: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    wake: Wake = attrs.field(factory=Wake)
    lanes: LaneLooks = attrs.field(
        default=attrs.Factory(lambda self: LaneLooks(UNPOLLED * self.poll_s), takes_self=True)
    )
    filer: Filer = attrs.field(init=False)
    closed: trio.Event = attrs.field(factory=trio.Event)
    ended: trio.Event = attrs.field(factory=trio.Event)
    _names: list[str] = attrs.field(factory=list, init=False)
    _slots: Wake = attrs.field(factory=Wake, init=False)
    _jobs: trio.Nursery = attrs.field(init=False)
    _limiter: trio.CapacityLimiter = attrs.field(init=False)
    _resting: bool = attrs.field(default=False, init=False)
    _polled_at: float = attrs.field(default=-math.inf, init=False)
    _to_test: set[int] = attrs.field(factory=set, init=False)
    _claiming: trio.Event | None = attrs.field(default=None, init=False)
    _testing: bool = attrs.field(default=False, init=False)

    @filer.default
    def _filer_of_its_lanes(self) -> Filer:
        return Filer(
            queue=self.queue,
            lanes=lambda: self.lanes.lanes,
            database=self.database,
            outage=self.outage,
        )

    @property
    def wakes(self) -> tuple[Wake, ...]:
        """What is to be set when something became ready in the queue."""
        return (self.wake, self.filer.wake) if self.by_lanes else (self.wake,)

    def freed(self, slots: int) -> None:
        """The recorder has written the ends of `slots` runs."""
        self.running -= slots
        self._slots.set()

    def lane_told(self, lane: str) -> None:
        """A job of a lane waits or has ended; or, if `lane` is empty, limits have changed."""
        if self.lanes.told(lane):
            self.wake.set()
        elif not lane or lane in self.tasks:
            self.lanes.stale = True
            self.wake.set()

    def polled(self, polled: Polled, at: float) -> None:
        """What a poll has found, that was sent at that time."""
        self._polled_at = at
        waits = self.lanes.polled([lane for queue, lane in polled.lanes if queue == self.queue], at)
        if self.by_lanes and self.queue in polled.ready:
            self.filer.wake.set()
        if waits or (self.queue in polled.ready and not self.by_lanes):
            self.wake.set()

    def reserve(self) -> bool:
        """Keep a slot for a job that is about to be added as ours; False if none is free, or another job is first."""
        if not self._resting or self.wake.is_set:
            return False
        if self.running >= self.concurrency:
            self._resting = False  # this job waits for a slot, so those that come later wait behind it
            return False
        self.running += 1
        self.reserved += 1
        return True

    def give_back(self) -> None:
        """The reserved slot is not needed."""
        self.reserved -= 1
        self.freed(1)

    def start(self, job: ClaimedJob, sent_at: float) -> None:
        """Start a job for which a slot was reserved; it was added by a statement that was sent at `sent_at`."""
        self.reserved -= 1
        self._slots.set()
        self.services.telemetry.started_at_once(self.queue)
        now = trio.current_time()
        self._start_one(self._add(job, sent_at, now, lease_time() - sent_at))

    @property
    def _part(self) -> str:
        return f"claims of {self.queue}"

    async def run(
        self,
        keep: Callable[[Callable[[], Awaitable[None]]], Awaitable[None]],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Claim and start jobs until the intake is cancelled, then wait until every job has ended and is recorded.

        `keep` runs the claiming loop and the looks at parked jobs, and restarts them after an error, so that such an
        error does not end the jobs.
        """
        self._limiter = trio.CapacityLimiter(self.concurrency)
        async with trio.open_nursery() as self._jobs:
            task_status.started()
            with self.intake:
                claims = partial(self._claim_for_ever, partial(self._jobs.start_soon, keep, self._test))
                if self.by_lanes:
                    async with trio.open_nursery() as claiming:
                        claiming.start_soon(keep, self.filer.run)
                        await keep(claims)
                else:
                    await keep(claims)
            while self.reserved:
                await self._slots.wait(math.inf)
            self.outage.left(self._part)
            self.closed.set()
        while self.running:
            await self._slots.wait(math.inf)
        self.ended.set()

    async def _claim_for_ever(self, start_test: Callable[[], None]) -> None:
        cursor = ClaimCursor(largest_claim(self.concurrency))
        while True:
            has_more = self.lanes.stale if self.by_lanes else cursor.more
            woken = not has_more and self.lanes.wait_s(trio.current_time()) > 0 and await self._rest(cursor)
            while self.running >= self.concurrency:
                await self._slots.wait(math.inf)
            lanes: list[str] = []
            try:
                # Until nothing has changed meanwhile: a claim by former names would park jobs of tasks that are new.
                while self.lanes.stale:
                    await self._learn_lanes()
                if woken:
                    self.lanes.queue_told()
                if self.by_lanes and self.lanes.wait_s(trio.current_time()) > 0:
                    continue
                # No checkpoint from here on until the claim is sent: what is told meanwhile is for the next one.
                ask = cursor.next(self.concurrency - self.running, trio.current_time(), woken=woken or self.wake.is_set)
                lanes = self.lanes.due(trio.current_time())
                claim = await self._claim(ask, lanes)
            except (StoreUnavailable, Unstorable) as error:
                # Unstorable: a row that another service wrote can't be claimed. When it is corrected, claims go on.
                pause_s = cursor.failed()
                self.lanes.failed(lanes)
                self.outage.failed(self._part, error, again_in_s=round(pause_s, 1))
                await trio.sleep(pause_s)
                continue
            except BaseException:
                self.lanes.failed(lanes)
                raise
            self.outage.worked(self._part)
            cursor.answered(ask, claim, trio.current_time())
            self.lanes.answered(claim, trio.current_time(), lanes)
            self._take(claim)
            self._to_test.update(claim.to_test)
            if self._to_test and not self._testing:
                self._testing = True
                start_test()

    async def _rest(self, cursor: ClaimCursor) -> bool:
        """Wait until something may have become ready; True if that was told.

        Meanwhile jobs may start without a claim: none waits for one.
        """
        self._resting = cursor.found_all
        try:
            began, poll_s = trio.current_time(), jittered(UNPOLLED * self.poll_s)
            while True:
                now = trio.current_time()
                # Both are put off by what a poll tells meanwhile.
                unasked_s = min(max(began, self._polled_at) + poll_s - now, self.lanes.wait_s(now))
                pause_s = math.inf if self.by_lanes else cursor.wait_s(math.inf, now)
                if pause_s < unasked_s or unasked_s <= 0:
                    return await self.wake.wait(max(min(pause_s, unasked_s), 0))
                if await self.wake.wait(unasked_s):
                    return True
        finally:
            self._resting = False

    def knows(self, task: str) -> bool:
        """Whether jobs of the task may run here: this process has it, and nobody has removed it."""
        return task in self._names

    async def learn(self) -> None:
        """Know all tasks that this process has by now in the next claim; return when none of before is under way."""
        self.lanes.stale = True
        self.wake.set()
        while self._claiming is not None:
            await self._claiming.wait()

    async def _learn_lanes(self) -> None:
        self.lanes.stale = False
        try:
            # On the claims' own session: they go on when the pool has no answer.
            self._names, lanes = await self.locks.ask(aio_known, list(self.tasks))
            if self.by_lanes and (missing := set(self._names).difference(lanes)):
                await self.locks.ask(aio_open_lanes, list(missing))
                lanes = self._names
            if lanes:
                await self.locks.ask(aio_count_ours, lanes, self.locks.worker)
            self.lanes.learned(lanes)
            self.filer.wake.set()
        except BaseException:
            self.lanes.stale = True
            raise

    async def _claim(self, ask: Ask, lanes: list[str]) -> Claim:
        self.wake.lower()
        self._claiming = trio.Event()
        try:
            claim = await self._send(ask, lanes)
        finally:
            self._claiming.set()
            self._claiming = None
        self.answered()
        self.services.telemetry.claimed(self.queue, len(claim.jobs), trio.current_time() - ask.began)
        return claim

    async def _send(self, ask: Ask, lanes: list[str]) -> Claim:
        return await self.locks.claim(
            self.queue,
            ask.slots,
            None if self.by_lanes else self._names,
            self.backoff_s,
            look=ask.look,
            after=ask.after,
            limited=self.lanes.lanes,
            lanes=lanes,
        )

    def _take(self, claim: Claim) -> None:
        """Add a run for each job without a checkpoint in between, so that a lost key or a cancel finds each of them."""
        self.running += len(claim.jobs)
        now = trio.current_time()
        runs = [
            self._add(job, claim.sent_at, now, waited_s)
            for job, waited_s in zip(claim.jobs, claim.waited_s, strict=True)
        ]
        if len(runs) == 1:
            self._start_one(runs[0])
        elif runs:
            self._jobs.start_soon(self._start, runs)

    def _add(self, job: ClaimedJob, sent_at: float, now: float, waited_s: float) -> Run:
        run = Run(job=job, claimed_at=now, lease=Lease(job.lease_s, sent_at + job.lease_s))
        margin_s = None if job.more is None else job.more.get("margin_s")
        if margin_s is not None:
            run.begin_by = sent_at - slept_s() + BEGIN_SHARE * margin_s
        self.runs.add(run)
        self.services.telemetry.picked_up(self.queue, waited_s)
        return run

    def _start_one(self, run: Run) -> None:
        self._jobs.start_soon(runner.run, run, self.tasks[run.job.task], self.services, self._limiter)

    async def _start(self, runs: list[Run]) -> None:
        """Start the handlers, a few in each turn of the event loop, so that other tasks get their turns."""
        for number, run in enumerate(runs, 1):
            self._start_one(run)
            if number % STARTS_A_TURN == 0:
                await trio.lowlevel.cancel_shielded_checkpoint()

    async def _test(self) -> None:
        """Look again at the keys for which jobs were parked: one may have become free before the parking was committed.

        A task beside the claims: this needs a connection of the pool, and they don't. Keys that are added meanwhile
        are looked at together.
        """
        try:
            while self._to_test:
                some = [self._to_test.pop() for _ in range(min(len(self._to_test), KEYS))]
                await unpark(self.database, some)
        except StoreError as error:
            if not self.outage.lasts:
                log.warning("parked jobs were not looked at again; the stager will", queue=self.queue, error=str(error))
        finally:
            self._testing = False

"""Claims jobs for one queue and starts a runner for each: exactly as many as there are free slots, in one statement.

Woken by the listener (a job became ready), by the recorder (slots came free) and by its own poll, in case notifications
are lost. A claimed job never waits in a buffer. Cancelling the `intake` scope of a queue ends its claims and lets its
jobs finish; each job has a scope of its own that stops it.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final

import attrs
import trio

from dataloader.actors import runner
from dataloader.actors.claim_cursor import Ask, ClaimCursor
from dataloader.actors.job_runs import Run, Runs
from dataloader.actors.lease import Lease
from dataloader.actors.outage import Outage
from dataloader.actors.run_services import RunServices
from dataloader.actors.wake import Wake
from dataloader.jobs.errors import StoreError, StoreUnavailable, Unstorable
from dataloader.jobs.growing_pauses import jittered
from dataloader.jobs.logger import get_logger
from dataloader.jobs.model import ClaimedJob
from dataloader.jobs.tasks import Tasks
from dataloader.store.connection.bridge import Database
from dataloader.store.queue.enqueue import ANSWER_S
from dataloader.store.queue.lock_session import Claim, LockSession
from dataloader.store.queue.make_ready import KEYS, unpark

log = get_logger(__name__)

STARTS_A_TURN: Final = 4
"""Jobs started in one turn of the event loop: some 100 µs each until the first wait of their handlers."""
RESERVED_S: Final = 2 * ANSWER_S
"""How long the end of the intake waits for jobs that are just being added as ours."""


@attrs.define(eq=False, kw_only=True)
class Dispatcher:
    """One queue of this process. `running` counts its slots in use, including jobs that ended but are not recorded.

    `answered` is called after each claim that the lock session has answered. `closed` is set when the intake was
    cancelled and no claim is under way any more.
    """

    queue: str
    concurrency: int
    database: Database
    locks: LockSession
    answered: Callable[[], None]
    runs: Runs
    outage: Outage
    tasks: Tasks
    services: RunServices
    backoff_s: float
    poll_s: float
    running: int = 0
    reserved: int = 0
    intake: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    wake: Wake = attrs.field(factory=Wake)
    closed: trio.Event = attrs.field(factory=trio.Event)
    _slots: Wake = attrs.field(factory=Wake, init=False)
    _cursor: ClaimCursor = attrs.field(factory=ClaimCursor, init=False)
    _jobs: trio.Nursery | None = attrs.field(default=None, init=False)
    _limiter: trio.CapacityLimiter = attrs.field(init=False)
    _claiming: bool = attrs.field(default=False, init=False)
    _to_test: set[int] = attrs.field(factory=set, init=False)
    _testing: bool = attrs.field(default=False, init=False)

    def freed(self, slots: int) -> None:
        """The recorder has written the ends of `slots` runs."""
        self.running -= slots
        self._slots.set()

    def reserve(self) -> bool:
        """Keep a slot for a job that is about to be added as ours; False if none is free or others may be waiting."""
        if self._jobs is None or self.intake.cancel_called or self.running >= self.concurrency:
            return False
        if self._claiming or self.wake.is_set or not self._cursor.found_all:
            return False
        self.running += 1
        self.reserved += 1
        return True

    def give_back(self) -> None:
        """The reserved slot is not needed."""
        self.reserved -= 1
        self.freed(1)

    def start(self, job: ClaimedJob, sent_at: float) -> bool:
        """Start a job for which a slot was reserved; False, and the slot is free again, when it is too late."""
        if self._jobs is None:
            self.give_back()
            return False
        self.reserved -= 1
        self._slots.set()
        self.services.telemetry.started_at_once(self.queue)
        self._take([job], [0.0], sent_at, self._jobs)
        return True

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
        async with trio.open_nursery() as jobs:
            self._jobs = jobs
            task_status.started()
            try:
                with self.intake:
                    await keep(partial(self._claim_for_ever, partial(jobs.start_soon, keep, self._test), jobs))
                with trio.move_on_after(RESERVED_S, shield=True):
                    while self.reserved:
                        await self._slots.wait(math.inf)
            finally:
                self._jobs = None
            self.outage.left(self._part)
            self.closed.set()
        while self.running:
            await self._slots.wait(math.inf)

    async def _claim_for_ever(self, start_test: Callable[[], None], jobs: trio.Nursery) -> None:
        names, cursor = list(self.tasks), ClaimCursor()
        self._cursor = cursor
        while True:
            if self.running >= self.concurrency:
                await self._slots.wait(math.inf)
                continue
            if not cursor.more:
                # Jittered, so that replicas which were started together don't ask together.
                await self.wake.wait(cursor.wait_s(jittered(self.poll_s)))
            ask = cursor.next(self.concurrency - self.running, trio.current_time(), woken=self.wake.is_set)
            try:
                claim = await self._claim(ask, names)
            except (StoreUnavailable, Unstorable) as error:
                # Unstorable: a row that another service wrote can't be claimed. When it is corrected, claims go on.
                pause_s = cursor.failed()
                self.outage.failed(self._part, error, again_in_s=round(pause_s, 1))
                await trio.sleep(pause_s)
                continue
            self.outage.worked(self._part)
            cursor.answered(ask, claim, trio.current_time())
            self.running += len(claim.jobs)
            self._take(claim.jobs, claim.waited_s, claim.sent_at, jobs)
            self._to_test.update(claim.to_test)
            if self._to_test and not self._testing:
                self._testing = True
                start_test()

    async def _claim(self, ask: Ask, names: list[str]) -> Claim:
        if ask.after is None:
            self.wake.lower()
        self._claiming = True
        try:
            claim = await self.locks.claim(self.queue, ask.slots, names, self.backoff_s, look=ask.look, after=ask.after)
        finally:
            self._claiming = False
        self.answered()
        self.services.telemetry.claimed(self.queue, len(claim.jobs), trio.current_time() - ask.began)
        return claim

    def _take(self, claimed: Sequence[ClaimedJob], waited: Sequence[float], sent_at: float, jobs: trio.Nursery) -> None:
        """Every job has its run in this very turn, so that whatever comes for it, a lost key first of all, finds it."""
        now = trio.current_time()
        runs = []
        for job, waited_s in zip(claimed, waited, strict=True):
            run = Run(job=job, claimed_at=now, lease=Lease(job.lease_s, sent_at + job.lease_s))
            self.runs.add(run)
            self.services.telemetry.picked_up(self.queue, waited_s)
            runs.append(run)
        if len(runs) == 1:
            self._start_one(runs[0], jobs)
        elif runs:
            jobs.start_soon(self._start, runs, jobs)

    def _start_one(self, run: Run, jobs: trio.Nursery) -> None:
        jobs.start_soon(runner.run, run, self.tasks[run.job.task], self.services, self._limiter)

    async def _start(self, runs: list[Run], jobs: trio.Nursery) -> None:
        """Start the bodies, some in each turn of the event loop: the others, requests above all, get their turns."""
        for number, run in enumerate(runs, 1):
            self._start_one(run, jobs)
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

"""Claims jobs for one queue: exactly as many as there are free slots, in one statement.

The listener wakes it when a job became ready, the slots when one became free, and the poller in case notifications were
lost. If the poller, which has another connection, has no answer, it wakes by itself. A claimed job never waits in a
buffer. Cancelling the `intake` scope of a queue ends its claims and lets its jobs finish; a separate scope stops each
job.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final

import attrs
import trio

from dataloader.actors.block_filer import BlockFiler
from dataloader.actors.claim_cursor import MIN_CLAIM, ClaimCursor, NextClaim, largest_claim
from dataloader.actors.filer import Filer
from dataloader.actors.lane_looks import LaneLooks
from dataloader.actors.lane_states import LaneStates
from dataloader.actors.outage import Outage
from dataloader.actors.signals import Claimed, KnownTasks, Signals
from dataloader.actors.slots import Slots
from dataloader.actors.wake import Wake
from dataloader.jobs.errors import SchemaError, StoreError, StoreUnavailable
from dataloader.jobs.growing_pauses import jittered
from dataloader.jobs.logger import get_logger
from dataloader.jobs.task import Task
from dataloader.jobs.telemetry import Telemetry
from dataloader.store.connection.bridge import Database
from dataloader.store.limits.limit_rows import aio_count_ours, aio_known
from dataloader.store.limits.own_lanes import aio_open_lanes
from dataloader.store.queue.claim import Claim
from dataloader.store.queue.lock_session import LockSession
from dataloader.store.queue.make_ready import KEYS, unpark
from dataloader.store.queue.poll import Polled

log = get_logger(__name__)

UNPOLLED: Final = 1.5
"""Factor of the poll period after which a queue claims without a notification or a poll."""


@attrs.define(eq=False, kw_only=True)
class Dispatcher:
    """Claims of one queue of this process.

    Attributes:
        slots: the slots of the queue. Its jobs run in them.
        by_lanes: the dispatcher claims only from the limit queues of its `tasks`, which it opens.
        answered: called after each claim that the lock session has answered.
        closed: set when the intake is cancelled, no claim is under way and no slot is reserved.
        ended: set when the ends of all runs are recorded.
    """

    queue: str
    slots: Slots
    database: Database
    locks: LockSession
    answered: Callable[[], None]
    outage: Outage
    tasks: Mapping[str, Task[Any]]
    telemetry: Telemetry
    backoff_s: float
    poll_s: float
    by_lanes: bool = False
    signals: Signals | None = None
    intake: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    wake: Wake = attrs.field(factory=Wake)
    lanes: LaneLooks = attrs.field(
        default=attrs.Factory(lambda self: LaneLooks(UNPOLLED * self.poll_s), takes_self=True)
    )
    filer: Filer | BlockFiler = attrs.field(init=False)
    lane_states: LaneStates = attrs.field(init=False)
    closed: trio.Event = attrs.field(factory=trio.Event)
    ended: trio.Event = attrs.field(factory=trio.Event)
    _names: list[str] = attrs.field(factory=list, init=False)
    _limited: list[str] = attrs.field(factory=list, init=False)
    _cursor: ClaimCursor = attrs.field(init=False)
    _resting: bool = attrs.field(default=False, init=False)
    _job_waits: bool = attrs.field(default=False, init=False)
    _polled_at: float = attrs.field(default=-math.inf, init=False)
    _to_test: set[int] = attrs.field(factory=set, init=False)
    _claiming: trio.Event | None = attrs.field(default=None, init=False)
    _testing: bool = attrs.field(default=False, init=False)

    @filer.default
    def _its_filer(self) -> Filer | BlockFiler:
        if self.by_lanes:
            return Filer(queue=self.queue, lanes=lambda: self.lanes.lanes, database=self.database, outage=self.outage)
        return BlockFiler(
            queue=self.queue,
            known=lambda: self._names,
            done=self.wake.set,
            database=self.database,
            outage=self.outage,
        )

    @lane_states.default
    def _states_of_its_lanes(self) -> LaneStates:
        return LaneStates(queue=self.queue, lanes=self.lanes, locks=self.locks, telemetry=self.telemetry)

    @property
    def wakes(self) -> tuple[Wake, ...]:
        """Flags to set when a job became ready in the queue."""
        return (self.wake, self.filer.wake) if self.by_lanes else (self.wake,)

    def lane_told(self, lane: str) -> None:
        """Note that a job of a limit queue waits or has ended; if `lane` is empty, that limits have changed."""
        if self.lanes.told(lane):
            self.wake.set()
        elif not lane or lane in self.tasks:
            self.lanes.stale = True
            self.wake.set()

    def polled(self, polled: Polled, at: float) -> None:
        """Apply the result of a poll that was sent at `at`."""
        self._polled_at = at
        waits = self.lanes.polled([lane for queue, lane in polled.lanes if queue == self.queue], at)
        if self.by_lanes and self.queue in polled.ready:
            self.filer.wake.set()
        if waits or (self.queue in polled.ready and not self.by_lanes):
            self.wake.set()

    def reserve(self) -> bool:
        """Reserve a slot for a job that is about to be enqueued and started here.

        Return False if no slot is free, or if other ready jobs come first.
        """
        if not self._resting or self._job_waits or self.wake.is_set or self.slots.free <= 0:
            return False
        self.slots.reserve()
        return True

    def added(self) -> None:
        """Note that this process has added a job which waits for a claim: later ones must not overtake it."""
        self._job_waits = True

    @property
    def part(self) -> str:
        """Name of this part in reports of outages."""
        return f"claims of {self.queue}"

    async def run(
        self,
        keep: Callable[[Callable[[], Awaitable[None]]], Awaitable[None]],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Claim and start jobs until the intake is cancelled, then wait until every job has ended and is recorded.

        `keep` runs the claiming loop and the checks of parked jobs, and restarts them after an error, so that such an
        error does not end the jobs.
        """
        async with trio.open_nursery() as jobs:
            self.slots.open(jobs)
            task_status.started()
            with self.intake:
                claims = partial(self._claim_for_ever, partial(jobs.start_soon, keep, self._test))
                async with trio.open_nursery() as claiming:
                    claiming.start_soon(keep, self.filer.run)
                    await keep(claims)
            await self.slots.wait_unreserved()
            self.outage.left(self.part)
            self.lane_states.left()
            self.closed.set()
        await self.slots.wait_recorded()
        self.ended.set()

    async def _claim_for_ever(self, start_test: Callable[[], None]) -> None:
        cursor = self._cursor = ClaimCursor(largest_claim(self.slots.count))
        was_apart = False
        while True:
            # In a backlog only this checkpoint notices the end of the intake while slots are free: claims are shielded.
            await trio.lowlevel.checkpoint_if_cancelled()
            has_more = self.lanes.stale if self.by_lanes else cursor.more
            woken = not has_more and self.lanes.wait_s(trio.current_time()) > 0 and await self._rest(cursor)
            await self.slots.wait_free(cursor.most)
            lanes: list[str] = []
            try:
                # Repeat until nothing has changed meanwhile: a claim by former names would skip jobs of new tasks.
                while self.lanes.stale:
                    await self._learn_lanes()
                if woken:
                    self.lanes.queue_told()
                if self.by_lanes and self.lanes.wait_s(trio.current_time()) > 0:
                    continue
                # Every second claim is for the other limit queues, so that neither kind keeps the other waiting.
                was_apart = not was_apart and await self._claim_apart(start_test, woken=woken)
                if was_apart:
                    continue
                # No checkpoint from here until the claim is sent: a notification in between is for the next claim.
                ask = cursor.next(self.slots.free, trio.current_time(), woken=woken or self.wake.is_set)
                lanes = self.lanes.due(trio.current_time())
                if self.by_lanes and not lanes:
                    continue
                claim = await self._claim(ask, lanes)
            except StoreError as error:
                await trio.sleep(self._failed(error, lanes, cursor))
                continue
            except BaseException:
                self.lanes.failed(lanes)
                raise
            cursor.answered(ask, claim, trio.current_time())
            self._found(claim)
            self._answered(claim, lanes, start_test)

    def _found(self, claim: Claim) -> None:
        """Process the answer to a claim of ready jobs."""
        self.outage.worked(self.part)
        if claim.blocked:
            self.filer.wake.set()

    def _failed(self, error: StoreError, lanes: list[str], cursor: ClaimCursor) -> float:
        """Handle a failed claim; return the pause in seconds until the next one. Raises `SchemaError`."""
        if lanes and not isinstance(error, StoreUnavailable | SchemaError):
            log.debug("a claim with limit queues was refused", queue=self.queue, error=str(error))
            self.lanes.refused(lanes, trio.current_time())
            self.wake.set()
            return 0
        self.lanes.failed(lanes)
        if isinstance(error, SchemaError):
            raise error
        # Unavailable, or a row of another service cannot be claimed: claims continue when it is corrected.
        pause_s = cursor.failed()
        self.outage.failed(self.part, error, again_in_s=round(pause_s, 1))
        return pause_s

    def _answered(self, claim: Claim, lanes: list[str], start_test: Callable[[], None]) -> None:
        self.lanes.answered(claim, trio.current_time(), lanes)
        self.slots.start_all(claim)
        self._to_test.update(claim.to_test)
        if self._to_test and not self._testing:
            self._testing = True
            start_test()

    async def _claim_apart(self, start_test: Callable[[], None], *, woken: bool) -> bool:
        """Claim from one limit queue alone, after a claim with it was refused; if this one is refused, too, close it.

        Returns whether a limit queue was due. Raises the errors of a claim, except a refusal. `woken`: a job became
        ready, which is for the next claim of the others.
        """
        lane = self.lanes.due_apart(trio.current_time())
        if lane is None:
            return False
        if woken:
            self.wake.set()
        try:
            slots = min(self.slots.free, MIN_CLAIM)
            claim = await self._send(NextClaim(slots, 0, None, trio.current_time()), [lane], None)
        except (StoreUnavailable, SchemaError):
            self.lanes.failed([lane])
            raise
        except StoreError as error:
            await self.lane_states.refused(lane, error)
            return True
        except BaseException:
            self.lanes.failed([lane])
            raise
        self._answered(claim, [lane], start_test)
        # A paused queue has no answer for its lanes.
        if any(lane == one for one, *_ in claim.lanes):
            await self.lane_states.worked(lane)
        return True

    async def _rest(self, cursor: ClaimCursor) -> bool:
        """Wait until a job may have become ready; return whether a notification or a poll said so.

        Meanwhile jobs may start without a claim, because no job waits for one.
        """
        self._resting = cursor.found_all
        rests = cursor.found_all and not self.wake.is_set
        if self.signals is not None and rests:
            self.signals.rests(self.queue)
        try:
            began, poll_s = trio.current_time(), jittered(UNPOLLED * self.poll_s)
            while True:
                now = trio.current_time()
                # A poll meanwhile may move both.
                unasked_s = min(max(began, self._polled_at) + poll_s - now, self.lanes.wait_s(now))
                pause_s = math.inf if self.by_lanes else cursor.wait_s(math.inf, now)
                if pause_s < unasked_s or unasked_s <= 0:
                    return await self.wake.wait(max(min(pause_s, unasked_s), 0))
                if await self.wake.wait(unasked_s):
                    return True
        finally:
            self._resting = False
            if self.signals is not None and rests:
                self.signals.rests_no_more(self.queue)

    def knows(self, task: str) -> bool:
        """Return whether jobs of the task may run here: this process has it, and it was not removed."""
        return task in self._names

    async def learn(self) -> None:
        """Claim for all present tasks of this process from now on; return when no earlier claim is under way."""
        self.lanes.stale = True
        self.wake.set()
        while self._claiming is not None:
            await self._claiming.wait()

    async def _learn_lanes(self) -> None:
        self.lanes.stale = False
        try:
            # Use the claims' own session, so that they continue when the pool has no answer.
            names, lanes, limited = await self.locks.ask(aio_known, list(self.tasks))
            if not set(names) <= set(self._names):
                # Former claims have skipped the jobs of these tasks, which may be before the cursor.
                self._cursor.to_front()
            if self.by_lanes and (missing := set(names).difference(limited)):
                await self.locks.ask(aio_open_lanes, list(missing))
                lanes = limited = names
            self._names, self._limited = names, limited
            if self.signals is not None:
                self.signals.known_tasks.emit(KnownTasks(queue=self.queue, tasks=tuple(names)))
            if lanes:
                await self.locks.ask(aio_count_ours, lanes, self.locks.worker)
            self.lanes.learned(lanes)
            self.lane_states.count()
            if self.by_lanes:
                self.filer.wake.set()
        except BaseException:
            self.lanes.stale = True
            raise

    async def _claim(self, ask: NextClaim, lanes: list[str]) -> Claim:
        self.wake.lower()
        self._job_waits = False
        return await self._send(ask, lanes, None if self.by_lanes else self._names)

    async def _send(self, ask: NextClaim, lanes: list[str], names: list[str] | None) -> Claim:
        """Claim jobs of the tasks `names` and from `lanes`; if `names` is None, from `lanes` only."""
        self._claiming = trio.Event()
        try:
            claim = await self.locks.claim(
                self.queue,
                ask.slots,
                names,
                self.backoff_s,
                look=ask.look,
                after=ask.after,
                limited=self._limited,
                lanes=lanes,
            )
        finally:
            self._claiming.set()
            self._claiming = None
        self.answered()
        self.telemetry.claimed(self.queue, len(claim.jobs), trio.current_time() - ask.began)
        if self.signals is not None:
            self.signals.claimed.emit(
                Claimed(
                    queue=self.queue,
                    tasks=None if names is None else tuple(names),
                    lanes=tuple(lanes),
                    look=ask.look,
                    after=ask.after,
                    jobs=tuple(job.job_id for job in claim.jobs),
                )
            )
        return claim

    async def _test(self) -> None:
        """Check again the keys for which jobs were parked: one may have become free before the parking was committed.

        This is a task beside the claims, because it needs a connection of the pool and they do not. Keys that are added
        meanwhile are checked together.
        """
        try:
            while self._to_test:
                some = [self._to_test.pop() for _ in range(min(len(self._to_test), KEYS))]
                await unpark(self.database, some)
        except StoreError as error:
            if not self.outage.lasts:
                log.warning(
                    "parked jobs were not checked again; the stager will check them", queue=self.queue, error=str(error)
                )
        finally:
            self._testing = False

"""Keeps the lock session alive, and reports to the runs until when their keys are safe.

The server ends the session after a silence shorter than the shortest lease, so that the keys of a process behind a dead
network become free in time. This actor pings the session more often than that, and reconnects immediately when it ends.
While no ping gets through, the runs' scopes end before the server could release their keys. A ping may have to wait
behind a claim that waits for a locked table. Another connection then checks whether the server is at work on the
session, in which case the session does not count as silent.
"""

from __future__ import annotations

import contextlib
import math
from typing import Final

import attrs
import trio

from dataloader.actors.job_runs import Runs
from dataloader.actors.outage import Outage
from dataloader.actors.signals import Signals
from dataloader.actors.wake import Wake
from dataloader.jobs.errors import StoreError
from dataloader.jobs.lease_margin import margin_s
from dataloader.jobs.model import MIN_LEASE_S
from dataloader.store.queue.lease_clock import lease_time
from dataloader.store.queue.lock_session import MIN_PING_S, LockSession

RETRY_S: Final = 0.5
WATCH_SHARE: Final = 1 / 8
"""Share of the shortest lease after which another connection checks on a waiting ping, and between its checks."""


@attrs.define(eq=False, kw_only=True)
class Keeper:
    """Keeper that pings the lock session, immediately when `wake` is set."""

    locks: LockSession
    runs: Runs
    outage: Outage
    period_s: float
    signals: Signals | None = None
    wake: Wake = attrs.field(factory=Wake)
    _margin_s: float = attrs.field(default=0.0, init=False)
    _lease_s: float = attrs.field(default=MIN_LEASE_S, init=False)
    _pinging: Wake = attrs.field(factory=Wake, init=False)
    _answered: trio.Event = attrs.field(factory=trio.Event, init=False)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Ping until cancelled."""
        task_status.started()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_for_ever)
            while True:
                # A job of another service may have a shorter lease; the session needs more time to prove that it is
                # alive.
                self._lease_s = max(self.runs.shortest_lease_s(), MIN_LEASE_S)
                # Each ping has its own event, because the watch may begin only after its ping is over.
                answered = self._answered = trio.Event()
                self._pinging.set()
                pause_s = await self._ping(self._lease_s)
                answered.set()
                await self.wake.wait(pause_s)

    async def _ping(self, lease_s: float) -> float:
        """Ping, and repair what a lost reply has left behind. Returns the seconds until the next ping."""
        try:
            await self.locks.ping(lease_s)
            # Use the margin of the shortest lease for all: that of a long lease may be longer than the allowed silence.
            self._margin_s = margin_s(lease_s)
            self.runs.key_is_safe_until(self.locks.safe_until - self._margin_s)
            await self.locks.repair()
            self.outage.worked("lock session")
            self._report()
        except StoreError as error:
            self.outage.failed("lock session", error)
            at_the_latest = self.locks.safe_until - margin_s(lease_s)
            self.runs.key_is_safe_until(min(self.runs.key_safe_until, at_the_latest))
            return RETRY_S
        return min(self.period_s, lease_s / 4)

    async def _watch_for_ever(self) -> None:
        """Check on another connection, while a ping or repair waits, whether the server is at work on the session."""
        while True:
            await self._pinging.wait(math.inf)
            answered, every_s = self._answered, self._lease_s * WATCH_SHARE
            with trio.move_on_after(every_s):
                await answered.wait()
            if answered.is_set():
                continue
            while not answered.is_set():
                with contextlib.suppress(StoreError):
                    if await self.locks.watch(max(every_s, MIN_PING_S)):
                        self.answered()
                with trio.move_on_after(every_s):
                    await answered.wait()
            await self.locks.end_watch()

    def answered(self) -> None:
        """Note that the session has answered a claim. The claim counts as a ping, so the next ping is later."""
        now, until = lease_time(), self.locks.safe_until - self._margin_s
        # Not after each claim, because this moves the deadline of every run.
        if self.runs.key_safe_until - now < (until - now) / 2:
            self.runs.key_is_safe_until(until)
            self._report()

    def _report(self) -> None:
        if self.signals is not None:
            self.signals.keys_safe.emit(self.runs.key_safe_until)

    async def settle(self) -> None:
        """Ping until all our rows are known here: those of a claim whose reply was lost are released."""
        while not self.locks.settled:
            self.wake.set()
            with trio.move_on_after(RETRY_S):
                await self.locks.wait_settled()

"""Keeps the lock session alive, and the runs informed until when their keys are safe (Q7).

The server ends the session after a silence shorter than the shortest lease, so that a ghost behind a dead network frees
its keys in time; this actor pings it more often than that, and reconnects at once when it hears of its end. While no
ping gets through, the runs' scopes end before the server could give their keys away. A ping may wait for its turn
behind a claim that waits for a table: no silence as long as another connection learns that the server is at work on it.
"""

from __future__ import annotations

import contextlib
import math
from typing import Final

import attrs
import trio

from dataloader.actors.job_runs import Runs
from dataloader.actors.lease import margin_s
from dataloader.actors.outage import Outage
from dataloader.actors.wake import Wake
from dataloader.jobs.errors import StoreError
from dataloader.jobs.model import MIN_LEASE_S
from dataloader.store.queue.lock_session import MIN_PING_S, LockSession

RETRY_S: Final = 0.5
WATCH_SHARE: Final = 1 / 8
"""Of the shortest lease: so long a ping waits before another connection asks, and so often it does."""


@attrs.define(eq=False, kw_only=True)
class Keeper:
    """Pings the lock session, at once when `wake` is set."""

    locks: LockSession
    runs: Runs
    outage: Outage
    period_s: float
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
                # A foreign job's may be shorter: no reason to be taken for dead within a second.
                self._lease_s = max(self.runs.shortest_lease_s(), MIN_LEASE_S)
                # The watch may come to it late, when the ping is over.
                answered = self._answered = trio.Event()
                self._pinging.set()
                pause_s = await self._ping(self._lease_s)
                answered.set()
                await self.wake.wait(pause_s)

    async def _ping(self, lease_s: float) -> float:
        """Ping, and repair what a lost reply has left behind; how soon to do so again comes back."""
        try:
            await self.locks.ping(lease_s)
            # Not each run's own margin: that of a long lease may exceed all of the session's silence.
            self._margin_s = margin_s(lease_s)
            self.runs.key_is_safe_until(self.locks.safe_until - self._margin_s)
            await self.locks.repair()
            self.outage.worked("lock session")
        except StoreError as error:
            self.outage.failed("lock session", error)
            at_the_latest = self.locks.safe_until - margin_s(lease_s)
            self.runs.key_is_safe_until(min(self.runs.key_safe_until, at_the_latest))
            return RETRY_S
        return min(self.period_s, lease_s / 4)

    async def _watch_for_ever(self) -> None:
        """While a ping waits for its turn, or a repair for a table, look beside them whether the server is at work."""
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
        """The session has answered a claim: our keys are as safe as after a ping, whose turn may be far."""
        now, until = trio.current_time(), self.locks.safe_until - self._margin_s
        # Not each time: it moves the deadline of every run.
        if self.runs.key_safe_until - now < (until - now) / 2:
            self.runs.key_is_safe_until(until)

    async def settle(self) -> None:
        """Ping until no row is ours that memory doesn't know: one whose claim's reply was lost goes back (Q15)."""
        while not self.locks.settled:
            self.wake.set()
            with trio.move_on_after(RETRY_S):
                await self.locks.wait_settled()

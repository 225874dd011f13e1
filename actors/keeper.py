"""Keeps the lock session alive, and the runs informed until when their keys are safe (Q7).

The server ends the session after a silence shorter than the shortest lease, so that a ghost behind a dead network frees
its keys in time; this actor pings it more often than that, and reconnects at once when it hears of its end. While no
ping gets through, the runs' scopes end before the server could give their keys away.
"""

from __future__ import annotations

import attrs
import structlog
import trio

from dataloader.actors.messages import Wake
from dataloader.actors.runs import Runs, margin_s
from dataloader.jobs.errors import StoreError
from dataloader.jobs.model import MIN_LEASE_S
from dataloader.store.lock_session import LockSession

log = structlog.get_logger(__name__)

RETRY_S = 0.5


@attrs.define(eq=False, kw_only=True)
class Keeper:
    """Pings the lock session, at once when `wake` is set."""

    locks: LockSession
    runs: Runs
    period_s: float
    wake: Wake = attrs.field(factory=Wake)
    _margin_s: float = attrs.field(default=0.0, init=False)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Ping until cancelled."""
        task_status.started()
        while True:
            # A foreign job's may be shorter: no reason to be taken for dead within a second.
            lease_s = max(self.runs.shortest_lease_s(), MIN_LEASE_S)
            try:
                await self.locks.ping(lease_s)
                # Not each run's own margin: that of a long lease may exceed all of the session's silence.
                self._margin_s = margin_s(lease_s)
                self.runs.key_is_safe_until(self.locks.safe_until - self._margin_s)
                pause_s = min(self.period_s, lease_s / 4)
            except StoreError as error:
                log.warning("the lock session does not answer", error=str(error))
                at_the_latest = self.locks.safe_until - margin_s(lease_s)
                self.runs.key_is_safe_until(min(self.runs.key_safe_until, at_the_latest))
                pause_s = RETRY_S
            await self.wake.wait(pause_s)

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

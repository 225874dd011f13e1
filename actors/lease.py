"""Time until which a run's body may continue, and what ends it then: lease, key, timeout or work period.

Each of the four has one writer. The heartbeat renews the lease, the keeper of the lock session sets the time until
which the key is safe, the runner sets the timeout, and `PeriodEnds` sets the close of the period. This file uses
neither a clock nor a cancel scope.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import attrs

from dataloader.jobs.lease_margin import MIN_MARGIN_S, margin_s
from dataloader.jobs.outcomes import StopReason


class KillTimes(NamedTuple):
    """Times at which a body in a child process is killed: by its guard, and by the kernel if the guard fails."""

    guard: float
    kernel: float

    def moved(self, by_s: float) -> KillTimes:
        """Return the times `by_s` seconds later, as those of another clock."""
        return KillTimes(self.guard + by_s, self.kernel + by_s)


@attrs.define(eq=False)
class Lease:
    """Lease of one run, which lasts `seconds` from each renewal, with the bounds of its key, timeout and period.

    `until` and `key_safe_until` are by the lease clock (`lease_clock`), the two others by Trio's. `key_safe_until` is
    infinite for a job without a key.
    """

    seconds: float
    until: float
    key_safe_until: float = math.inf
    timeout_at: float = math.inf
    period_ends_at: float = math.inf

    @property
    def safe_until(self) -> float:
        """Time by the lease clock until which both lease and key are safe, less the margin."""
        return min(self.until - margin_s(self.seconds), self.key_safe_until)

    def renewed(self, sent_at: float) -> None:
        """Note that a heartbeat sent at `sent_at` has renewed the lease."""
        self.until = max(self.until, sent_at + self.seconds)

    def body_ends(self, *, committed: bool, slept_s: float = 0.0) -> tuple[float, StopReason]:
        """Return when the body must be stopped, by Trio's clock and as known now, and the reason of that stop.

        `slept_s` is the time in seconds for which the machine has slept: the lease clock is ahead of Trio's by it. A
        body that has `committed` needs only its key, because no worker will run its job again.
        """
        until, reason = self.timeout_at, StopReason.TIMEOUT
        if self.period_ends_at < until:
            until, reason = self.period_ends_at, StopReason.PERIOD_END
        if not committed and (lease_ends := self.until - slept_s - margin_s(self.seconds)) < until:
            until, reason = lease_ends, StopReason.LEASE_ENDED
        if (key_ends := self.key_safe_until - slept_s) < until:
            until, reason = key_ends, StopReason.KEY_LOST
        return until, reason

    def body_is_killed(self) -> KillTimes:
        """Return when a body in a child process is killed, in the lease clock's time.

        Both times are before its job, or key, can be another worker's. The guard kills the body a quarter of the margin
        after its stop. If it has not, the kernel does at half of the margin.
        """
        margin = margin_s(self.seconds)
        return KillTimes(
            min(self.until - margin * 3 / 4, self.key_safe_until + MIN_MARGIN_S / 4),
            min(self.until - margin / 2, self.key_safe_until + MIN_MARGIN_S / 2),
        )

    def body_is_killed_for(self) -> StopReason:
        """Return whether such a kill is for the lease or for the key."""
        is_key = self.body_is_killed().kernel > self.key_safe_until
        return StopReason.KEY_LOST if is_key else StopReason.LEASE_ENDED

    def commit_ends(self, slept_s: float = 0.0) -> float:
        """Return the latest time of a commit's reply, by Trio's clock: then another worker may have job or key."""
        return min(self.until - margin_s(self.seconds), self.key_safe_until) - slept_s

"""Until when a run's body may go on, and what ends it then: the lease, the key, the timeout or the work period.

Each of the four has one writer: the heartbeat renews the lease, the keeper of the lock session says until when the key
is safe, the runner sets the timeout, `PeriodEnds` the close of the period. Uses neither a clock nor a cancel scope.
"""

from __future__ import annotations

import math

import attrs

from dataloader.jobs.lease_margin import MIN_MARGIN_S, margin_s
from dataloader.jobs.outcomes import StopReason


@attrs.define(eq=False)
class Lease:
    """The lease of one run, which lasts `seconds` from each renewal; with the bounds of its key, timeout and period.

    `until` and `key_safe_until` are by the clock of leases (`lease_clock`), the two others by Trio's. `key_safe_until`
    is infinite for a job that has no key.
    """

    seconds: float
    until: float
    key_safe_until: float = math.inf
    timeout_at: float = math.inf
    period_ends_at: float = math.inf

    @property
    def safe_until(self) -> float:
        """When lease and key together are safe no more, less the margin, by the clock of leases."""
        return min(self.until - margin_s(self.seconds), self.key_safe_until)

    def renewed(self, sent_at: float) -> None:
        """A heartbeat that was sent at `sent_at` has renewed it."""
        self.until = max(self.until, sent_at + self.seconds)

    def body_ends(self, *, committed: bool, slept_s: float = 0.0) -> tuple[float, StopReason]:
        """When the body must be stopped by what is known now, by Trio's clock, and the reason of that stop.

        `slept_s` is what the machine has slept: the clock of leases is ahead of Trio's by it.
        A body that has `committed` needs only its key: nobody will run its job again.
        """
        until, reason = self.timeout_at, StopReason.TIMEOUT
        if self.period_ends_at < until:
            until, reason = self.period_ends_at, StopReason.PERIOD_END
        if not committed and (lease_ends := self.until - slept_s - margin_s(self.seconds)) < until:
            until, reason = lease_ends, StopReason.LEASE_ENDED
        if (key_ends := self.key_safe_until - slept_s) < until:
            until, reason = key_ends, StopReason.KEY_LOST
        return until, reason

    def body_is_killed(self) -> tuple[float, float]:
        """When a body in a process of its own is killed, whatever it does: before its job, or key, can be another's.

        By the clock of leases.
        A quarter of the margin after it was told to stop; and when the kernel does it, if nobody has: at its half.
        """
        margin = margin_s(self.seconds)
        return (
            min(self.until - margin * 3 / 4, self.key_safe_until + MIN_MARGIN_S / 4),
            min(self.until - margin / 2, self.key_safe_until + MIN_MARGIN_S / 2),
        )

    def body_is_killed_for(self) -> StopReason:
        """What has ended then."""
        is_key = self.body_is_killed()[1] > self.key_safe_until
        return StopReason.KEY_LOST if is_key else StopReason.LEASE_ENDED

    def commit_ends(self, slept_s: float = 0.0) -> float:
        """The last moment for a commit's reply, by Trio's clock: then another worker may have the job, or its key."""
        return min(self.until - margin_s(self.seconds), self.key_safe_until) - slept_s

"""Clock of leases and keys: Trio's clock plus the time that the machine has slept since this process began.

Trio's clock stops while the machine sleeps; the clock of the database, and the leases of other processes, continue. All
times of leases and keys are by this clock. To wait for such a time, subtract the sleep known so far: the result is a
time of Trio's clock.
"""

from __future__ import annotations

import time
from typing import Final

import attrs
import trio

NOISE_S: Final = 0.01
"""Two clocks are read one after the other, so a difference up to this many seconds is ignored."""


def _asleep_s() -> float:
    """Return the seconds that this machine has slept since it was started; 0 if the kernel does not report it."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    if clock is None:
        return 0.0
    while True:
        before = time.monotonic()
        asleep_s = time.clock_gettime(clock) - before
        if time.monotonic() - before < NOISE_S / 2:  # nothing delayed us between the readings
            return asleep_s


@attrs.define
class _Sleep:
    """Seconds that the machine slept `before` this process began, and `since` then."""

    before: float = attrs.field(factory=_asleep_s)
    since: float = 0.0


_sleep: Final = _Sleep()


def slept_s() -> float:
    """Return the seconds that the machine has slept since this process began."""
    since = _asleep_s() - _sleep.before
    if since > _sleep.since + NOISE_S:
        _sleep.since = since
    return _sleep.since


def lease_time() -> float:
    """Return the current time of the clock of leases and keys."""
    return trio.current_time() + slept_s()

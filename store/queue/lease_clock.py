"""The clock of leases and keys: Trio's, and what the machine has slept since this process began.

Trio's clock stands still while the machine sleeps; the database's goes on, and others' leases with it. All times of
leases and keys are by this clock. Who waits for one takes what was slept from it: that is Trio's time, by what is known
now.
"""

from __future__ import annotations

import time
from typing import Final

import attrs
import trio

NOISE_S: Final = 0.01
"""Two clocks are read one after the other: a difference that is not longer is none."""


def _asleep_s() -> float:
    """How long this machine was asleep since it was started. Where the kernel does not tell, never."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    if clock is None:
        return 0.0
    while True:
        before = time.monotonic()
        asleep_s = time.clock_gettime(clock) - before
        if time.monotonic() - before < NOISE_S / 2:  # nothing has held us up in between
            return asleep_s


@attrs.define
class _Sleep:
    """`before` is what was slept when this process began, `since` what was slept from then on."""

    before: float = attrs.field(factory=_asleep_s)
    since: float = 0.0


_sleep: Final = _Sleep()


def slept_s() -> float:
    """How long the machine has slept since this process began."""
    since = _asleep_s() - _sleep.before
    if since > _sleep.since + NOISE_S:
        _sleep.since = since
    return _sleep.since


def lease_time() -> float:
    """The time now, by the clock of leases and keys."""
    return trio.current_time() + slept_s()

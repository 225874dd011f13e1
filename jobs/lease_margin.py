"""The time before the end of a lease in which a run that was stopped must have ended."""

from __future__ import annotations

from typing import Final

MIN_MARGIN_S: Final = 0.5
"""The margin of the shortest lease, in seconds; that of keys is no less."""


def margin_s(lease_s: float) -> float:
    """How long before its lease ends a body is stopped: a tenth of the lease, from half a second to five."""
    return min(max(lease_s / 10, MIN_MARGIN_S), 5.0)


def last_word_s(lease_s: float) -> float:
    """How long a run that was stopped may still write: half of the margin."""
    return margin_s(lease_s) / 2

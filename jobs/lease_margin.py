"""Time before the end of a lease by which a stopped run must have ended."""

from __future__ import annotations

from typing import Final

MIN_MARGIN_S: Final = 0.5
"""Margin of the shortest lease, in seconds; that of keys is never shorter."""


def margin_s(lease_s: float) -> float:
    """Return how long before its lease ends a handler is stopped: a tenth of the lease, from 0.5 to 5 seconds."""
    return min(max(lease_s / 10, MIN_MARGIN_S), 5.0)


def last_word_s(lease_s: float) -> float:
    """Return how long a stopped run may still write: half of the margin."""
    return margin_s(lease_s) / 2

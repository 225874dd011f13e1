"""Number of units within a span of time, and their share of what the rate limits allow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dataloader.jobs.limits import Supplier

Calls = Sequence[tuple[float, int]]
"""Time, in seconds of the machine's monotonic clock, and number of units."""


def most_within(calls: Iterable[tuple[float, int]], span_s: float) -> int:
    """Return the largest number of units within any span of `span_s` seconds, its end exclusive."""
    ordered = sorted(calls)
    most = units = first = 0
    for at, taken in ordered:
        units += taken
        while ordered[first][0] <= at - span_s:
            units -= ordered[first][1]
            first += 1
        most = max(most, units)
    return most


def allowed_per_s(supplier: Supplier) -> float:
    """Return the units per second that its rate limits allow in the long run, each span lengthened by the margin."""
    return min(rate_limit.requests / (rate_limit.per_s + supplier.margin) for rate_limit in supplier.rate_limits)


def share_used(calls: Calls, supplier: Supplier, until: float) -> float:
    """Return the share of the lengthened rate limits that was used until then.

    It counts from the end of the longest span after the first call on: before, a fresh rate limit allows more.
    """
    begin = min(at for at, _ in calls) + max(rate_limit.per_s for rate_limit in supplier.rate_limits) + supplier.margin
    taken = sum(units for at, units in calls if begin <= at < until)
    return taken / (allowed_per_s(supplier) * (until - begin))

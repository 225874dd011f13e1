"""Counters, gauges and histograms of a process, in plain numbers; web/api/metrics.py shows them to Prometheus.

An observation takes less than a microsecond, because each job passes through several: numbers go into plain lists and
become Prometheus families only at a scrape. That is safe without locks if one thread writes a measure.

Rejected: prometheus_client's own `Counter` and `Histogram`, which take a lock and walk their buckets each time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from typing import Final, TypeAlias

import attrs

LATENCY_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0)
"""Upper bounds for durations of milliseconds: a claim, a pickup, a stall."""
RUN_S: Final = (0.005, 0.025, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14_400.0)
"""Upper bounds for the run of a job."""


@attrs.define(eq=False)
class Counter:
    """Numbers that only grow, one for each combination of values of `labels`, or one number without labels."""

    name: str
    about: str
    labels: tuple[str, ...] = ()
    counts: defaultdict[tuple[str, ...], float] = attrs.field(factory=lambda: defaultdict(float), init=False)

    def __attrs_post_init__(self) -> None:
        """Set a counter without labels to zero, so that it is shown from the start."""
        if not self.labels:
            self.counts[()] = 0

    def add(self, *values: str, number: float = 1) -> None:
        """Add `number` to the count of these values of the labels."""
        self.counts[values] += number


@attrs.define(eq=False)
class Gauge:
    """Number that goes up and down."""

    name: str
    about: str
    value: float = 0


class Distribution:
    """Observations by bucket; the last bucket is for values beyond all bounds."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        """Start without observations."""
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one observation."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def __add__(self, other: Distribution) -> Distribution:
        both = Distribution(self.bounds)
        both.counts = [one + another for one, another in zip(self.counts, other.counts, strict=True)]
        both.total = self.total + other.total
        return both


@attrs.define(eq=False)
class Histogram:
    """Distributions over `bounds`, one for each combination of values of `labels`."""

    name: str
    about: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = LATENCY_S
    distributions: dict[tuple[str, ...], Distribution] = attrs.field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        """Create the distribution of a histogram without labels, so that it is shown from the start."""
        if not self.labels:
            self.distributions[()] = Distribution(self.bounds)

    def observe(self, value: float, *values: str) -> None:
        """Count `value` for these values of the labels."""
        distribution = self.distributions.get(values)
        if distribution is None:
            distribution = self.distributions[values] = Distribution(self.bounds)
        distribution.observe(value)


Measure: TypeAlias = Counter | Gauge | Histogram

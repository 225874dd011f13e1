"""Verdict of a soak: figures that must be flat are, nothing was lost, no key was held twice.

Flat means: the line of least squares through the second half rises by less than a share of the mean, or less than usual
noise.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Final

import attrs

Sample = Mapping[str, float]
"""Figures of one sample, by name."""


@attrs.frozen
class Flat:
    """Figure that may rise in the second half by `share` of its mean, or by `least`, whichever is more."""

    figure: str
    text: str
    share: float
    least: float


FLAT: Final = (
    Flat("rss_mib", "memory of the first process, MiB", 0.05, 8),
    Flat("descriptors", "its descriptors", 0.1, 8),
    Flat("threads", "its threads", 0.1, 3),
    Flat("slots_used", "its slots in use", 0.5, 10),
    Flat("pool_connections_used", "its pool's connections in use", 0.5, 2),
    Flat("jobs_mib", "size of dl_jobs with indexes, MiB", 0.2, 16),
    Flat("job_events_mib", "size of dl_job_events with indexes, MiB", 0.2, 16),
    Flat("jobs_dead", "dead rows in dl_jobs", 0.5, 40_000),
    Flat("job_events_dead", "dead rows in dl_job_events", 0.5, 40_000),
    Flat("queued", "jobs queued", 0.5, 2_000),
)
WARM_UP: Final = 1
"""Number of samples at the beginning that are ignored."""
LATENCY: Final = {"p50_ms": (1.5, 5.0), "p99_ms": (2.0, 50.0)}
"""Allowed factor, and additional milliseconds, of the last quarter's median relative to the first's."""
PACE: Final = 0.98


@attrs.frozen
class SoakOutcome:
    """Final values."""

    seconds: float
    per_s: int
    accepted: int
    ended: Mapping[str, int]
    left: int
    overlaps: int
    unexpected_exits: int


@attrs.frozen
class Judgement:
    """One requirement, the found value, and whether it is met."""

    text: str
    found: str
    is_good: bool


def judged(samples: Sequence[Sample], outcome: SoakOutcome) -> list[Judgement]:
    """Return all judgements."""
    succeeded = outcome.ended.get("succeeded", 0)
    others = {status: count for status, count in outcome.ended.items() if count and status != "succeeded"}
    asked = outcome.seconds * outcome.per_s
    certain = [
        Judgement(
            f"{outcome.per_s} jobs a second were accepted",
            f"{outcome.accepted:,} of {asked:,.0f}",
            outcome.accepted >= PACE * asked,
        ),
        Judgement(
            "every accepted job succeeded",
            f"{succeeded:,} of {outcome.accepted:,}, {outcome.left:,} left, {others or 'no others'}",
            succeeded == outcome.accepted and not outcome.left and not others,
        ),
        Judgement("no two runs of a key at once", f"{outcome.overlaps:,}", outcome.overlaps == 0),
        Judgement("no exit but as was asked for", f"{outcome.unexpected_exits:,}", outcome.unexpected_exits == 0),
    ]
    steady = samples[WARM_UP:]
    return certain + [_latency(steady, figure) for figure in LATENCY] + [_flat(steady, flat) for flat in FLAT]


def drift(points: Sequence[tuple[float, float]]) -> float:
    """Return by how much the line of least squares rises from the first point to the last."""
    if len(points) < 3:
        return 0.0
    slope = statistics.linear_regression(*zip(*points, strict=True)).slope
    return slope * (points[-1][0] - points[0][0])


def points(samples: Sequence[Sample], figure: str) -> list[tuple[float, float]]:
    """Return the times and values of a figure, in the samples that have it."""
    return [(sample["at_s"], sample[figure]) for sample in samples if figure in sample]


def _flat(samples: Sequence[Sample], flat: Flat) -> Judgement:
    half = points(samples[len(samples) // 2 :], flat.figure)
    if len(half) < 3:
        return Judgement(f"flat: {flat.text}", "not measured", is_good=False)
    mean, rise = statistics.fmean(value for _, value in half), drift(half)
    most = max(flat.share * mean, flat.least)
    return Judgement(f"flat: {flat.text}", f"{mean:,.1f}, {rise:+,.1f} (most {most:+,.1f})", rise <= most)


def _latency(samples: Sequence[Sample], figure: str) -> Judgement:
    values = [value for _, value in points(samples, figure)]
    text = f"trigger to end, {figure.removesuffix('_ms')}, as at the start"
    if len(values) < 4:
        return Judgement(text, "not measured", is_good=False)
    quarter = len(values) // 4
    first, last = statistics.median(values[:quarter]), statistics.median(values[-quarter:])
    times, more = LATENCY[figure]
    return Judgement(text, f"{first:.1f} → {last:.1f} ms", last <= first * times + more)

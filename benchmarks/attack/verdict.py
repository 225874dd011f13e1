"""Bounds for the effects of an attack, and the table of its results."""

from __future__ import annotations

import attrs

MOST_MS = 100.0
"""Bound for the 99th percentile of /health."""
MOST_MIB = 250.0
HEADER = f"{'attack':<34} {'MiB':>4} {'p50 ms':>6} {'p99 ms':>6} {'max ms':>6} {'errors':>6}  verdict"


@attrs.frozen(kw_only=True)
class Row:
    """Attack: peak memory of the service, durations and losses of /health, and logged errors."""

    name: str
    rss_mib: float
    health_ms: tuple[float, ...]
    lost: int
    errors: tuple[str, ...]


def percentile(values: tuple[float, ...], share: float) -> float:
    """Return the value that `share` of all do not exceed; infinite if there are none."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))] if values else float("inf")


def missed(row: Row) -> list[str]:
    """Return the missed bounds, in words for the table."""
    bounds = {
        "lost": row.lost == 0 and bool(row.health_ms),
        "slow": percentile(row.health_ms, 0.99) <= MOST_MS,
        "memory": row.rss_mib <= MOST_MIB,
        "errors": not row.errors,
    }
    return [name for name, holds in bounds.items() if not holds]


def line(row: Row) -> str:
    """Return the line of the table, at most 80 columns."""
    p50, p99, most = (percentile(row.health_ms, share) for share in (0.5, 0.99, 1.0))
    verdict = " ".join(missed(row)) or "good"
    return (
        f"{row.name:<34} {row.rss_mib:>4.0f} {p50:>6.1f} {p99:>6.1f} {most:>6.0f} {len(row.errors):>6}  {verdict:.10}"
    )

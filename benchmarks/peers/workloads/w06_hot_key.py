"""W6: jobs of one hot lock key before independent ones, which must not be delayed noticeably."""

from __future__ import annotations

from benchmarks.peers.arena import Arena, Load
from benchmarks.peers.contenders import Contender
from benchmarks.peers.workload import Bar, Figures, Sizes, Workload


def measure(arena: Arena, contender: Contender, sizes: Sizes) -> Figures:
    free = Load(sizes.independent, first=sizes.hot)
    alone, _ = _run(arena, contender, arena.fresh(contender, free), sizes)
    behind, gap_ms = _run(arena, contender, arena.fresh(contender, Load(sizes.hot, key="hot"), free), sizes)
    figures = {}
    if alone is not None:
        figures["alone_rate"] = alone
    if behind is not None:
        figures["rate"] = behind
    if alone is not None and behind is not None:
        figures["ratio"] = behind / alone
    if gap_ms is not None:
        figures["gap_ms"] = gap_ms
    return figures


def _run(arena: Arena, contender: Contender, database: str, sizes: Sizes) -> tuple[float | None, float | None]:
    """Return the rate at which the independent jobs *ran*, and the median pause between two hot ones meanwhile.

    Both are None if not all had run by the time cap.
    """
    arguments = (f"--target={sizes.independent}", f"--target-from={sizes.hot}")
    with arena.program(contender, database, "worker", *arguments) as worker:
        started = worker.wait("start")["t"]
        ran = worker.get("ran", sizes.cap_s)
    if ran is None:
        return None, None
    return sizes.independent / (ran["t"] - started) * 1e9, ran["hot_gap_ms"]


WORKLOAD = Workload(
    name="w6",
    title="a hot lock key in front",
    measure=measure,
    figures={
        "alone_rate": "independent alone, jobs/s",
        "rate": "behind the hot key, jobs/s",
        "ratio": "ratio",
        "gap_ms": "end to next start of the key, p50, ms",
    },
    bars=(
        Bar(text="≥ 0.9 × the rate alone", figure="ratio", least=0.9),
        Bar(text="next of the key within 5 ms (p50)", figure="gap_ms", most=5),
    ),
)

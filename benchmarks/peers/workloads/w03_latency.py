"""W3: from the trigger to the first line of the handler, on an idle queue, one job at a time."""

from __future__ import annotations

from benchmarks.peers.arena import Arena
from benchmarks.peers.contenders import Contender
from benchmarks.peers.latency import one_at_a_time, percentiles
from benchmarks.peers.workload import Bar, Figures, Sizes, Workload


def measure(arena: Arena, contender: Contender, sizes: Sizes) -> Figures:
    return percentiles(one_at_a_time(arena, contender, arena.fresh(contender), samples=sizes.samples))


WORKLOAD = Workload(
    name="w3",
    title="trigger to start, idle",
    measure=measure,
    figures={"p50_ms": "p50, ms", "p99_ms": "p99, ms", "max_ms": "longest, ms"},
    bars=(
        Bar(text="p50 ≤ 1.0 × pgqueuer", figure="p50_ms", of=("pgqueuer",), most=1),
        Bar(text="p99 ≤ 1.2 × pgqueuer", figure="p99_ms", of=("pgqueuer",), most=1.2),
    ),
)

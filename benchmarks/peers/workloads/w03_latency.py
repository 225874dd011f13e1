"""W3: from the trigger to the first line of the handler, on an idle queue, one job at a time.

Another process triggers: for each peer by its own call, for ours by SQL, and in a separate row by HTTP to the worker.
"""

from __future__ import annotations

from benchmarks.peers.arena import Arena
from benchmarks.peers.contenders import OURS, Contender
from benchmarks.peers.latency import one_at_a_time, percentiles
from benchmarks.peers.workload import Bar, Figures, Sizes, Workload


def measure(arena: Arena, contender: Contender, sizes: Sizes) -> Figures:
    return percentiles(one_at_a_time(arena, contender, arena.fresh(contender), samples=sizes.samples))


def _bars(ours: str, way: str, p50: float, p99: float) -> tuple[Bar, ...]:
    return tuple(
        Bar(
            text=f"{way}: {name} ≤ {most:.1f} × pgqueuer",
            figure=f"{name}_ms",
            ours=(ours,),
            of=("pgqueuer",),
            most=most,
        )
        for name, most in (("p50", p50), ("p99", p99))
    )


WORKLOAD = Workload(
    name="w3",
    title="trigger to start, idle",
    measure=measure,
    figures={"p50_ms": "p50, ms", "p99_ms": "p99, ms", "max_ms": "longest, ms"},
    bars=(*_bars(OURS, "by SQL", 1.1, 1.2), *_bars(f"{OURS} http", "by HTTP", 1.0, 1.0)),
    our_modes=("default", "http"),
)

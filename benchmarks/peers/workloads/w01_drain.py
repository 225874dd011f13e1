"""W1: no-op jobs with distinct lock keys, enqueued before, drained by one process; a short and a long queue."""

from __future__ import annotations

from benchmarks.peers.arena import Arena, Load
from benchmarks.peers.contenders import Contender
from benchmarks.peers.drain import drain
from benchmarks.peers.workload import HEALTH, HEALTH_BAR, Bar, Figures, Sizes, Workload


def measure(arena: Arena, contender: Contender, sizes: Sizes) -> Figures:
    figures: dict[str, float] = {}
    for prefix, jobs in (("short_", sizes.drain), ("long_", sizes.long_drain)):
        database = arena.fresh(contender, Load(jobs))
        drained = drain(arena, contender, database, jobs=jobs, cap_s=sizes.cap_s)
        figures |= {"jobs": jobs} | drained.figures(prefix)
    if f"long_{HEALTH}" in figures:
        figures[HEALTH] = max(figures[f"short_{HEALTH}"], figures[f"long_{HEALTH}"])
    return figures


def _bars(figure: str, queue: str) -> tuple[Bar, ...]:
    return (
        Bar(text=f"{queue}: ≥ 0.8 × pgqueuer tuned", figure=figure, of=("pgqueuer tuned",), least=0.8),
        Bar(text=f"{queue}: ≥ 2 × pgqueuer", figure=figure, of=("pgqueuer",), least=2),
        Bar(text=f"{queue}: ≥ 20 × procrastinate", figure=figure, of=("procrastinate",), least=20),
    )


WORKLOAD = Workload(
    name="w1",
    title="drain of no-op jobs",
    measure=measure,
    figures={
        "short_rate": "short queue, jobs/s",
        "long_rate": "long queue, jobs/s",
        "long_cpu_us_per_job": "worker's CPU, µs/job",
        HEALTH: "/health p99, ms",
    },
    bars=(*_bars("short_rate", "short"), *_bars("long_rate", "long"), HEALTH_BAR),
)

"""W4: the rate does not depend on the number of waiting ready jobs, and the first starts immediately."""

from __future__ import annotations

from benchmarks.peers.arena import Arena, Load
from benchmarks.peers.contenders import OURS, Contender
from benchmarks.peers.drain import drain
from benchmarks.peers.workload import HEALTH_BAR, Bar, Figures, Sizes, Workload

SECONDS = 15
FEW = 10_000


def measure(arena: Arena, contender: Contender, sizes: Sizes) -> Figures:
    few = drain(arena, contender, arena.fresh(contender, Load(FEW)), jobs=FEW, cap_s=SECONDS)
    database = arena.fresh(contender, Load(sizes.backlog))
    many = drain(arena, contender, database, jobs=sizes.backlog, cap_s=SECONDS)
    arena.drop(database)
    figures = many.figures() | {"few_rate": few.rate, "ratio": many.rate / few.rate}
    if contender.peer == OURS and many.first_s is not None:
        figures["first_ms"] = many.first_s * 1000
    return figures


WORKLOAD = Workload(
    name="w4",
    title="a large backlog",
    measure=measure,
    figures={
        "few_rate": f"{FEW:,} wait, jobs/s",
        "rate": "the backlog waits, jobs/s",
        "ratio": "ratio",
        "first_ms": "ready to first start, ms",
    },
    bars=(
        Bar(text="≥ 0.95 × the rate at 10,000", figure="ratio", least=0.95),
        Bar(text="first start within 50 ms", figure="first_ms", most=50),
        HEALTH_BAR,
    ),
)

"""W7: another session holds an old snapshot for the whole drain, so that no dead row can be removed."""

from __future__ import annotations

from benchmarks.peers.arena import Arena, Load
from benchmarks.peers.contenders import Contender
from benchmarks.peers.drain import drain
from benchmarks.peers.workload import Bar, Figures, Sizes, Workload


def measure(arena: Arena, contender: Contender, sizes: Sizes) -> Figures:
    free = drain(arena, contender, arena.fresh(contender, Load(sizes.held)), jobs=sizes.held, cap_s=sizes.cap_s)
    database = arena.fresh(contender, Load(sizes.held))
    with arena.held_snapshot(contender, database):
        held = drain(arena, contender, database, jobs=sizes.held, cap_s=sizes.cap_s)
    figures = held.figures() | {"free_rate": free.rate, "ratio": held.rate / free.rate}
    if held.first_tenth is not None and held.last_tenth is not None:
        figures["last_to_first"] = held.last_tenth / held.first_tenth
    return figures


WORKLOAD = Workload(
    name="w7",
    title="an old snapshot is held",
    measure=measure,
    figures={
        "free_rate": "none held, jobs/s",
        "rate": "held, jobs/s",
        "ratio": "ratio",
        "last_to_first": "last tenth to first, ratio",
    },
    bars=(
        Bar(text="≥ 0.75 × free", figure="ratio", least=0.75),
        Bar(text="last tenth ≥ 0.7 × the first", figure="last_to_first", least=0.7),
    ),
)

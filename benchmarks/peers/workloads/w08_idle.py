"""W8: cost of an idle worker. Each of our transactions is one statement when it is idle."""

from __future__ import annotations

import time

from benchmarks.peers.arena import Arena
from benchmarks.peers.contenders import Contender
from benchmarks.peers.workload import Bar, Figures, Sizes, Workload

SETTLE_S = 8


def measure(arena: Arena, contender: Contender, sizes: Sizes) -> Figures:
    database = arena.fresh(contender)
    with arena.program(contender, database, "worker") as worker:
        worker.wait("start")
        time.sleep(SETTLE_S)
        commits, cpu_s, backends = arena.commits(database), worker.cpu_s(), arena.backends_cpu_s(database)
        time.sleep(sizes.idle_s)
        later = arena.backends_cpu_s(database)
        return {
            "per_s": (arena.commits(database) - commits) / sizes.idle_s,
            "cpu_s": (worker.cpu_s() - cpu_s) * 30 / sizes.idle_s,
            "backend_cpu_s": sum(used - backends.get(pid, 0) for pid, used in later.items()) * 30 / sizes.idle_s,
            "connections": len(later),
        }


WORKLOAD = Workload(
    name="w8",
    title="idle",
    measure=measure,
    figures={
        "per_s": "transactions/s",
        "cpu_s": "worker's CPU in 30 s, s",
        "backend_cpu_s": "backends' CPU in 30 s, s",
        "connections": "connections",
    },
    bars=(
        Bar(text="≤ 1 statement/s", figure="per_s", most=1),
        Bar(text="≤ 0.1 s of CPU in 30 s", figure="cpu_s", most=0.1),
    ),
)

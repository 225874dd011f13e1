"""W10: a thousand jobs asleep concurrently in one process: connections, memory, and the start of the last one."""

from __future__ import annotations

import time

from benchmarks.peers.arena import Arena, Load
from benchmarks.peers.contenders import Contender
from benchmarks.peers.workload import Bar, Figures, Sizes, Workload

JOBS = 1_000
SETTLE_S = 3


def measure(arena: Arena, contender: Contender, _sizes: Sizes) -> Figures:
    arguments = ("--job=sleep", "--sleep=60", f"--concurrency={JOBS}")
    with arena.program(contender, arena.fresh(contender), "worker", *arguments) as worker:
        worker.wait("start")
        time.sleep(SETTLE_S)
        idle_mib = worker.rss_mib()
    database = arena.fresh(contender, Load(JOBS))
    with arena.program(contender, database, "worker", *arguments) as worker:
        started = worker.wait("start")["t"]
        starts = [worker.wait("s", 30)["t"] for _ in range(JOBS)]
        time.sleep(SETTLE_S)
        return {
            "connections": len(arena.backends_cpu_s(database)),
            "above_idle_mib": worker.rss_mib() - idle_mib,
            "spread_s": (max(starts) - min(starts)) / 1e9,
            "all_s": (max(starts) - started) / 1e9,
        }


WORKLOAD = Workload(
    name="w10",
    title="1,000 jobs asleep",
    measure=measure,
    figures={
        "connections": "connections",
        "above_idle_mib": "above the idle process, MiB",
        "spread_s": "first to last start, s",
        "all_s": "worker's start to last start, s",
    },
    bars=(
        Bar(text="≤ 6 connections", figure="connections", most=6),
        Bar(text="≤ 60 MB above idle", figure="above_idle_mib", most=60e6 / 2**20),
        Bar(text="all started within 0.5 s", figure="spread_s", most=0.5),
    ),
)

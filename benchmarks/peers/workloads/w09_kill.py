"""W9: kill -9 while jobs run; a second worker, started immediately, runs all of them again, each once."""

from __future__ import annotations

import time
from collections import Counter

from benchmarks.peers.arena import Arena, Load
from benchmarks.peers.contenders import Contender
from benchmarks.peers.workload import Bar, Figures, Sizes, Workload

JOBS = 10
BODY_S = 5
LEASE_AND_REAPER_S = 70
"""Sum of the defaults: a lease of 60 s, checked every 10 s."""
CAP_S = 180


def measure(arena: Arena, contender: Contender, _sizes: Sizes) -> Figures:
    database = arena.fresh(contender, Load(JOBS))
    arguments = ("--job=sleep", f"--sleep={BODY_S}")
    with arena.program(contender, database, "worker", *arguments) as first:
        for _ in range(JOBS):
            first.wait("s")
        time.sleep(1)
    killed = time.monotonic_ns()
    starts: Counter[int] = Counter()
    last_s = float(CAP_S)
    with arena.program(contender, database, "worker", *arguments) as second:
        while len(starts) < JOBS and (time.monotonic_ns() - killed) / 1e9 < CAP_S:
            if event := second.get("s", 1):
                starts[event["n"]] += 1
                last_s = (event["t"] - killed) / 1e9
        time.sleep(2 * BODY_S)
        starts.update(event["n"] for event in second.gathered("s"))
    return {"again": len(starts), "last_s": last_s, "twice": sum(starts.values()) - len(starts)}


WORKLOAD = Workload(
    name="w9",
    title="kill -9 with ten running",
    measure=measure,
    figures={"again": "run again", "last_s": "the last after, s", "twice": "run twice by the second worker"},
    bars=(
        Bar(text="all run again", figure="again", least=JOBS),
        Bar(text="within lease + reaper period", figure="last_s", most=LEASE_AND_REAPER_S),
        Bar(text="none twice", figure="twice", most=0),
    ),
    solo=True,
)

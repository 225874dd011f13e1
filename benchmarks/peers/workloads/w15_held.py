"""W15: 800 jobs a second while another session holds an old snapshot: the last start as quickly as the first."""

from __future__ import annotations

import statistics

from benchmarks.peers.arena import Arena
from benchmarks.peers.contenders import Contender
from benchmarks.peers.latency import Paced, at_a_pace
from benchmarks.peers.workload import Bar, Figures, Sizes, Workload

PER_S = 800
JOBS_A_CALL = 4
"""Jobs per call of the one enqueueing process, which could not make a call for each job."""
PARTS = 8
"""The first and the last of this number of parts are compared: half a minute each of four."""


def measure(arena: Arena, contender: Contender, sizes: Sizes) -> Figures:
    database = arena.fresh(contender)
    with arena.held_snapshot(contender, database):
        return pickup(at_a_pace(arena, contender, database, per_s=PER_S, seconds=sizes.held_s, jobs_a_call=JOBS_A_CALL))


def pickup(paced: Paced) -> dict[str, float]:
    """Return the median of the first and of the last part, and the actual number of enqueued jobs per second."""
    count = len(paced.took_ms)
    first, last = (
        statistics.median(paced.took_ms[number] for number in numbers)
        for numbers in (range(count // PARTS), range(count - count // PARTS, count))
    )
    seconds = max(paced.enqueued_at.values()) - min(paced.enqueued_at.values())
    return {"first_ms": first, "last_ms": last, "ratio": last / first, "per_s": count / seconds}


WORKLOAD = Workload(
    name="w15",
    title="pickup under a held snapshot",
    measure=measure,
    figures={
        "first_ms": "first eighth of the time, p50, ms",
        "last_ms": "last eighth, p50, ms",
        "ratio": "ratio",
        "per_s": "enqueued, jobs/s",
    },
    bars=(
        Bar(text="last ≤ 1.5 × the first (p50)", figure="ratio", most=1.5),
        Bar(text="as many as were to be enqueued", figure="per_s", least=0.95 * PER_S),
    ),
    solo=True,
)

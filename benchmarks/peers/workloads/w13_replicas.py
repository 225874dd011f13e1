"""W13: the same drain by one, two and four processes: no deadlock, no wait for a row's lock, no collapse."""

from __future__ import annotations

import contextlib
import time

from benchmarks.peers.arena import Arena, Load, scalar
from benchmarks.peers.contenders import Contender
from benchmarks.peers.workload import Bar, Figures, Sizes, Workload

PROCESSES = (1, 2, 4)
MARK = 100
LOOK_EVERY_S = 0.05

_WAITING = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND wait_event_type = 'Lock' AND wait_event IN ('tuple', 'transactionid')
"""
_DEADLOCKS = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"


def measure(arena: Arena, contender: Contender, sizes: Sizes) -> Figures:
    figures: dict[str, float] = {"waits": 0, "deadlocks": 0}
    for processes in PROCESSES:
        found = _drain(arena, contender, processes, sizes)
        figures[f"rate_{processes}"] = found["rate"]
        for name in ("waits", "deadlocks"):
            figures[name] += found[name]
    rates = [figures[f"rate_{processes}"] for processes in PROCESSES]
    return figures | {"worst_to_best": min(rates) / max(rates)}


def _drain(arena: Arena, contender: Contender, processes: int, sizes: Sizes) -> dict[str, float]:
    """Return the rate since the first start, and the number of waits seen in checks every 50 ms."""
    jobs = sizes.long_drain
    database = arena.fresh(contender, Load(jobs))
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(arena.connect(database))
        workers = [
            stack.enter_context(arena.program(contender, database, "worker", f"--mark={MARK}"))
            for _ in range(processes)
        ]
        began = at = min(worker.wait("start")["t"] for worker in workers)
        hits = [0] * processes
        done = waits = 0
        while done < jobs and at - began < sizes.cap_s * 1e9:
            time.sleep(LOOK_EVERY_S)
            waits += scalar(connection, _WAITING)
            for number, worker in enumerate(workers):
                hits[number] = max([hits[number], *(event["hits"] for event in worker.gathered("mark"))])
            at = time.monotonic_ns()
            # Counting reads the table: do it only when the workers report that nearly all jobs have run.
            if sum(hits) > jobs - 2 * MARK * processes:
                done = arena.done(contender, connection)
        if done < jobs:
            at, done = time.monotonic_ns(), arena.done(contender, connection)
        return {"rate": done / (at - began) * 1e9, "waits": waits, "deadlocks": scalar(connection, _DEADLOCKS)}


WORKLOAD = Workload(
    name="w13",
    title="1, 2, 4 processes",
    measure=measure,
    figures={
        **{f"rate_{processes}": f"{processes} processes, jobs/s" for processes in PROCESSES},
        "waits": "waits for row locks seen",
        "deadlocks": "deadlocks",
    },
    bars=(
        Bar(text="each ≥ 0.85 × the best", figure="worst_to_best", least=0.85),
        Bar(text="no deadlock", figure="deadlocks", most=0),
        Bar(text="no wait for a row lock", figure="waits", most=0),
    ),
    solo=True,
)

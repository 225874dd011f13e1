"""From the call that enqueues a job to the first line of its handler: another process enqueues, a worker runs.

There are two modes: one job at a time on an idle queue, and jobs at a fixed rate, whether or not earlier ones have run.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Collection

import attrs

from benchmarks.peers.arena import Arena
from benchmarks.peers.contenders import OURS, Contender

WARM_UP = 5
PAUSE_S = 0.02
SETTLE_S = 3.0
LONG_ENOUGH_MS = 20_000
"""A polling tool gets fewer samples: its latency is clear after this time."""


def one_at_a_time(arena: Arena, contender: Contender, database: str, *, samples: int) -> list[float]:
    """Return the milliseconds of each sample, on an otherwise idle worker."""
    took: list[float] = []
    with arena.program(contender, database, "worker", "--job=report") as worker:
        worker.wait("start")
        address = [f"--url={worker.wait('ready')['url']}"] if contender.peer == OURS else []
        time.sleep(SETTLE_S)
        with arena.program(contender, database, "feed", *address) as feed:
            feed.wait("ready")
            for number in range(samples + WARM_UP):
                feed.write(f"{number} 1\n")
                enqueued, ran = feed.wait("q"), worker.wait("s")
                while ran["n"] != number:
                    ran = worker.wait("s")
                if number >= WARM_UP:
                    took.append((ran["t"] - enqueued["t"]) / 1e6)
                if len(took) > WARM_UP and sum(took) > LONG_ENOUGH_MS:
                    break
                time.sleep(PAUSE_S)
    return took


@attrs.frozen
class Paced:
    """Jobs at a fixed rate, by number: milliseconds of each, and when it was enqueued (wall clock, seconds)."""

    took_ms: dict[int, float]
    enqueued_at: dict[int, float]


def at_a_pace(
    arena: Arena, contender: Contender, database: str, *, per_s: float, seconds: float, jobs_a_call: int = 1
) -> Paced:
    """Enqueue `per_s` × `seconds` jobs, numbered from 0, in calls of `jobs_a_call`."""
    epoch_ns = time.time_ns() - time.monotonic_ns()
    with contextlib.ExitStack() as stack:
        worker = stack.enter_context(arena.program(contender, database, "worker", "--job=report"))
        feed = stack.enter_context(arena.program(contender, database, "feed"))
        worker.wait("start")
        feed.wait("ready")
        time.sleep(SETTLE_S)
        began, count = time.monotonic(), int(per_s * seconds)
        for first in range(0, count, jobs_a_call):
            time.sleep(max(began + first / per_s - time.monotonic(), 0))
            feed.write(f"{first} {min(jobs_a_call, count - first)}\n")
        answers = (feed.wait("q") for _ in range(count))
        enqueued = {event["n"]: event["t"] for event in answers}
        started = (worker.wait("s") for _ in range(count))
        took_ms = {event["n"]: (event["t"] - enqueued[event["n"]]) / 1e6 for event in started}
        time.sleep(SETTLE_S)  # the last outcomes may not be written yet
    return Paced(took_ms, {number: (at + epoch_ns) / 1e9 for number, at in enqueued.items()})


def percentiles(took_ms: Collection[float]) -> dict[str, float]:
    """Return the median, the 99th percentile and the maximum."""
    return {
        "p50_ms": statistics.median(took_ms),
        "p99_ms": statistics.quantiles(took_ms, n=100, method="inclusive")[98],
        "max_ms": max(took_ms),
    }

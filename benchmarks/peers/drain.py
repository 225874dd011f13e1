"""Observes a worker that drains a database: the measurement that most workloads share.

A rate is the number of jobs recorded as complete in the database, divided by the time since the start of the worker,
including the connection but not the interpreter's start. After the worker's last job the database is read every 20 ms.
"""

from __future__ import annotations

import contextlib
import time

import attrs

from benchmarks.peers.arena import Arena
from benchmarks.peers.contenders import OURS, Contender
from benchmarks.peers.health import HealthProbe

ASK_EVERY_S = 0.02
MARKS = 10
"""A drain reports when each tenth of its jobs has run, so that its first and its last can be compared."""


@attrs.frozen(kw_only=True)
class Drained:
    """Result of a drain. `first_tenth` and `last_tenth` are rates; None if the time was up before."""

    rate: float
    done: int
    seconds: float
    cpu_us_per_job: float
    twice: int | None
    first_s: float | None
    first_tenth: float | None
    last_tenth: float | None
    health_p99_ms: float | None

    def figures(self, prefix: str = "") -> dict[str, float]:
        """Return the figures for a workload, without unknown ones."""
        return {f"{prefix}{name}": value for name, value in attrs.asdict(self).items() if value is not None}


def drain(
    arena: Arena, contender: Contender, database: str, *, jobs: int, cap_s: float, health_of: str | None = None
) -> Drained:
    """Run a worker until `jobs` are recorded as complete, or `cap_s` seconds.

    Our worker, or the service at the address `health_of` if it is given, is asked for /health meanwhile.

    Raises `RuntimeError` if a job is complete before the worker starts, since that would be another load.
    """
    arguments = (f"--target={jobs}", f"--mark={jobs // MARKS}")
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(arena.connect(database))
        if arena.done(contender, connection):
            raise RuntimeError(f"{contender.name}: jobs were complete before the worker started")
        worker = stack.enter_context(arena.program(contender, database, "worker", *arguments))
        started, cpu_before_s = worker.wait("start")["t"], worker.cpu_s()
        ready = worker.wait("ready") if contender.peer == OURS else None
        probe = stack.enter_context(HealthProbe(health_of or ready["url"])) if ready is not None else None
        end = started + int(cap_s * 1e9)
        ran = worker.get("ran", (end - time.monotonic_ns()) / 1e9)
        while True:
            at, done = time.monotonic_ns(), arena.done(contender, connection)
            if done >= jobs or at >= end:
                break
            time.sleep(ASK_EVERY_S)
        cpu_s = worker.cpu_s() - cpu_before_s
        first, marks = worker.get("first", 0), worker.gathered("mark")
        seconds = (at - started) / 1e9
        tenth = jobs // MARKS
        return Drained(
            rate=done / seconds,
            done=done,
            seconds=seconds,
            cpu_us_per_job=cpu_s / max(done, 1) * 1e6,
            twice=ran["twice"] if ran else None,
            first_s=(first["t"] - (ready["t"] if ready else started)) / 1e9 if first else None,
            first_tenth=tenth / (marks[0]["t"] - first["t"]) * 1e9 if first and marks else None,
            last_tenth=tenth / (marks[-1]["t"] - marks[-2]["t"]) * 1e9 if len(marks) == MARKS else None,
            health_p99_ms=probe.p99_ms if probe else None,
        )

"""Effect of processes on a load with a CPU-bound transform: one load in threads and in processes, alternating.

Its source answers immediately, so that nothing else is waited for. On a machine with other work, wall-clock seconds are
not meaningful, so CPU seconds are printed beside them, and the resulting estimate for two cores: threads share one, so
the load takes at least its process's CPU time; in processes it takes half of all CPU time, the database's included, but
never less than the service's own process.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import attrs
import psycopg
import trio

from benchmarks.loads.heavy_load import RECORDS, Numbers, busy
from dataloader import Tasks
from dataloader.flows.etl import Load, Table, add_loads
from dataloader.store.embedded.postgres import EmbeddedPostgres
from dataloader.testing import run_task

TABLE = "DROP TABLE IF EXISTS reading; CREATE TABLE reading (id int PRIMARY KEY, name text, score float, digest text)"
SIZES = {"small pages": (3_000, 100), "pages": (600, 1_000), "large pages": (150, 5_000)}
"""Number of pages, and loops per record."""


@attrs.frozen
class Took:
    """Seconds of wall-clock time, and CPU seconds of the service's own process, its children, and the database."""

    wall: float
    own: float
    children: float
    database: float

    @property
    def on_two_cores(self) -> float:
        """Minimum number of seconds on two cores."""
        return max(self.own, (self.own + self.children + self.database) / 2)


def _cpu_s(who: int) -> float:
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime


def _database_cpu_s(server: EmbeddedPostgres) -> float:
    """Return the CPU seconds of the server, its backends, and ended backends."""
    ticks = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = folder.joinpath("stat").read_text().rpartition(")")[2].split()
            if int(folder.name) == server.pid:
                ticks += sum(map(int, fields[11:15]))
            elif int(fields[1]) == server.pid:
                ticks += sum(map(int, fields[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def once(server: EmbeddedPostgres, pages: int, loops: int, *, processes: bool) -> Took:
    load = Load(
        "readings",
        Numbers(pages),
        Table("reading", key="id"),
        transform=partial(busy, loops),
        pipeline={"rate_min": 0, "rate_max": 0},
        processes=processes,
    )
    tasks = Tasks()
    add_loads(tasks, load)
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        connection.execute(TABLE)
    before = [_cpu_s(resource.RUSAGE_SELF), _cpu_s(resource.RUSAGE_CHILDREN), _database_cpu_s(server)]
    began = time.perf_counter()
    outcome = trio.run(lambda: run_task(tasks, "readings", dsn=server.dsn))
    took = time.perf_counter() - began
    after = [_cpu_s(resource.RUSAGE_SELF), _cpu_s(resource.RUSAGE_CHILDREN), _database_cpu_s(server)]
    if outcome.status != "succeeded":
        raise SystemExit(f"the load ended as {outcome.status}: {outcome.error}")
    return Took(took, *(then - now for then, now in zip(after, before, strict=True)))


def measure(server: EmbeddedPostgres, _directory: Path, options: argparse.Namespace) -> None:
    """Print the speedup of the load in processes, by wall-clock and CPU time."""
    for name, (most, loops) in SIZES.items():
        pages = most // 10 if options.quick else most
        clock, cpu = [], []
        for run in range(1, options.runs + 1):
            threads = once(server, pages, loops, processes=False)
            processes = once(server, pages, loops, processes=True)
            clock.append(threads.wall / processes.wall)
            cpu.append(threads.own / processes.on_two_cores)
            told = [
                f"{kind} {took.wall:.2f} s (CPU: {took.own:.2f} s own, {took.children:.2f} s children,"
                f" {took.database:.2f} s database)"
                for kind, took in (("threads", threads), ("processes", processes))
            ]
            print(
                f"heavy, {name}, run {run}: {', '.join(told)}: {clock[-1]:.2f}; by the CPU {cpu[-1]:.2f};"
                f" load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
        print(
            f"heavy, {name}: {pages:,} of {RECORDS} records, {1_000 * threads.own / pages:.0f} ms each: in processes"
            f" {statistics.median(clock):.2f} times as fast; by the CPU, on two cores, {statistics.median(cpu):.2f}"
        )

"""Two figures of one process with its default settings, on its own embedded PostgreSQL with full durability.

    python benchmarks/core.py [--jobs 50000] [--concurrency 200] [--keyed] [--json]

Throughput: no-op jobs, enqueued before, drained through one queue, from the supervisor's start to the last outcome in
the database, including the connection; with `--keyed` each has its own lock_key, else none. Latency: from the call of
`trigger` to the first line of the handler, one job at a time on an idle queue. Figures of different machines are not
comparable; compare only figures of one run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import trio

from dataloader import Job, NewJob, Settings, Tasks, Worker, embedded_postgres, open_supervisor
from dataloader.store.connection.bridge import open_database
from dataloader.store.connection.options import DatabaseOptions
from dataloader.store.migrations import migrate
from dataloader.store.queue.enqueue import enqueue
from dataloader.store.queue.reads import list_queues

SAMPLES = 300
BATCH = 1_000


class Counter:
    """Sets an event when a handler has been called `expect` times."""

    def __init__(self) -> None:
        self.left = 0
        self.done = trio.Event()
        self.started_at = 0.0

    def expect(self, number: int) -> None:
        self.left = number
        self.done = trio.Event()

    def called(self) -> None:
        self.started_at = time.perf_counter()
        self.left -= 1
        if self.left == 0:
            self.done.set()


async def enqueue_rate(dsn: str, number: int, *, keyed: bool) -> float:
    jobs = [NewJob(queue="bench", task="noop", lock_key=f"key {n}" if keyed else None) for n in range(number)]
    async with open_database(DatabaseOptions(dsn=dsn)) as database:
        await migrate(database)
        began = time.perf_counter()
        for start in range(0, number, BATCH):
            await enqueue(database, jobs[start : start + BATCH])
        return number / (time.perf_counter() - began)


async def measure(dsn: str, number: int, concurrency: int, *, keyed: bool) -> dict[str, float]:
    tasks, counter = Tasks(), Counter()

    @tasks.task("noop")
    async def noop(_job: Job) -> None:
        counter.called()

    bulk = await enqueue_rate(dsn, number, keyed=keyed)
    settings = Settings(db_dsn=dsn, workers=(Worker("bench", concurrency),), port=0)
    counter.expect(number)
    began, cpu = time.perf_counter(), time.process_time()
    async with open_supervisor(settings, tasks, with_web=True) as supervisor:
        await counter.done.wait()
        # The last outcomes are written after the last handler returned, which only the table shows.
        while any(queue.running for queue in await list_queues(supervisor.database)):  # noqa: ASYNC110
            await trio.sleep(0.005)
        drained, cpu = time.perf_counter() - began, time.process_time() - cpu
        latencies = []
        for _ in range(SAMPLES):
            counter.expect(1)
            triggered = time.perf_counter()
            await supervisor.jobs.enqueue("noop", queue="bench")
            await counter.done.wait()
            latencies.append((counter.started_at - triggered) * 1000)
            await trio.sleep(0.01)
    cuts = statistics.quantiles(latencies, n=100)
    return {
        "jobs": number,
        "enqueued_in_bulk_per_s": round(bulk),
        "drained_per_s": round(number / drained),
        "cpu_us_per_job": round(cpu / number * 1e6, 1),
        "trigger_to_start_p50_ms": round(statistics.median(latencies), 2),
        "trigger_to_start_p99_ms": round(cuts[98], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=50_000)
    parser.add_argument("--concurrency", type=int, default=200)
    parser.add_argument("--keyed", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dataloader-bench-") as directory, embedded_postgres(Path(directory)) as pg:
        figures = trio.run(partial(measure, pg.dsn, options.jobs, options.concurrency, keyed=options.keyed))
    if options.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:26} {value:>12,}")


if __name__ == "__main__":
    main()

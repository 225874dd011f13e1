"""Cost of a no-op job beside a Dask worker, compared with plain `client.submit`, a child and a thread.

`python -m benchmarks.dask [ROUNDS]`: alternating, one after the other, with a cluster of two processes on this machine.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import trio
from distributed import Client, LocalCluster

from benchmarks.dask.noops import tasks
from dataloader import Settings, Worker, open_supervisor
from dataloader.store.embedded.postgres import embedded_postgres


def nothing(number: int) -> int:
    """Return the number; this is the function for plain Dask."""
    return number


def main() -> None:
    """Print a table of medians."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster,
        Client(cluster, set_as_default=False) as client,
        tempfile.TemporaryDirectory() as folder,
        embedded_postgres(Path(folder)) as server,
    ):
        took = trio.run(_measure, server.dsn, cluster.scheduler_address, client, rounds)
    print("| one after the other | median, ms | 99th percentile, ms |\n| --- | --- | --- |")
    for name, each in took.items():
        cut = sorted(each)
        print(f"| {name} | {statistics.median(cut) * 1e3:.1f} | {cut[int(len(cut) * 0.99) - 1] * 1e3:.1f} |")


async def _measure(dsn: str, scheduler: str, client: Client, rounds: int) -> dict[str, list[float]]:
    took: dict[str, list[float]] = {"`client.submit`": [], "thread": [], "process": [], "dask": []}
    settings = Settings(db_dsn=dsn, workers=(Worker("q", 2),), dask=scheduler, log_level="warning")
    async with open_supervisor(settings, tasks) as supervisor:
        for number in range(rounds + 5):
            for name, each in took.items():
                began = time.perf_counter()
                if name in tasks:
                    job = await supervisor.jobs.enqueue(name, queue="q")
                    ended = await supervisor.jobs.wait(job.job_id)
                    if ended.status != "succeeded":
                        raise SystemExit(f"{name}: {ended.status}: {ended.error}")
                else:
                    future = client.submit(nothing, number, pure=False)
                    await trio.to_thread.run_sync(future.result)
                if number >= 5:  # the first ones start children
                    each.append(time.perf_counter() - began)
    return took


if __name__ == "__main__":
    main()

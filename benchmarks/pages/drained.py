"""Process that serves a queue and its pages, beside a process of clients with open pages; prints JSON."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from functools import partial

import trio

from benchmarks.scheduling.measured_tasks import QUEUE, tasks_that
from dataloader import Settings, Worker, open_supervisor
from dataloader.store.queue.reads import list_queues


async def main(dsn: str, number: int, pages: int, paths: list[str]) -> None:
    began, left, done = 0.0, number, trio.Event()

    def called() -> None:
        nonlocal began, left
        began = began or time.perf_counter()
        left -= 1
        if left == 0:
            done.set()

    settings = Settings(db_dsn=dsn, workers=(Worker(QUEUE, 200),), port=0)
    tasks = tasks_that(called)
    async with open_supervisor(settings, tasks, with_web=True) as supervisor:
        clients = None
        if pages:
            arguments = [sys.executable, "-m", "benchmarks.pages.clients", str(supervisor.url), str(pages), *paths]
            clients = await trio.lowlevel.open_process(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        await done.wait()
        while any(queue.running for queue in await list_queues(supervisor.database)):  # noqa: ASYNC110
            await trio.sleep(0.005)
        took_s = time.perf_counter() - began
        found = {"clients_cpu_s": 0.0, "came_again_s": 0.0}
        if clients is not None:
            assert clients.stdin
            assert clients.stdout
            await clients.stdin.aclose()
            said = b"".join([part async for part in clients.stdout])
            await clients.wait()
            found = json.loads(said)
    print(json.dumps({"per_s": number / took_s, "took_s": took_s, **found}))


if __name__ == "__main__":
    given = sys.argv[1:]
    trio.run(partial(main, given[0], int(given[1]), int(given[2]), given[5:]))

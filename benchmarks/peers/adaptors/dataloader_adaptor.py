"""dataloader, with its default settings but for the queue's concurrency: its worker is what `dataloader serve` runs.

The other commands are what any embedder could call: `open_supervisor`, `Tasks`, `Settings`, `NewJob`.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta

import trio

from benchmarks.peers.adaptors.script import DSN, QUEUE, Body, arguments, chunks, emit, now
from dataloader import Job, NewJob, Settings, Supervisor, Tasks, Worker, configure_logging, open_supervisor
from dataloader.supervisor.serve import serve

options = arguments()
ORDINARY, URGENT = 100, 10


def job(number: int) -> NewJob:
    due = datetime.now(UTC) + timedelta(seconds=options.delay) if options.delay else None
    return NewJob(
        queue=QUEUE,
        task=QUEUE,
        args={"n": number},
        lock_key=options.key or f"job-{number}",
        available_at=due,
        priority=URGENT if options.urgent else ORDINARY,
    )


async def work() -> None:
    tasks, body = Tasks(), Body(options)

    @tasks.task(QUEUE)
    async def bench(job: Job) -> None:
        number = job.args["n"]
        body.begin(number)
        if body.sleep_s:
            await trio.sleep(body.sleep_s)
        body.end(number)

    workers = () if options.no_queues else (Worker(QUEUE, options.concurrency),)

    async def tell(supervisor: Supervisor) -> None:
        emit(ev="ready", t=now(), url=supervisor.url)

    emit(ev="start", t=now())
    await serve(Settings(db_dsn=DSN, workers=workers, port=0), tasks, tell)


async def enqueue(supervisor: Supervisor) -> None:
    match options.command:
        case "load":
            for numbers in chunks(options.first, options.count):
                await supervisor.jobs.enqueue_many([job(number) for number in numbers])
        case "enqueue-one":
            await supervisor.jobs.enqueue_many([job(-1)])
            began = now()
            for number in range(options.count):
                await supervisor.jobs.enqueue_many([job(number)])
            emit(ev="enqueued", seconds=(now() - began) / 1e9)
        case "enqueue-bulk":
            await supervisor.jobs.enqueue_many([job(-1)])
            began = now()
            for numbers in chunks(0, options.count):
                await supervisor.jobs.enqueue_many([job(number) for number in numbers])
            emit(ev="enqueued", seconds=(now() - began) / 1e9)
        case "feed":
            emit(ev="ready")
            while line := await trio.to_thread.run_sync(sys.stdin.readline):
                began = now()
                await supervisor.jobs.enqueue_many([job(int(line))])
                emit(ev="q", n=int(line), t=began)


async def main() -> None:
    if options.command == "worker":
        await work()
    else:
        async with open_supervisor(Settings(db_dsn=DSN), Tasks()) as supervisor:
            await enqueue(supervisor)


if __name__ == "__main__":
    configure_logging()  # as `serve` does: stdout has the events
    trio.run(main)

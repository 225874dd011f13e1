"""dataloader, with its default settings except the queue's concurrency: its worker runs as `dataloader serve` does.

tuned: a concurrency of 1,000. keyed: the default, each job with a key. http: the default, jobs triggered over HTTP.

`feed` is another program: it calls `dl_enqueue` over asyncpg, or the worker's HTTP API. The other commands use public
functions: `open_supervisor`, `Tasks`, `Settings`, `NewJob`.
"""

from __future__ import annotations

import asyncio
import http.client
import json
from datetime import UTC, datetime, timedelta
from urllib.parse import urlsplit

import asyncpg
import trio

from benchmarks.peers.adaptors.asyncio_script import feed
from benchmarks.peers.adaptors.script import DSN, QUEUE, Body, arguments, chunks, emit, now
from dataloader import Job, NewJob, Settings, Supervisor, Tasks, Worker, configure_logging, open_supervisor
from dataloader.supervisor.serve import serve

options = arguments()
ORDINARY, URGENT = 100, 10
TUNED = 1_000


def job(number: int) -> NewJob:
    due = datetime.now(UTC) + timedelta(seconds=options.delay) if options.delay else None
    return NewJob(
        queue=QUEUE,
        task=QUEUE,
        args={"n": number},
        lock_key=options.key.format(n=number) or None,
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

    concurrency = TUNED if options.mode == "tuned" else options.concurrency
    workers = () if options.no_queues else (Worker(QUEUE, concurrency),)

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


async def feed_by_sql() -> None:
    connection = await asyncpg.connect(DSN)

    async def add(numbers: range) -> None:
        args = [json.dumps({"n": number}) for number in numbers]
        if len(args) == 1:
            await connection.fetchval("SELECT dl_enqueue($1, $2, queue => $1)", QUEUE, args[0])
        else:
            await connection.fetch("SELECT dl_enqueue($1, a, queue => $1) FROM unnest($2::jsonb[]) AS a", QUEUE, args)

    await feed(add)


async def feed_by_http() -> None:
    connection = http.client.HTTPConnection(urlsplit(options.url).netloc, timeout=30)

    async def add(numbers: range) -> None:  # nothing else runs meanwhile
        [number] = numbers
        body = json.dumps({"queue": QUEUE, "task": QUEUE, "lock_key": None, "args": {"n": number}})
        connection.request("POST", "/api/v1/jobs/trigger", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status >= http.client.BAD_REQUEST:
            raise RuntimeError(f"answered {answer.status}: {answer.read()!r}")
        answer.read()

    await feed(add)


async def main() -> None:
    if options.command == "worker":
        await work()
    else:
        async with open_supervisor(Settings(db_dsn=DSN), Tasks()) as supervisor:
            await enqueue(supervisor)


if __name__ == "__main__":
    configure_logging()  # as `serve` does: stdout has the events
    if options.command == "feed":
        asyncio.run(feed_by_http() if options.mode == "http" else feed_by_sql())
    else:
        trio.run(main)

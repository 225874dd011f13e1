"""PgQueuer with asyncpg on uvloop, as its own command line runs if uvloop is installed.

default: batches of 10, no limit of running jobs, one connection. tuned: batches of 1,000, a pool.
"""

from __future__ import annotations

import json
from datetime import timedelta

import asyncpg
import attrs
import uvloop
from pgqueuer import PgQueuer, Queries
from pgqueuer.db import AsyncpgDriver, AsyncpgPoolDriver
from pgqueuer.models import Job

from benchmarks.peers.adaptors.asyncio_script import command, run
from benchmarks.peers.adaptors.script import DSN, QUEUE, Body, arguments, emit, now

options = arguments()


def payload(number: int) -> bytes:
    return json.dumps({"n": number}).encode()


@attrs.frozen
class Tool:
    queries: Queries

    async def setup(self) -> None:
        await self.queries.install()

    async def one(self, number: int) -> object:
        return await self.queries.enqueue(QUEUE, payload(number))

    async def many(self, numbers: range) -> object:
        due = timedelta(seconds=options.delay) if options.delay else None
        size = len(numbers)
        return await self.queries.enqueue(
            ["hot" if options.key else QUEUE] * size,
            [payload(number) for number in numbers],
            [10 if options.urgent else 0] * size,
            [due] * size,
        )


async def work() -> None:
    body = Body(options)
    emit(ev="start", t=now())
    if options.mode == "tuned":
        pool = await asyncpg.create_pool(DSN, min_size=4, max_size=10)
        queuer = PgQueuer(AsyncpgPoolDriver(pool))
    else:
        queuer = PgQueuer(AsyncpgDriver(await asyncpg.connect(DSN)))

    @queuer.entrypoint(QUEUE)
    async def bench(job: Job) -> None:
        await run(body, json.loads(job.payload or b"")["n"])

    if options.target_from:
        # The nearest equivalent of a key: at most one job of an entrypoint at a time.
        @queuer.entrypoint("hot", concurrency_limit=1)
        async def hot(job: Job) -> None:
            await run(body, json.loads(job.payload or b"")["n"])

    await (queuer.run(batch_size=1000) if options.mode == "tuned" else queuer.run())


async def main() -> None:
    if options.command == "worker":
        await work()
        return
    connection = await asyncpg.connect(DSN)
    await command(Tool(Queries(AsyncpgDriver(connection))), options)
    await connection.close()


if __name__ == "__main__":
    uvloop.run(main())

"""chancy with its AsyncExecutor. tuned: eager polling."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import attrs
from chancy import Chancy, Queue, Worker, job

from benchmarks.peers.adaptors.asyncio_script import command, run
from benchmarks.peers.adaptors.script import DSN, QUEUE, Body, arguments, emit, now

options = arguments()
body = Body(options)
log = logging.getLogger("quiet")
log.setLevel(logging.WARNING)


@job(queue=QUEUE)
async def bench(*, n: int) -> None:
    await run(body, n)


@attrs.frozen
class Tool:
    app: Chancy

    async def setup(self) -> None:
        await self.app.migrate()

    async def one(self, number: int) -> object:
        return await self.app.push(next(_jobs(range(number, number + 1))))

    async def many(self, numbers: range) -> object:
        return [reference async for reference in self.app.push_many(list(_jobs(numbers)))]


def _jobs(numbers: range) -> Iterator[Any]:
    # The worker imports the function by this name.
    new = dataclasses.replace(bench.job, func="benchmarks.peers.adaptors.chancy_adaptor.bench")
    if options.urgent:
        new = new.with_priority(10)
    if options.delay:
        new = new.with_scheduled_at(datetime.now(UTC) + timedelta(seconds=options.delay))
    for number in numbers:
        yield new.with_kwargs(n=number)


async def main() -> None:
    if options.command == "worker":
        emit(ev="start", t=now())
    pool = {} if options.command == "worker" else {"max_connection_pool_size": 1}
    async with Chancy(DSN, log=log, **pool) as app:
        if options.command != "worker":
            await command(Tool(app), options)
            return
        eager = {"eager_polling": True} if options.mode == "tuned" else {}
        queue = Queue(QUEUE, concurrency=options.concurrency, executor=Chancy.Executor.Async, **eager)
        await app.declare(queue, upsert=True)
        async with Worker(app) as worker:
            await worker.wait_for_shutdown()


if __name__ == "__main__":
    from benchmarks.peers.adaptors import chancy_adaptor  # the module from which the worker imports the function

    asyncio.run(chancy_adaptor.main())

"""procrastinate with psycopg. Its concurrency of 1 is raised to ours; everything else is its default."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import procrastinate

from benchmarks.peers.adaptors.asyncio_script import command, run
from benchmarks.peers.adaptors.script import DSN, QUEUE, Body, arguments, emit, now

options = arguments()
body = Body(options)
# A worker keeps the pool's own size (4): larger and smaller ones had the same results.
pool: dict[str, Any] = {} if options.command == "worker" else {"min_size": 1, "max_size": 1}
app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=DSN, **pool))


@app.task(name=QUEUE, queue=QUEUE)
async def bench(n: int) -> None:
    await run(body, n)


class Tool:
    async def setup(self) -> None:
        await app.schema_manager.apply_schema_async()

    async def one(self, number: int) -> object:
        return await bench.defer_async(n=number)

    async def many(self, numbers: range) -> object:
        due = datetime.now(UTC) + timedelta(seconds=options.delay)
        deferrer = bench.configure(
            lock=options.key or None,
            priority=10 if options.urgent else 0,
            schedule_at=due if options.delay else None,
        )
        arguments_of_all: list[dict[str, Any]] = [{"n": number} for number in numbers]
        return await deferrer.batch_defer_async(*arguments_of_all)


async def main() -> None:
    if options.command == "worker":
        emit(ev="start", t=now())
    async with app.open_async():
        if options.command == "worker":
            await app.run_worker_async(concurrency=options.concurrency)
        else:
            await command(Tool(), options)


if __name__ == "__main__":
    asyncio.run(main())

"""awa, a queue in Rust, by its Python package: handlers run on asyncio's loop, everything else in its own threads.

default: as many workers as the others have. tuned: 1,024, the number with the highest rate in its documentation. The
first worker chooses where jobs are kept, so one is started when the database is created.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import attrs
import awa

from benchmarks.peers.adaptors.asyncio_script import command, run
from benchmarks.peers.adaptors.script import DSN, QUEUE, Body, arguments, emit, now

options = arguments()
HOT = "hot"
TUNED = 1_024
URGENT, ORDINARY = 1, 2


@dataclass(frozen=True)  # it accepts no attrs classes
class Bench:
    n: int


@attrs.frozen
class Tool:
    client: awa.AsyncClient

    async def setup(self) -> None:
        await self.client.migrate()
        await _start(self.client, Body(options))
        await self.client.shutdown()

    async def one(self, number: int) -> object:
        return await self.client.insert(Bench(number), queue=QUEUE)

    async def many(self, numbers: range) -> object:
        due: dict[str, Any] = {"run_at": datetime.now(UTC) + timedelta(seconds=options.delay)} if options.delay else {}
        return await self.client.enqueue_many_copy(
            [Bench(number) for number in numbers],
            queue=HOT if options.key else QUEUE,
            priority=URGENT if options.urgent else ORDINARY,
            **due,
        )


async def _start(client: awa.AsyncClient, body: Body) -> None:
    @client.task(Bench, queue=QUEUE)
    async def bench(job: Any) -> None:
        await run(body, job.args.n)

    # The nearest equivalent of a key: a queue that runs one job at a time.
    hot = [(HOT, 1)] if options.target_from else []
    await client.start([(QUEUE, TUNED if options.mode == "tuned" else options.concurrency), *hot])


async def main() -> None:
    if options.command == "worker":
        emit(ev="start", t=now())
    # It requires a host beside the socket's directory.
    async with awa.AsyncClient(DSN.replace("@/", "@localhost/")) as client:
        if options.command == "worker":
            await _start(client, Body(options))
            await asyncio.Event().wait()
        else:
            await command(Tool(client), options)


if __name__ == "__main__":
    asyncio.run(main())

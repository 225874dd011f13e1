"""Commands of an adaptor whose tool runs on asyncio: the adaptor has the tool's own calls, this module the rest."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Protocol

from benchmarks.peers.adaptors.script import Body, chunks, emit, now


class Tool(Protocol):
    """Interface of a tool's adaptor. `numbers` are the jobs' numbers."""

    async def setup(self) -> None: ...

    async def one(self, number: int) -> object: ...

    async def many(self, numbers: range) -> object: ...


async def command(tool: Tool, options: argparse.Namespace) -> None:
    """Run a command other than `worker`."""
    match options.command:
        case "setup":
            await tool.setup()
        case "load":
            for numbers in chunks(options.first, options.count):
                await tool.many(numbers)
        case "enqueue-one":
            await tool.one(-1)
            began = now()
            for number in range(options.count):
                await tool.one(number)
            emit(ev="enqueued", seconds=(now() - began) / 1e9)
        case "enqueue-bulk":
            await tool.one(-1)
            began = now()
            for numbers in chunks(0, options.count):
                await tool.many(numbers)
            emit(ev="enqueued", seconds=(now() - began) / 1e9)
        case "feed":
            await feed(lambda numbers: tool.one(numbers[0]) if len(numbers) == 1 else tool.many(numbers))


async def feed(add: Callable[[range], Awaitable[object]]) -> None:
    """Enqueue jobs, in one call for each line of stdin, which has the first number and the count."""
    loop = asyncio.get_running_loop()
    emit(ev="ready")
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        first, count = map(int, line.split())
        numbers = range(first, first + count)
        began = now()
        await add(numbers)
        for number in numbers:
            emit(ev="q", n=number, t=began)


async def run(body: Body, number: int) -> None:
    """Run the body of one job."""
    body.begin(number)
    if body.sleep_s:
        await asyncio.sleep(body.sleep_s)
    body.end(number)

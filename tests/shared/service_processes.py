"""Processes of the services under test: counters whose changes are steps that may be killed midway."""

from __future__ import annotations

import random

import attrs
import broken
import trio

from dataloader import Tasks
from dataloader.flows.processes import Done, Process, Processes, add_processes

broken.take_out_what_is_named()
processes = Processes()


@attrs.frozen
class Swap:
    """Replace `old` by `new`."""

    old: int
    new: int


for name, on_crash in (("again", "again"), ("fragile", "error")):
    counter = processes.define(name, state=int, on_crash=on_crash)

    @counter.init
    async def begin(_p: Process[int]) -> Done:
        return Done(state=0)

    @counter.call
    async def add(p: Process[int], by: int) -> Done:
        await trio.sleep(random.random() * 0.03)
        return Done(p.state + by, state=p.state + by, events=[by])

    @counter.call
    async def add_and_tell(p: Process[int], by: int) -> Done:
        p.call(p.type, f"mirror of {p.process_id}", "add", by, start=None)
        return Done(p.state + by, state=p.state + by, events=[by])

    @counter.call
    async def read(p: Process[int]) -> Done:
        return Done(p.state)

    @counter.call
    async def swap(p: Process[int], args: Swap) -> Done:
        await trio.sleep(random.random() * 0.03)
        if p.state != args.old:
            return Done(response=False)
        return Done(response=True, state=args.new, events=[args.new - args.old])


tasks = Tasks()
add_processes(tasks, processes)

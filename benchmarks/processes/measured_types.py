"""Measured processes: each step only counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from dataloader import Job, Tasks
from dataloader.flows.processes import SUSPEND, Done, Process, Processes, Timer, add_processes

TYPE: Final = "counter"
STEPS_QUEUE: Final = f"process.{TYPE}"
JOBS_QUEUE: Final = "bench"
EVENT: Final = "x" * 62
"""64 bytes as JSON."""
FAR_S: Final = 86_400.0


def tasks_that(called: Callable[[], bool]) -> Tasks:
    """Return a plain task and a type of processes.

    Each run and step calls `called`, which says if a chain continues.
    """
    tasks, processes = Tasks(), Processes()
    counter = processes.define(TYPE)

    @counter.init
    async def begin(_p: Process[int]) -> Done:
        return Done(state=0)

    @counter.call
    async def add(p: Process[int], more: int) -> Done:
        called()
        return Done(p.state + more, state=p.state + more)

    @counter.call
    async def arm(p: Process[int], more: int) -> Done:
        called()
        return Done(p.state + more, state=p.state + more, next=Timer(after_s=FAR_S))

    @counter.timeout
    async def tick(p: Process[int]) -> Done:
        goes_on = called()
        if p.context == "once":
            return Done(events=[EVENT])
        if p.context == "reads":
            await p.events(newest_first=True, limit=10)
        return Done(events=[EVENT], next=Timer(after_s=0, context=p.context) if goes_on else SUSPEND)

    @tasks.task("noop", queue=JOBS_QUEUE)
    async def noop(_job: Job) -> int:
        called()
        return 1

    add_processes(tasks, processes)
    return tasks


tasks = tasks_that(lambda: False)

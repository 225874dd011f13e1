"""From a call to its answer, in the process that runs the steps: one at a time, and beside 64 other callers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final

import trio

from benchmarks.processes.drains import settings
from benchmarks.processes.measured_types import JOBS_QUEUE, TYPE, tasks_that
from dataloader import Supervisor, open_supervisor

WARM_UP: Final = 20
CALLERS: Final = 64
PAUSE_S: Final = 0.01
Milliseconds = list[float]


def p99(took: Sequence[float]) -> float:
    """Return the 99th percentile."""
    return statistics.quantiles(took, n=100)[98]


def beside_jobs(dsn: str, process_id: str, number: int) -> tuple[Milliseconds, Milliseconds]:
    """Measure calls of one process, and jobs that are triggered and waited for, alternating; nothing else runs."""
    return trio.run(partial(_beside_jobs, dsn, process_id, number))


def alone(dsn: str, process_id: str, number: int) -> Milliseconds:
    """Measure calls of one process; nothing else runs."""
    return trio.run(partial(_alone, dsn, process_id, number))


def beside_callers(dsn: str, process_id: str, others: Sequence[str], number: int) -> tuple[Milliseconds, float]:
    """Measure calls of one process while 64 callers call the others without pause, and the others' calls per second."""
    return trio.run(partial(_beside_callers, dsn, process_id, others, number))


async def _beside_jobs(dsn: str, process_id: str, number: int) -> tuple[Milliseconds, Milliseconds]:
    async with open_supervisor(settings(dsn), tasks_that(lambda: False), with_web=False) as supervisor:
        call, trigger = _calling(supervisor, process_id), partial(_triggered, supervisor)
        await _timed((call, trigger), WARM_UP)
        calls, triggers = await _timed((call, trigger), number)
        return calls, triggers


async def _alone(dsn: str, process_id: str, number: int) -> Milliseconds:
    async with open_supervisor(settings(dsn), tasks_that(lambda: False), with_web=False) as supervisor:
        call = _calling(supervisor, process_id)
        await _timed([call], WARM_UP)
        [calls] = await _timed([call], number)
        return calls


async def _beside_callers(dsn: str, process_id: str, others: Sequence[str], number: int) -> tuple[Milliseconds, float]:
    answered = 0

    async def call_for_ever(other: str) -> None:
        nonlocal answered
        call = _calling(supervisor, other)
        while True:
            await call()
            answered += 1

    async with open_supervisor(settings(dsn), tasks_that(lambda: False), with_web=False) as supervisor:
        call = _calling(supervisor, process_id)
        async with trio.open_nursery() as nursery:
            for one in range(CALLERS):
                nursery.start_soon(call_for_ever, others[one % len(others)])
            await _timed([call], WARM_UP)
            before, began = answered, time.perf_counter()
            [calls] = await _timed([call], number)
            per_s = (answered - before) / (time.perf_counter() - began)
            nursery.cancel_scope.cancel()
    return calls, per_s


def _calling(supervisor: Supervisor, process_id: str) -> Callable[[], Awaitable[object]]:
    return partial(supervisor.processes.call, TYPE, process_id, "add", 1)


async def _triggered(supervisor: Supervisor) -> None:
    added = await supervisor.jobs.enqueue("noop", queue=JOBS_QUEUE)
    await supervisor.jobs.wait(added.job_id)


async def _timed(some: Sequence[Callable[[], Awaitable[object]]], number: int) -> list[Milliseconds]:
    took: list[Milliseconds] = [[] for _ in some]
    for _ in range(number):
        for one, of_one in zip(some, took, strict=True):
            began = time.perf_counter()
            await one()
            of_one.append((time.perf_counter() - began) * 1000)
            await trio.sleep(PAUSE_S)
    return took

"""Drains in this process: ready jobs or steps are run, from the first start to the last record."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import attrs
import trio

from benchmarks.processes.measured_types import JOBS_QUEUE, STEPS_QUEUE, tasks_that
from benchmarks.scheduling.reached import Reached
from benchmarks.server_cpu import cpu_s
from dataloader import Settings, Supervisor, Worker, open_supervisor

SLOTS: Final = 200
TIMEOUT_S: Final = 180


@attrs.frozen
class Rate:
    """Jobs or steps per second, and CPU of this process and of the server for each, in microseconds."""

    per_s: float
    cpu_us: float
    server_us: float

    @property
    def total_us(self) -> float:
        return self.cpu_us + self.server_us

    def __str__(self) -> str:
        return f"{self.per_s:,.0f}/s, CPU {self.cpu_us:.0f} + {self.server_us:.0f} µs"


@attrs.define
class _Drain:
    left: int
    server_pid: int
    began: float = 0.0
    cpu_began: float = 0.0
    server_began: float = 0.0
    done: trio.Event = attrs.field(factory=trio.Event)

    def called(self) -> bool:
        if not self.began:
            self.server_began = cpu_s(self.server_pid)
            self.began, self.cpu_began = time.perf_counter(), time.process_time()
        self.left -= 1
        if self.left <= 0:
            self.done.set()
        return self.left > 0

    async def ended(self, supervisor: Supervisor, number: int) -> Rate:
        with trio.fail_after(TIMEOUT_S):
            await self.done.wait()
            # The last outcomes are written after the last handler returned, which only the table shows.
            while await supervisor.database.run(_aio_is_running):  # noqa: ASYNC110
                await trio.sleep(0.005)
        took = time.perf_counter() - self.began
        number -= min(self.left, 0)
        return Rate(
            number / took,
            (time.process_time() - self.cpu_began) / number * 1e6,
            (cpu_s(self.server_pid) - self.server_began) / number * 1e6,
        )


def drained(pid: int, dsn: str, number: int) -> Rate:
    """Run the ready jobs or steps, `number` in all, on the server whose main process has the ID `pid`."""
    return trio.run(partial(_drained, pid, dsn, number))


async def _drained(pid: int, dsn: str, number: int) -> Rate:
    drain = _Drain(number, pid)
    async with open_supervisor(settings(dsn), tasks_that(drain.called), with_web=False) as supervisor:
        return await drain.ended(supervisor, number)


def settings(dsn: str) -> Settings:
    """Return default settings, with as many slots for steps as for jobs."""
    return Settings(db_dsn=dsn, workers=(Worker(JOBS_QUEUE, SLOTS), Worker(STEPS_QUEUE, SLOTS)), port=0)


def in_turns(measurements: dict[str, Callable[[], Rate]], rounds: int) -> dict[str, list[Rate]]:
    """Run each measurement in each round, in an order that is reversed in every other round."""
    found: dict[str, list[Rate]] = {name: [] for name in measurements}
    for number in range(rounds):
        for name in list(measurements) if number % 2 == 0 else reversed(measurements):
            found[name].append(measurements[name]())
    return found


def ratio(text: str, some: Sequence[Rate], others: Sequence[Rate], least: float) -> Reached:
    """Return the median of the rates' ratios, pair by pair; the note has the inverse ratio of CPU time, too."""
    rates = statistics.median(one.per_s / other.per_s for one, other in zip(some, others, strict=True))
    cpu = statistics.median(other.total_us / one.total_us for one, other in zip(some, others, strict=True))
    note = f"{middle(some)}; {middle(others)}; by CPU {cpu:.2f}"
    return Reached(text, rates, least=least, note=note)


def middle(some: Sequence[Rate]) -> Rate:
    """Return the median of each figure."""
    return Rate(*(statistics.median(values) for values in zip(*map(attrs.astuple, some), strict=True)))


async def _aio_is_running(connection: Any) -> bool:
    return bool(await connection.fetchval("SELECT EXISTS (SELECT FROM dl_jobs WHERE status = 'running')"))

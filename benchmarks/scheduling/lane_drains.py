"""Drains: of jobs without limits, alone and beside a closed limit queue, of jobs with one, and of one that opens."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import attrs
import psycopg
import trio

from benchmarks.peers.progress import say
from benchmarks.scheduling.databases import enqueued
from benchmarks.scheduling.measured_tasks import QUEUE, tasks_that
from benchmarks.scheduling.reached import Reached
from benchmarks.server_cpu import cpu_s
from dataloader import NewJob, Settings, Supervisor, Worker, open_supervisor
from dataloader.store.limits.limit_rows import TELL, aio_limit_task

CONCURRENCY: Final = 200


@attrs.define
class Drain:
    """Jobs that are counted as they start. From the first start to the last record: `per_s`, and CPU per job.

    `cpu_us` is the process's own, `server_us` that of the server whose main process has the ID `server_pid`.
    """

    left: int
    server_pid: int
    began: float = 0.0
    cpu_began: float = 0.0
    server_began: float = 0.0
    per_s: float = 0.0
    cpu_us: float = 0.0
    server_us: float = 0.0
    done: trio.Event = attrs.field(factory=trio.Event)

    def called(self) -> None:
        if not self.began:
            self.server_began = cpu_s(self.server_pid)
            self.began, self.cpu_began = time.perf_counter(), time.process_time()
        self.left -= 1
        if self.left == 0:
            self.done.set()

    async def ended(self, supervisor: Supervisor, number: int) -> None:
        """Wait until the last of `number` is recorded."""
        await self.done.wait()
        # The last outcomes are written after the last handler returned, which only the table shows. To count the jobs
        # that wait in a closed limit queue would take longer than the measured work.
        while await supervisor.database.run(_aio_is_running):  # noqa: ASYNC110
            await trio.sleep(0.005)
        self.per_s = number / (time.perf_counter() - self.began)
        self.cpu_us = (time.process_time() - self.cpu_began) / number * 1e6
        self.server_us = (cpu_s(self.server_pid) - self.server_began) / number * 1e6


def measure(pid: int, alone: str, limits: str, beside: str, closed: int, *, quick: bool) -> list[Reached]:
    """Measure drains without limits, beside them and within one, alternating; then the opening of the limit queue."""
    number, pairs = (5_000, 2) if quick else (20_000, 7)
    drains: dict[str, list[Drain]] = {"alone": [], "beside": [], "limited": []}
    for pair in range(pairs):
        say(f"drains, {pair + 1} of {pairs}")
        turns = [("alone", alone, "free"), ("beside", beside, "free"), ("limited", limits, "limited")]
        for name, dsn, task in turns if pair % 2 else reversed(turns):
            drains[name].append(_drained(pid, dsn, task, number, with_limits=name != "alone"))
    say("the lane opens")
    opened, first_start_s, written = trio.run(partial(_opened, pid, beside, closed))
    limited_s = statistics.median(one.per_s for one in drains["limited"])
    limited_us = statistics.median(one.server_us for one in drains["limited"])
    return [
        _ratio(
            "unlimited drain beside 1,000 schedules and a closed lane, by alone",
            drains["beside"],
            drains["alone"],
            0.95,
        ),
        _ratio("limited drain, by unlimited", drains["limited"], drains["alone"], 0.7),
        Reached(f"opening of a lane with {closed:,}: rows of jobs written by it", written, most=0),
        Reached("from the opening to the first start, s", first_start_s, most=0.5),
        Reached(
            "drain of the lane that was opened, by a limited one",
            opened.per_s / limited_s,
            least=0.9,
            note=f"{opened.per_s:,.0f} jobs/s; the server's CPU a job: {opened.server_us / limited_us:.2f}",
        ),
    ]


def _ratio(text: str, some: Sequence[Drain], others: Sequence[Drain], least: float) -> Reached:
    rates = statistics.median(one.per_s / other.per_s for one, other in zip(some, others, strict=True))
    cpu = statistics.median(one.cpu_us / other.cpu_us for one, other in zip(some, others, strict=True))
    server = statistics.median(one.server_us / other.server_us for one, other in zip(some, others, strict=True))
    per_s = [statistics.median(one.per_s for one in drains) for drains in (some, others)]
    rates_s = f"{per_s[0]:,.0f} and {per_s[1]:,.0f} jobs/s"
    note = f"{rates_s}; CPU a job of the process {cpu:.2f}, of the server {server:.2f}"
    return Reached(text, rates, least=least, note=note)


def _drained(pid: int, dsn: str, task: str, number: int, *, with_limits: bool) -> Drain:
    enqueued(dsn, [NewJob(task=task) for _ in range(number)])
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("VACUUM ANALYZE")
        connection.execute("CHECKPOINT")
    return trio.run(partial(_drain, pid, dsn, number, with_limits=with_limits))


async def _drain(pid: int, dsn: str, number: int, *, with_limits: bool) -> Drain:
    drain = Drain(number, pid)
    async with open_supervisor(
        _settings(dsn), tasks_that(drain.called, with_limits=with_limits), with_web=False
    ) as supervisor:
        await drain.ended(supervisor, number)
    return drain


async def _opened(pid: int, dsn: str, number: int) -> tuple[Drain, float, int]:
    drain = Drain(number, pid)
    async with open_supervisor(_settings(dsn), tasks_that(drain.called), with_web=False) as supervisor:
        await trio.sleep(2)
        assert not drain.began, "the lane was open before"
        opened_at, written = time.perf_counter(), await supervisor.database.write(_aio_open)
        await drain.ended(supervisor, number)
    return drain, drain.began - opened_at, written


async def _aio_is_running(connection: Any) -> bool:
    return bool(await connection.fetchval("SELECT EXISTS (SELECT FROM dl_jobs WHERE status = 'running')"))


async def _aio_open(connection: Any) -> int:
    """Remove the limits of the limit queue; return the number of job rows that this wrote."""
    async with connection.transaction():
        declared = await connection.fetchval("SELECT task FROM dl_tasks WHERE task = 'closed' FOR NO KEY UPDATE")
        await aio_limit_task(connection, declared, {}, {}, limited=True)
        await connection.execute(TELL)
        return int(
            await connection.fetchval(
                "SELECT n_tup_ins + n_tup_upd + n_tup_del FROM pg_stat_xact_user_tables WHERE relname = 'dl_jobs'"
            )
        )


def _settings(dsn: str) -> Settings:
    return Settings(db_dsn=dsn, workers=(Worker(QUEUE, CONCURRENCY),), port=0)

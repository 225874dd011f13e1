"""A thousand schedules over two processes that are killed; half of them were paused for an hour."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from itertools import cycle
from pathlib import Path
from typing import Any, Final

import psycopg
import trio

from benchmarks.peers.progress import say
from benchmarks.scheduling.databases import migrated
from benchmarks.scheduling.killed_fleet import KilledFleet
from benchmarks.scheduling.planned_tasks import QUEUE
from benchmarks.scheduling.planned_times import read
from benchmarks.scheduling.reached import Reached
from dataloader import open_client
from dataloader.jobs.schedules import Missed, Overlap, Schedule
from dataloader.store.connection.bridge import open_database
from dataloader.store.connection.options import DatabaseOptions
from dataloader.store.embedded.postgres import EmbeddedPostgres
from dataloader.store.schedules.rows import aio_put_schedule

SCHEDULES: Final = 1_000
PROCESSES: Final = 2
SLOTS: Final = 50
PERIODS_S: Final = (15, 20, 30, 45)
PAUSE: Final = timedelta(hours=1)
SETTLE_S: Final = 120
BEGIN: Final = datetime(2026, 1, 1, tzinfo=UTC)


def schedules() -> list[Schedule]:
    """Return schedules with all periods, policies and overlaps in turn."""
    missed, overlaps, periods = cycle(Missed), cycle(Overlap), cycle(PERIODS_S)
    return [
        Schedule(
            name=f"s{number:04d}",
            task="planned",
            every_s=next(periods),
            start_at=BEGIN,
            missed=next(missed),
            missed_limit=10_000,
            overlap=next(overlaps),
            job={"queue": QUEUE, "max_attempts": 1_000},
        )
        for number in range(SCHEDULES)
    ]


async def aio_put_all(connection: Any, some: Iterable[Schedule]) -> None:
    """Store them as an operator does, so that processes do not change them."""
    async with connection.transaction():
        for schedule in some:
            await aio_put_schedule(connection, schedule, "bench")


async def _put(dsn: str) -> None:
    async with open_database(DatabaseOptions(dsn=dsn)) as database:
        await database.write(aio_put_all, schedules())


async def _resume(dsn: str, names: Iterable[str]) -> None:
    async with open_client(dsn, operator="bench") as client:
        for name in names:
            await client.schedules.resume(name)


def measure(server: EmbeddedPostgres, folder: Path, seconds: float, seed: int) -> list[Reached]:
    """Run for `seconds`, resume the paused schedules after a third of it, and check each planned time."""
    dsn = migrated(server, "planned")
    trio.run(_put, dsn)
    notes = folder / "planned"
    notes.mkdir()
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(
            "UPDATE dl_schedules SET paused = true, paused_why = 'the bench', next_at = next_at - %s"
            " WHERE right(name, 1)::int %% 2 = 0",
            (PAUSE,),
        )
        paused = [name for (name,) in connection.execute("SELECT name FROM dl_schedules WHERE paused ORDER BY name")]
        firsts = dict(connection.execute("SELECT name, next_at FROM dl_schedules").fetchall())
        begins = {one.name: (firsts[one.name], timedelta(seconds=one.every_s or 0)) for one in schedules()}
        with KilledFleet(
            dsn, "benchmarks.scheduling.planned_tasks:tasks", PROCESSES, {QUEUE: SLOTS}, folder=notes
        ) as fleet:
            fleet.wait()
            chance = random.Random(seed)
            fleet.run(seconds / 3, chance)
            trio.run(_resume, dsn, paused)
            fleet.run(seconds * 2 / 3, chance)
            connection.execute("UPDATE dl_schedules SET paused = true")
            left = _settled(connection)
        found = read(connection, begins)
        again = _number(connection, "SELECT count(*) FROM dl_jobs WHERE attempt > 1")
        ended = dict(connection.execute("SELECT status::text, count(*) FROM dl_jobs GROUP BY 1").fetchall())
    say(f"planned: {fleet.kills} kills, {found}, {ended}, {again} of them run again after a kill")
    text = f"{found.times:,} planned times of {SCHEDULES:,} schedules"
    return [
        Reached(
            f"{text}: with neither job nor reason",
            found.missing,
            most=0,
            promise=True,
            note=f"{found.jobs:,} jobs, {found.left_out:,} left out, {fleet.kills} kills",
        ),
        Reached(
            "planned times with two jobs, or with a job and a reason", found.twice + found.both, most=0, promise=True
        ),
        Reached("jobs of times that were not planned", found.strange, most=0, promise=True),
        Reached("their jobs that have not ended", left, most=0, promise=True),
    ]


def _settled(connection: psycopg.Connection[Any]) -> int:
    """Wait until all jobs have ended; return the number of open ones."""
    until = time.monotonic() + SETTLE_S
    while (left := _number(connection, "SELECT count(*) FROM dl_jobs WHERE status IN ('queued', 'running')")) and (
        time.monotonic() < until
    ):
        time.sleep(0.2)
    return left


def _number(connection: psycopg.Connection[Any], statement: str) -> int:
    row = connection.execute(statement.encode()).fetchone()
    assert row is not None
    return int(row[0])

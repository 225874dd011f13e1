"""Cost of schedules and limits: each figure relative to another of the same run, alternating; medians."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

import psycopg
import trio

from benchmarks.peers.progress import say
from benchmarks.scheduling import lane_drains
from benchmarks.scheduling.databases import enqueued, migrated
from benchmarks.scheduling.killed_fleet import KilledFleet
from benchmarks.scheduling.measured_tasks import QUEUE, UNUSED, tasks_that
from benchmarks.scheduling.planned_kills import aio_put_all
from benchmarks.scheduling.reached import Reached
from dataloader import NewJob, RateLimit, Supplier
from dataloader.jobs.schedules import Schedule
from dataloader.store.connection.bridge import Database, open_database
from dataloader.store.connection.options import DatabaseOptions
from dataloader.store.embedded.postgres import EmbeddedPostgres
from dataloader.store.limits.limit_rows import aio_declare_limits
from dataloader.store.queue.enqueue import enqueue
from dataloader.store.queue.task_rows import aio_declare
from dataloader.store.schedules.tick import tick

SCHEDULES: Final = 1_000
MANY_CALLS: Final = 100_000
SETTLE_S: Final = 8
_STATEMENT: Final = re.compile(r"LOG:  (?:statement|execute [^:]*): (.*(?:\n\t.*)*)")
BEGIN: Final = datetime(2026, 1, 1, tzinfo=UTC)


def measure(server: EmbeddedPostgres, folder: Path, *, quick: bool) -> list[Reached]:
    """Run all measurements."""
    alone, limits, beside = (migrated(server, name) for name in ("alone", "limits", "beside"))
    closed = 10_000 if quick else 100_000
    for dsn, number in ((alone, None), (limits, 0), (beside, SCHEDULES)):
        trio.run(_declare, dsn, number)
    say(f"{closed:,} jobs into a closed lane")
    enqueued(beside, [NewJob(task="closed") for _ in range(closed)])
    lines = lane_drains.measure(server.pid, alone, limits, beside, closed, quick=quick)
    due = migrated(server, "due")
    trio.run(_declare, due, 0)
    lines += trio.run(partial(_enqueues, due, rounds=2 if quick else 7))
    lines += takes(migrated(server, "takes"), 100 if quick else 500)
    lines += idle(server, beside, folder, 10 if quick else 60)
    return lines


async def _declare(dsn: str, schedules: int | None) -> None:
    """Declare the tasks, and schedules in the distant future; None: only tasks without limits."""
    some = [Schedule(name=f"s{n}", task="free", cron="0 4 1 1 *", job={"queue": QUEUE}) for n in range(schedules or 0)]
    tasks = tasks_that(lambda: None, with_limits=schedules is not None)
    async with open_database(DatabaseOptions(dsn=dsn)) as database:
        await database.write(aio_declare, tasks.values(), "bench")
        await database.write(aio_declare_limits, tasks.values(), tasks.suppliers)
        await database.write(aio_put_all, some)


async def _enqueues(dsn: str, *, rounds: int) -> list[Reached]:
    """Measure a thousand schedules that are due together, and single triggers of a unique task."""
    say("a thousand due at once, unique triggers")
    some = [Schedule(name=f"s{n}", task="free", every_s=1, start_at=BEGIN) for n in range(SCHEDULES)]
    async with open_database(DatabaseOptions(dsn=dsn)) as database:
        await database.write(aio_put_all, some)
        ticks, bulks, plain, keyed = [], [], [], []
        for one in range(rounds):
            await database.write(_aio_clear)
            bulks.append(await _took(partial(enqueue, database, _alike())))
            await database.write(_aio_clear)
            await database.write(_aio_due)
            ticks.append(await _took(partial(_tick_all, database)))
            for task, times in (("free", plain), ("keyed", keyed)):
                for number in range(50):
                    job = NewJob(task=task, queue=QUEUE, args={"number": one * 50 + number})
                    times.append(await _took(partial(enqueue, database, [job])))
    due, bulk = statistics.median(ticks), statistics.median(bulks)
    one, other = statistics.median(plain), statistics.median(keyed)
    return [
        Reached(
            "1,000 schedules due at once, by a bulk enqueue of 1,000 jobs alike",
            due / bulk,
            most=1.5,
            note=f"{due * 1000:.0f} and {bulk * 1000:.0f} ms",
        ),
        Reached(
            "rate of triggers of a unique task, by a plain one's",
            one / other,
            least=0.6,
            note=f"{other * 1000:.2f} and {one * 1000:.2f} ms each",
        ),
    ]


def _alike() -> list[NewJob]:
    return [NewJob(task="free", queue=QUEUE, lock_key=f"schedule:s{n}") for n in range(SCHEDULES)]


async def _took(call: Callable[[], Awaitable[object]]) -> float:
    began = time.perf_counter()
    await call()
    return time.perf_counter() - began


async def _tick_all(database: Database) -> None:
    added = 0
    while added < SCHEDULES:
        added += (await tick(database)).added


async def _aio_clear(connection: Any) -> None:
    await connection.execute("TRUNCATE dl_jobs CASCADE")
    await connection.execute("VACUUM ANALYZE dl_schedules")


async def _aio_due(connection: Any) -> None:
    await connection.execute("UPDATE dl_schedules SET next_at = date_trunc('second', clock_timestamp())")


def takes(dsn: str, rounds: int) -> list[Reached]:
    """Measure a handler's take from a supplier with few recorded calls, and with many."""
    say("takes")
    suppliers = [Supplier(name, rate_limits=(RateLimit(1_000_000, per_s=86_400),)) for name in ("few", "many")]
    trio.run(_declare_suppliers, dsn, suppliers)
    times: dict[str, list[float]] = {"few": [], "many": []}
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("SET synchronous_commit = off")
        for name, calls in (("few", 10), ("many", MANY_CALLS)):
            connection.execute(
                "INSERT INTO dl_source_calls (source, at, n, cost)"
                " SELECT %s, now() - make_interval(secs => 3600 - 3600.0 * i / %s), i, 1 FROM generate_series(1, %s) i",
                (name, calls, calls),
            )
            connection.execute("UPDATE dl_sources SET last_n = %s, last_at = now() WHERE source = %s", (calls, name))
        connection.execute("VACUUM ANALYZE dl_source_calls")
        for _ in range(rounds):
            for name, taken in times.items():
                began = time.perf_counter()
                connection.execute("SELECT wait_s FROM dl_supplier_take(%s, 1)", (name,), prepare=True)
                taken.append(time.perf_counter() - began)
                connection.execute(
                    "DELETE FROM dl_source_calls c USING dl_sources s"
                    " WHERE c.source = 'few' AND s.source = c.source AND c.n <= s.last_n - 10"
                )
    few, many = (statistics.median(times[name]) for name in ("few", "many"))
    return [
        Reached(
            f"a take at {MANY_CALLS:,} calls, by one at 10",
            many / few,
            most=1.5,
            note=f"{many * 1e6:.0f} and {few * 1e6:.0f} µs",
        )
    ]


async def _declare_suppliers(dsn: str, suppliers: list[Supplier]) -> None:
    async with open_database(DatabaseOptions(dsn=dsn)) as database:
        await database.write(aio_declare_limits, (), suppliers)


def idle(server: EmbeddedPostgres, dsn: str, folder: Path, seconds: float) -> list[Reached]:
    """Count the statements of an idle service with its default settings, in the server's log."""
    say("idle")
    notes = folder / "idle"
    notes.mkdir()
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("DELETE FROM dl_jobs WHERE status = 'queued'")
        connection.execute("ALTER DATABASE beside SET log_statement = 'all'")
    with KilledFleet(
        dsn, "benchmarks.scheduling.measured_tasks:tasks", 1, {QUEUE: 200}, folder=notes, settings={}
    ) as fleet:
        fleet.wait()
        time.sleep(SETTLE_S)
        before = _statements(server)
        time.sleep(seconds)
        said = _statements(server)[len(before) :]
    (notes / "statements").write_text("\n".join(said))
    text = f"statements a second, idle with {SCHEDULES:,} schedules and {UNUSED + 2} limited tasks"
    return [Reached(text, len(said) / seconds, most=1)]


def _statements(server: EmbeddedPostgres) -> list[str]:
    """Return the statements in the server's log, each on one line."""
    text = server.log_path.read_text(errors="replace")
    return [" ".join(found.split()) for found in _STATEMENT.findall(text)]

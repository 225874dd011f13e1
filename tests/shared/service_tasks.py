"""Tasks of the services under test; run by `dataloader serve`, so they talk to the tests through the database."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import multiprocessing
import os
import random
import resource
import sqlite3
import sys
import threading
import time
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import broken
import structlog
import trio
from canaries import canaries

from dataloader import GiveUp, Job, Retry, RetryPolicy, Snooze, Tasks, ThreadJob

tasks = Tasks()
broken.take_out_what_is_named()


class Ledger:
    """Writes to the ledger on a separate connection and thread, which continue when the queue's are stopped."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connection: Any = None

    async def _fetchval(self, sql: str, *args: object) -> Any:
        if self._connection is None or self._connection.is_closed():
            name = {"application_name": f"ledger {os.getpid()}"}
            self._connection = await asyncpg.connect(os.environ["LEDGER_DSN"], timeout=30, server_settings=name)
        return await self._connection.fetchval(sql, *args, timeout=30)

    def write(self, sql: str, *args: object) -> Any:
        """Run a statement, from any thread except the ledger's own."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, daemon=True).start()
            return asyncio.run_coroutine_threadsafe(self._fetchval(sql, *args), self._loop).result(60)

    def begin(self, job: Job | ThreadJob) -> int:
        """Note the beginning of a handler, from any thread except the ledger's own."""
        number: int = self.write(
            "INSERT INTO ledger (job_id, lock_key, attempt, pid) VALUES ($1, $2, $3, $4) RETURNING visit",
            job.job_id,
            job.lock_key,
            job.attempt,
            os.getpid(),
        )
        return number

    def end(self, number: int, how: str) -> None:
        """Note how a visit ended."""
        self.write("UPDATE ledger SET ended_at = pg_catalog.clock_timestamp(), how = $2 WHERE visit = $1", number, how)

    @asynccontextmanager
    async def visit(self, job: Job) -> AsyncIterator[None]:
        """Note when the block begins and how it ends, also when it is cancelled."""
        number = await trio.to_thread.run_sync(self.begin, job)
        how = "returned"
        try:
            yield
        except BaseException as error:
            how = type(error).__name__
            raise
        finally:
            with trio.CancelScope(shield=True):  # bounded by the statement's own deadline
                await trio.to_thread.run_sync(self.end, number, how)


LEDGER = Ledger()


class Chat:
    """Text that writes long lines to stderr when it is formatted."""

    def __init__(self, lines: int) -> None:
        self._lines = lines

    def __str__(self) -> str:
        for _ in range(self._lines):
            sys.stderr.write("x" * 1_000 + "\n")
            sys.stderr.flush()
        return "all is said"


@tasks.task("visit", retry=RetryPolicy(base_s=0))
async def visit(job: Job) -> int:
    """Run for `s` seconds, then block the event loop for `block` seconds; the ledger has the times.

    It also waits until the file `until` exists, or `block_until` while blocking the loop. With `native` it never
    returns from a call into native code, which no signal interrupts. While it logs a line, it writes `chat` long lines
    to stderr. The first `fails` attempts fail.
    """
    async with LEDGER.visit(job):
        await trio.sleep(job.args.get("s", 0))
        while "until" in job.args and not os.path.exists(job.args["until"]):  # noqa: ASYNC110, ASYNC240, PTH110
            await trio.sleep(0.05)
        time.sleep(job.args.get("block", 0))  # noqa: ASYNC251 - the tested behavior
        while "block_until" in job.args and not os.path.exists(job.args["block_until"]):  # noqa: ASYNC240, PTH110
            time.sleep(0.05)  # noqa: ASYNC251 - as above
        if "chat" in job.args:
            logging.getLogger("handler").warning("%s", Chat(job.args["chat"]))
        if job.args.get("native"):
            endless = "WITH RECURSIVE r (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT count(*) FROM r"
            sqlite3.connect(":memory:").execute(endless).fetchone()
        if job.attempt <= job.args.get("fails", 0):
            raise ValueError("not yet")
    return job.attempt


@tasks.task("children")
def children(_job: ThreadJob) -> None:
    """Fork three processes and send each of them a signal."""
    started = [multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,)) for _ in range(3)]
    for child in started:
        child.start()
    time.sleep(0.5)
    for child in started:
        child.terminate()
    time.sleep(0.5)
    for child in started:
        child.kill()
        child.join(10)


@tasks.task("late", retry=RetryPolicy(base_s=0))
async def late(job: Job) -> int:
    """Run as `visit`, but when stopped show progress, log, linger and return nevertheless."""
    async with LEDGER.visit(job):
        try:
            await trio.sleep(job.args.get("s", 0))
        except trio.Cancelled:  # noqa: ASYNC103 - the tested behavior
            with trio.CancelScope(shield=True):
                job.log.info("too late")
                await job.progress({"too late": job.attempt})
                await trio.sleep(job.args.get("linger", 0))
    return job.attempt


@tasks.task("deaf visit")
async def deaf_visit(job: Job) -> None:
    async with LEDGER.visit(job):
        with trio.CancelScope(shield=True):
            await trio.sleep(job.args["s"])


@tasks.task("deaf thread visit")
def deaf_thread_visit(job: ThreadJob) -> None:
    number = LEDGER.begin(job)
    time.sleep(job.args["s"])
    LEDGER.end(number, "returned")


@tasks.task("internal error")
async def internal_error(_job: Job) -> None:
    """Break the event loop, as a failing task in Trio's own nursery does."""

    async def fail() -> None:
        raise LookupError("password=sesame is unknown")

    trio.lowlevel.spawn_system_task(fail)
    await trio.sleep_forever()


@tasks.task("segmentation fault")
async def segmentation_fault(job: Job) -> None:
    """End the process from within native code."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.string_at(0)


@tasks.task("quick")
async def quick(job: Job) -> Any:
    return job.args.get("answer")


@tasks.task("sleep")
async def sleep(job: Job) -> str:
    await job.progress({"sleeping": True})
    await trio.sleep(job.args["s"])
    return "slept"


@tasks.task("churn")
async def churn(job: Job) -> None:
    """Work briefly and wait most of the time, as requests and queries do."""
    for _ in range(4):
        await trio.sleep(0.05)


@tasks.task("deaf thread")
def deaf_thread(job: ThreadJob) -> None:
    """Never return and never check for a stop."""
    time.sleep(3_600)


@tasks.task("deaf")
async def deaf(job: Job) -> None:
    with trio.CancelScope(shield=True):
        await trio.sleep(3_600)


@tasks.task("log")
async def log(job: Job) -> None:
    structlog.get_logger("handler").info("a line", password="sesame", url="https://u:sesame@h/", rows=3)
    job.log.info("what is only kept")
    job.log.warning("what is worth a look", password="sesame", event=7)
    raise ValueError("token=sesame refused by https://u:sesame@h/")


@tasks.task("ledger", retry=RetryPolicy(base_s=0))
async def ledger(job: Job) -> None:
    """Write its times by the database's clock, in one transaction that is not that of its success."""
    async with job.transaction() as transaction:
        await transaction.execute(
            "INSERT INTO ledger (job_id, lock_key, began_at) VALUES ($1, $2, clock_timestamp())",
            job.job_id,
            job.lock_key,
        )
        await trio.sleep(0.001)
        await transaction.execute("UPDATE ledger SET ended_at = clock_timestamp() WHERE job_id = $1", job.job_id)


@tasks.task("fill")
async def fill(job: Job) -> None:
    """Write rows and success in one transaction, slowly."""
    async with job.transaction() as transaction:
        for n in range(20):
            await transaction.execute("INSERT INTO target VALUES ($1, $2)", job.job_id, n)
            await trio.sleep(0.01)


@tasks.task("commit", retry=RetryPolicy(base_s=0))
async def commit(job: Job) -> None:
    """Write a row and success in one transaction, which commits when the file `when` exists."""
    async with job.transaction() as transaction:
        await transaction.execute("INSERT INTO target VALUES ($1, $2)", job.job_id, job.attempt)
        while not os.path.exists(job.args["when"]):  # noqa: ASYNC110, ASYNC240, PTH110 - the test creates the file
            await trio.sleep(0.05)


@tasks.task("whim", retry=RetryPolicy(base_s=0))
async def whim(job: Job) -> Any:
    """End soon, in any of the possible ways."""
    await job.progress({"attempt": job.attempt})
    await trio.sleep(random.uniform(0, 0.05))
    match random.randrange(10):
        case 0:
            raise ValueError("a whim")
        case 1:
            return Retry(0)
        case 2:
            return Snooze(random.uniform(0, 0.2))
        case 3:
            return GiveUp("a whim")
        case 4:
            job.log.info("in a transaction")
            async with job.transaction() as transaction:
                await transaction.execute("SELECT pg_sleep(0.01)")
    return job.attempt


def deep(levels: int) -> Any:
    value: Any = "\ud800"
    for _ in range(levels):
        value = [value]
    return value


def called(times: int) -> None:
    if times:
        called(times - 1)
    raise ValueError("deep down")


def grouped(errors: int) -> Exception:
    group: Exception = ValueError("the first")
    for number in range(errors // 10):
        group = ExceptionGroup("a group", [group, *(ValueError(f"error {number}.{n}") for n in range(9))])
    return group


@tasks.task("hostile")
async def hostile(job: Job) -> Any:
    """Return or raise unusual values."""
    match job.args["what"]:
        case "50 MB":
            return "x" * 50_000_000
        case "NUL and half pairs":
            return {"a\x00\ud800": "b\x00\udfff"}
        case "not a number":
            return [float("nan"), float("inf")]
        case "100,000 levels":
            return deep(100_000)
        case "a traceback of 900 calls":
            return called(900)
        case "a message of 10 MB":
            raise ValueError("x\x00" * 5_000_000)
        case _:
            raise grouped(1_000)


@tasks.task("spill")
async def spill(job: Job) -> Any:
    """Put secrets wherever a handler can output anything, and end as requested."""
    said = canaries(job.args["how"])
    log = structlog.get_logger("handler")
    log.warning(said["text"], **said)
    logging.getLogger("handler").error("%s: %r", said["text"], said)
    warnings.warn(said["text"], stacklevel=1)
    job.log.error(said["text"], **said)
    await job.progress(said)
    cause = ConnectionError(said["url"])
    log.error("caught", headers=said["headers"], exc_info=cause)
    error = RuntimeError(said["text"], said)
    error.add_note(said["text"])
    match job.args["how"]:
        case "raise":
            raise error from cause
        case "raise a group":
            raise ExceptionGroup(said["text"], [error, KeyError(said["url"])]) from cause
        case "raise at length":
            # A text is cut somewhere, but not within a secret, whose beginning would remain.
            raise RuntimeError("x" * 1_970 + f" {said['url']}")
        case "fail in SQL":
            async with job.transaction() as transaction:
                await transaction.execute("SELECT $1::int", said["text"])
        case "give up":
            return GiveUp(said["text"])
        case "retry":
            return Retry(3_600, said["text"])
        case "snooze":
            return Snooze(3_600, said["text"])
    return said

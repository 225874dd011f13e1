"""Tasks of the services in `just chaos`. Each handler notes its beginning and its end in a file of its process."""

from __future__ import annotations

import os
import random
import time
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager
from datetime import UTC, date, datetime
from typing import Any

import service_processes
import trio

from chaos.notes import TICK_S, Notes
from dataloader import GiveUp, Job, RateLimit, RetryPolicy, Snooze, Supplier, Tasks, ThreadJob
from dataloader.flows.etl import Http, Json, Load, Table, Window, Windows, add_loads

QUEUE = "q"
LIMITED = "limited"
LOADS = "loads"
FIRST_DAY = date(1900, 1, 1)
PARTNER = Supplier("partner", rate_limits=(RateLimit(10, per_s=1), RateLimit(30, per_s=5)), margin_s=0.5)
"""A fifth of the margin is for the duration of a request, which is tens of milliseconds on a busy machine."""
MOST_RUNNING = 3
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
SCHEDULES = {"every 2 s": 2, "every 5 s": 5, "minutely": 60}
"""Seconds between two times, by name."""

tasks = Tasks()
NOTES: Notes


@tasks.resource
@asynccontextmanager
async def ticks() -> AsyncIterator[None]:
    """Note every tenth of a second that this process's event loop runs."""

    async def tick() -> None:
        while True:
            NOTES.tick()
            await trio.sleep(TICK_S)

    NOTES.trio_is_behind_s = time.monotonic() - trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(tick)
        yield
        nursery.cancel_scope.cancel()


def noted(job: Job | ThreadJob) -> AbstractContextManager[list[str]]:
    """Note a run of a job for the duration of a block."""
    return NOTES.run(str(job.job_id), job.lock_key, job.task, lambda: job.deadline + NOTES.trio_is_behind_s)


AGAIN_SOON = RetryPolicy(base_s=0.1, factor=1)


@tasks.task("work", queue=QUEUE, retry=AGAIN_SOON)
async def work(job: Job) -> Any:
    """Run for `s` seconds. The first `fails` runs fail; then it may end in another `how`."""
    with noted(job) as how:
        await trio.sleep(job.args["s"])
        if job.attempt <= job.args.get("fails", 0):
            raise ValueError("not yet")
        match job.args.get("how"):
            case "snooze" if random.random() < 0.5:
                how[0] = "snoozed"
                return Snooze(random.random())
            case "give up":
                how[0] = "gave up"
                return GiveUp("as it was told")
    return job.attempt


@tasks.task("thread", queue=QUEUE, retry=AGAIN_SOON)
def thread(job: ThreadJob) -> None:
    """Run for `s` seconds in a thread."""
    with noted(job):
        until = time.monotonic() + job.args["s"]
        while time.monotonic() < until:
            time.sleep(0.02)
            job.checkpoint()


@tasks.task("book", queue=QUEUE, retry=AGAIN_SOON)
async def book(job: Job) -> None:
    """Write a row in the transaction of the job's success."""
    with noted(job):
        async with job.transaction() as transaction:
            await transaction.execute("INSERT INTO booked VALUES ($1)", job.job_id)
            await trio.sleep(job.args["s"])


@tasks.task("node", queue=QUEUE, retry=AGAIN_SOON)
async def node(job: Job) -> Any:
    """Run a job of a graph."""
    with noted(job) as how:
        await trio.sleep(job.args["s"])
        if job.args.get("how") == "give up":
            how[0] = "gave up"
            return GiveUp("as it was told")
    return None


@tasks.task("polite", queue=LIMITED, retry=AGAIN_SOON, supplier=PARTNER)
async def polite(job: Job) -> None:
    """Run a job that takes a unit of the partner's rate limits."""
    with noted(job):
        await trio.sleep(job.args["s"])


@tasks.task("few", queue=LIMITED, retry=AGAIN_SOON, max_running=MOST_RUNNING)
async def few(job: Job) -> None:
    """Run a job of a task with a concurrency limit."""
    with noted(job):
        await trio.sleep(job.args["s"])


@tasks.task("planned", queue=QUEUE, retry=AGAIN_SOON, max_attempts=1_000)
async def planned(job: Job) -> None:
    """Run a job of a schedule."""
    with noted(job):
        await trio.sleep(random.uniform(0, 0.2))


tasks.schedule("every 2 s", task="planned", every_s=2, start_at=BEGIN, missed="all", overlap="allow")
tasks.schedule("every 5 s", task="planned", every_s=5, start_at=BEGIN, missed="once", overlap="buffer_one")
tasks.schedule("minutely", task="planned", cron="* * * * *", missed="all", overlap="buffer_all")


def day_of(window: Window) -> dict[str, Any]:
    return {"day": f"{window.start:%Y-%m-%d}"}


def load(name: str, table: Table, url: str) -> Load:
    """Return a load of one page per day from the partner, within the partner's rate limits."""
    return Load(
        name,
        Http(url, name=PARTNER.name, endpoint="/items", params=day_of, format=Json("items")),
        table,
        queue=LOADS,
        windows=Windows(start=FIRST_DAY, segment="day"),
        pipeline={"rate_min": 0, "rate_max": 0, "request_timeout": 2},
    )


if "CHAOS_FOLDER" in os.environ:
    NOTES = Notes(os.environ["CHAOS_FOLDER"], "service")
    url = os.environ["SOURCE_URL"]
    add_loads(tasks, load("keyed", Table("keyed", key="id"), url))
    add_loads(tasks, load("keyless", Table("keyless", mode="insert"), url))
    tasks.include(service_processes.tasks)  # its module takes a guard out, if one is named

"""The tasks of the services under test; run by `dataloader serve`, so they talk to the tests through the database."""

from __future__ import annotations

import time
from typing import Any

import structlog
import trio

from dataloader import Job, RetryPolicy, Tasks, ThreadJob

tasks = Tasks()


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
    """Short work that waits most of the time, as requests and queries do."""
    for _ in range(4):
        await trio.sleep(0.05)


@tasks.task("deaf thread")
def deaf_thread(job: ThreadJob) -> None:
    """Never returns, never looks."""
    time.sleep(3_600)


@tasks.task("deaf")
async def deaf(job: Job) -> None:
    with trio.CancelScope(shield=True):
        await trio.sleep(3_600)


@tasks.task("log")
async def log(job: Job) -> None:
    structlog.get_logger("handler").info("a line", password="sesame", url="https://u:sesame@h/", rows=3)
    raise ValueError("token=sesame refused by https://u:sesame@h/")


@tasks.task("ledger", retry=RetryPolicy(base_s=0))
async def ledger(job: Job) -> None:
    """Writes when it was in, by the database's clock: in one transaction that it does not share with its success."""
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
    """Rows and success in one transaction, slowly."""
    async with job.transaction() as transaction:
        for n in range(20):
            await transaction.execute("INSERT INTO target VALUES ($1, $2)", job.job_id, n)
            await trio.sleep(0.01)

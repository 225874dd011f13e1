"""Tasks whose functions run beside Dask workers, which import them from here."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time

import psycopg

from dataloader import AioProcessJob, JobStopped, ProcessJob, RetryPolicy, Tasks

if "WITHOUT_GUARD" in os.environ:  # handlers import this module too, and should import only what they need
    import broken

    broken.take_out_what_is_named()

tasks = Tasks()


@tasks.task("noop", dask=True)
def noop(job: ProcessJob) -> None:
    """Do nothing."""


@tasks.task("all", dask=True)
def does_all(job: ProcessJob) -> dict[str, object]:
    job.progress({"n": 1})
    job.log.info("hello", of=job.task)
    print("printed")  # noqa: T201
    print("to stderr", file=sys.stderr, end="")  # noqa: T201
    added = job.enqueue("noop", queue="none")
    return {"args": job.args, "left": job.deadline - time.monotonic(), "pid": os.getpid(), "added": str(added.job_id)}


@tasks.task("aio", dask=True, asyncio=True)
async def aio(job: AioProcessJob) -> str:
    await asyncio.sleep(0)
    return "done"


@tasks.task("raises", dask=True)
def raises(job: ProcessJob) -> None:
    match job.args["how"]:
        case "error":
            raise ValueError("no such day")
        case "exit":
            os._exit(3)


@tasks.task("endless", dask=True)
def endless(job: ProcessJob) -> None:
    job.progress({"pid": os.getpid()})
    while True:
        pass


@tasks.task("stops", dask=True)
def stops(job: ProcessJob) -> None:
    job.progress({"pid": os.getpid()})
    try:
        time.sleep(600)
    finally:
        job.log.info("cleaned up")


@tasks.task("short", dask=True, timeout_s=1)
def short(job: ProcessJob) -> None:
    time.sleep(600)


@tasks.task("leaves", dask=True)
def leaves(job: ProcessJob) -> int:
    return subprocess.Popen(["/bin/sleep", "600"], start_new_session=True).pid


@tasks.task("beats", dask=True, retry=RetryPolicy(base_s=0.1))
def beats(job: ProcessJob) -> None:
    """Write rows continuously while it lives, ignoring stops."""
    with psycopg.connect(job.args["dsn"], autocommit=True) as connection:
        while True:
            with contextlib.suppress(JobStopped):
                connection.execute("INSERT INTO beats (job, pid) VALUES (%s, %s)", (str(job.job_id), os.getpid()))
                time.sleep(0.02)


@tasks.task("sleeps", dask=True)
def sleeps(job: ProcessJob) -> None:
    job.progress({"pid": os.getpid()})
    time.sleep(job.args["s"])

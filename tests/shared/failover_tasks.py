"""Tasks of services whose database fails over. Handlers write their beginning and end to a file, not to a database.

The clock of the file is the machine's monotonic one, so its times are comparable with those of other processes.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import time
from collections.abc import Iterator
from typing import Any

import attrs
import broken
import trio

from dataloader import Job, RetryPolicy, Sink, Tasks
from dataloader.flows.processes import Delivery, Done, Process, Processes, Timer, add_processes
from dataloader.jobs.model import ClaimedJob

broken.take_out_what_is_named()
tasks = Tasks()
processes = Processes()
SINK = Sink(name="books")
_FILE = os.open(os.environ["HISTORY"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
_numbers = itertools.count()


def note(kind: str, **fields: Any) -> None:
    """Append a line, in one write."""
    line = {"kind": kind, "at": time.monotonic(), "pid": os.getpid()} | fields
    os.write(_FILE, json.dumps(line).encode() + b"\n")


@contextlib.contextmanager
def noted(job: Job) -> Iterator[str]:
    """Note the beginning and the end of a run; yield the run's name."""
    run = f"{os.getpid()}.{next(_numbers)}"
    token = job.resource(ClaimedJob).token
    planned = None if job.planned_at is None else job.planned_at.isoformat()
    note("begin", run=run, job=str(job.job_id), key=job.lock_key, token=token, planned=planned)
    how = "returned"
    try:
        yield run
    except BaseException as error:
        how = type(error).__name__
        raise
    finally:
        note("end", run=run, how=how, by=None if job.stopped_by is None else str(job.stopped_by))


async def _until(job: Job, path: str) -> str:
    with noted(job) as run:
        await trio.sleep(job.args.get("s", 0))
        while path and not os.path.exists(path):  # noqa: ASYNC110, ASYNC240, PTH110 - the test creates the file
            await trio.sleep(0.05)
    return run


@tasks.task("plain", queue="q", retry=RetryPolicy(base_s=0))
async def plain(job: Job) -> str:
    """Run for `s` seconds, and until the file `until` exists. Return the name of the run."""
    return await _until(job, job.args.get("until", ""))


@tasks.task("keyed", queue="q", retry=RetryPolicy(base_s=0), lock_key="key-{key}")
async def keyed(job: Job) -> str:
    """Run as `plain`, with a key."""
    return await _until(job, job.args.get("until", ""))


@tasks.task("tick", queue="q")
async def tick(job: Job) -> str:
    """Run the job of a schedule."""
    return await _until(job, "")


tasks.schedule("every second", task="tick", every_s=1, missed="all", overlap="allow")


@attrs.frozen
class Sum:
    """Sum of a process, and the number of confirmations by its timer."""

    total: int = 0
    confirmed: int = 0


account = processes.define("account", state=Sum, on_crash="again")


@account.init
async def begin(_p: Process[Sum]) -> Done:
    return Done(state=Sum())


@account.call
async def add(p: Process[Sum], number: str) -> Done:
    note("key", key=p.step_key, meaning=["add", p.process_id, number])
    await trio.sleep(random.uniform(0, 0.1))
    total = p.state.total + 1
    state = attrs.evolve(p.state, total=total)
    return Done(total, state=state, events=[number], next=Timer(after_s=0.2, context=number))


@account.timeout
async def confirm(p: Process[Sum]) -> Done:
    note("key", key=p.step_key, meaning=["confirm", p.process_id, p.context])
    return Done(state=attrs.evolve(p.state, confirmed=p.state.confirmed + 1))


@processes.sink("books")
async def book(delivery: Delivery) -> None:
    note("key", key=f"sink {delivery.key}", meaning=["book", delivery.process_id, str(delivery.payload)])


add_processes(tasks, processes)

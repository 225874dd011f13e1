"""Runs one job in this process and exits with it: for `dataloader etl run --tasks`, without a service.

Uses a supervisor whose queue has a unique name: no other process claims the job, and this one claims no other job. The
job has one attempt, because no process would serve its queue after a crash. The schedules that services have stored do
not change, because the command may have a program of another version.

The first SIGINT or SIGTERM cancels the job and waits for its end. The second one stops it immediately.
"""

from __future__ import annotations

import contextlib
import math
import signal
from collections.abc import Callable
from typing import Any, Final
from uuid import UUID

import attrs
import trio

from dataloader.cli.target import command_options
from dataloader.cli.waiting import wait_for_end
from dataloader.jobs.client.jobs import Jobs
from dataloader.jobs.contract import Operator
from dataloader.jobs.errors import StoreError
from dataloader.jobs.ids import uuid7
from dataloader.jobs.load_jobs import ONE_JOB_QUEUE
from dataloader.jobs.model import JobRecord, NewJob
from dataloader.jobs.tasks import Tasks
from dataloader.store.connection.bridge import Session, open_database
from dataloader.store.embedded.postgres import EmbeddedPostgres
from dataloader.supervisor.open_client import account
from dataloader.supervisor.settings import Settings, Worker
from dataloader.supervisor.signals import obey
from dataloader.supervisor.supervisor import open_supervisor

LAST_WORD_S: Final = 5.0
"""Seconds in which an abandoned job must be canceled."""


@attrs.define
class OneJob:
    """Result: the last state of `job`, None if it was not added. `interrupted` by a signal."""

    job: JobRecord | None = None
    interrupted: bool = False


async def run_job(
    settings: Settings,
    tasks: Tasks,
    new: NewJob,
    *,
    on_change: Callable[[JobRecord], Any],
    server: EmbeddedPostgres | None = None,
) -> OneJob:
    """Run `new` to its end; its queue, attempts and lease are set here. The settings must have a database.

    `server` is the embedded server of the settings. It is restarted if it ends.

    Raises the start errors of a supervisor, and `StoreUnavailable` if the database does not answer at the start, or
    later for `MOST_AWAY_S`: unlike a service, a command must not wait forever.
    """
    await _ask_database(settings)
    queue = f"{ONE_JOB_QUEUE}{uuid7()}"
    task = tasks[new.task]
    new = attrs.evolve(new, queue=queue, max_attempts=1, lease_ttl_sec=task.lease_ttl_sec)
    outcome, begun = OneJob(), trio.Event()

    def changed(job: JobRecord) -> None:
        # Its queue is used by no other job. A read a moment later would see the queue full because of the job itself.
        outcome.job = attrs.evolve(job, queue_state=None)
        on_change(outcome.job)

    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with trio.open_nursery() as nursery:
            canceling = trio.Event()

            def cancel_job(_name: str) -> None:
                outcome.interrupted = True
                canceling.set()
                if not begun.is_set():
                    stop(_name)

            def stop(_name: str) -> None:
                nursery.cancel_scope.cancel()

            nursery.start_soon(obey, signals, cancel_job, stop)
            # The job stores its lines, and the screen shows the progress.
            here = attrs.evolve(settings, workers=(Worker(queue, 1),), job_log_level="off")
            async with open_supervisor(here, tasks, server=server, stores_schedules=False) as supervisor:
                jobs = supervisor.jobs.signed(Operator(account()))
                [enqueued] = await jobs.enqueue_many([new])
                begun.set()
                nursery.start_soon(_cancel_when, canceling, jobs, enqueued.job_id)
                try:
                    outcome.job = await wait_for_end(jobs, enqueued.job_id, timeout_s=math.inf, on_change=changed)
                except BaseException:
                    # Otherwise the job would return to a queue without a worker.
                    with trio.move_on_after(LAST_WORD_S, shield=True), contextlib.suppress(StoreError):
                        outcome.job = await jobs.cancel(enqueued.job_id)
                    raise
            nursery.cancel_scope.cancel()
    return outcome


async def _ask_database(settings: Settings) -> None:
    """Raise `StoreUnavailable` unless the database answers."""
    async with open_database(command_options(settings)) as database:
        await Session(database, "command").open()


async def _cancel_when(canceling: trio.Event, jobs: Jobs, job_id: UUID) -> None:
    await canceling.wait()
    await jobs.cancel(job_id)

"""Runs one job in this process, and ends with it: for `dataloader etl run --tasks`, where nobody serves the queue.

A supervisor like any other, whose queue has a name that is used once: nobody else takes the job, and no other job comes
here. The job has one attempt, since after a crash nobody would look into its queue again.

The first SIGINT or SIGTERM cancels the job, and its end is waited for; the second one stops it at once.
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
from dataloader.jobs.model import JobRecord, NewJob
from dataloader.jobs.tasks import Tasks
from dataloader.store.connection.bridge import Session, open_database
from dataloader.store.embedded.postgres import EmbeddedPostgres
from dataloader.supervisor.open_client import account
from dataloader.supervisor.settings import Settings, Worker
from dataloader.supervisor.signals import obey
from dataloader.supervisor.supervisor import open_supervisor

LAST_WORD_S: Final = 5.0
"""How long a job that is left alone may take to be cancelled."""


@attrs.define
class OneJob:
    """What became of it: `job` as it was seen last, None if it came to none; `interrupted` by a signal."""

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
    """Run `new`, whose queue, attempts and lease are given here, to its end. The settings must have a database.

    `server` is the embedded one that they lead to: it is started again, should it end.

    Raises what a supervisor raises that can't start, and `StoreUnavailable` if the database does not answer at the
    start, or later for `MOST_AWAY_S`: a service waits for it, but who has typed a command wants to know.
    """
    await _ask_database(settings)
    queue = f"one job {uuid7()}"
    task = tasks[new.task]
    new = attrs.evolve(new, queue=queue, max_attempts=1, lease_ttl_sec=task.lease_ttl_sec)
    outcome, begun = OneJob(), trio.Event()

    def changed(job: JobRecord) -> None:
        # Its queue is its own. Read beside the row, a moment later, it seems full of the job itself.
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
            # Its lines are kept with it; who watches here is shown how it goes.
            here = attrs.evolve(settings, workers=(Worker(queue, 1),), job_log_level="off")
            async with open_supervisor(here, tasks, server=server) as supervisor:
                jobs = supervisor.jobs.signed(Operator(account()))
                [enqueued] = await jobs.enqueue_many([new])
                begun.set()
                nursery.start_soon(_cancel_when, canceling, jobs, enqueued.job_id)
                try:
                    outcome.job = await wait_for_end(jobs, enqueued.job_id, timeout_s=math.inf, on_change=changed)
                except BaseException:
                    # Else it would go back to a queue that nobody serves.
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

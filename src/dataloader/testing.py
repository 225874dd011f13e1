"""For the tests of a module of tasks: run one without a server, make a database for a test, work a queue off.

`run_task` is the first choice: it needs no database unless the handler opens `job.transaction()`. What runs is the very
code that a worker runs; only the clockwork around it is left out (no heartbeats, no listener, no web).

    async def test_a_year_is_loaded():
        run = await run_task(tasks, "load.year", {"year": 1999})
        assert run.status == "succeeded"
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final, cast

import attrs
import msgspec
import trio

from dataloader.actors import runner
from dataloader.actors.job_runs import Run
from dataloader.actors.runner import RunServices
from dataloader.actors.to_record import Ended, ToRecord
from dataloader.flows.etl.declare.pipeline_config import PipelineSettings
from dataloader.flows.etl.run.load_metrics import EtlMetrics
from dataloader.jobs.errors import ConfigError
from dataloader.jobs.ids import uuid7
from dataloader.jobs.model import ClaimedJob, NewJob
from dataloader.jobs.outcomes import Outcome
from dataloader.jobs.states import TRANSITIONS, Status
from dataloader.jobs.tasks import Task, Tasks
from dataloader.jobs.telemetry import Telemetry
from dataloader.store.connection.bridge import Database, DatabaseOptions, open_database
from dataloader.store.embedded.postgres import embedded_postgres
from dataloader.store.migrations import migrate
from dataloader.store.queue.enqueue import enqueue
from dataloader.store.queue.finish import aio_finish
from dataloader.store.queue.lock_session import LockSession
from dataloader.store.queue.reads import get_job, list_queues
from dataloader.store.queue.transaction import Transactions

__all__ = ["LogLine", "TaskRun", "run_task", "temporary_database", "work_off"]

_QUEUE: Final = "testing"
_LEASE_S: Final = 3_600
"""Nothing renews leases here: one that outlasts every test."""
_UNSAFE: Final = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}


@attrs.frozen
class LogLine:
    """A line of `job.log`."""

    level: str
    message: str
    fields: dict[str, Any]


@attrs.frozen(kw_only=True)
class TaskRun:
    """How one run ended.

    `status` is what the job's would be: `queued` after a failure with attempts left, `Retry` or `Snooze`, with
    `delay_s` until the next run. `result`, `error` and `progress` (every one that was shown) are as they would be
    stored: as JSON, masked, cut.
    """

    task: str
    status: Status
    result: Any
    error: str | None
    delay_s: float
    progress: list[Any]
    log: list[LogLine]


async def run_task(
    tasks: Tasks, name: str, args: Mapping[str, Any] | None = None, *, attempt: int = 1, dsn: str | None = None
) -> TaskRun:
    """Run the handler of task `name` once, as a worker would, with its timeout and retry policy.

    Args:
        tasks: the registry that has it.
        name: the task.
        args: the job's arguments; they are encoded as JSON and decoded again.
        attempt: the run's number, from 1; without `dsn` only.
        dsn: a migrated database, for handlers that use `job.transaction()`: a real job is enqueued there, and run.

    Raises `KeyError` for a task that is not registered. What the handler raises is the `error`.
    """
    task = tasks[name]
    if dsn is None:
        return await _run(_claimed(task, dict(args or {}), attempt), task, cast("Transactions", _NoTransactions()))
    async with _open_worker(dsn) as worker:
        # A queue of its own: what else waits in the database is not ours to run.
        queue = f"{_QUEUE}.{uuid7()}"
        new = NewJob(queue=queue, task=name, args=dict(args or {}), max_attempts=task.max_attempts)
        await enqueue(worker.database, [new], default_lease_s=_LEASE_S)
        [run] = await worker.work(queue, tasks)
        return run


async def work_off(dsn: str, tasks: Tasks) -> list[TaskRun]:
    """Run every job that is ready in the database at `dsn`, one after the other, and what becomes ready by that.

    What stays: jobs whose time has not come, whose task is not in `tasks`, or whose queue is paused.
    """
    runs: list[TaskRun] = []
    async with _open_worker(dsn) as worker:
        while queues := [q.queue for q in await list_queues(worker.database) if q.ready and not q.paused]:
            for queue in queues:
                runs += await worker.work(queue, tasks)
    return runs


@contextmanager
def temporary_database() -> Iterator[str]:
    """The DSN of a migrated database on a server of its own, which goes with the block; best in a session's fixture.

    Takes a second or two, in which it blocks. Needs the extra `embedded`. The server trades durability for speed.
    """
    with (
        tempfile.TemporaryDirectory(prefix="dataloader-testing-") as directory,
        embedded_postgres(Path(directory), extra_settings=_UNSAFE) as server,
        ThreadPoolExecutor(1) as thread,
    ):
        # In a thread, since the caller may be in a Trio run already.
        thread.submit(trio.run, _migrate, server.dsn).result()
        yield server.dsn


async def _migrate(dsn: str) -> None:
    async with open_database(DatabaseOptions(dsn=dsn)) as database:
        await migrate(database)


@attrs.frozen
class _Worker:
    """Claims from a database and runs what it got."""

    database: Database
    locks: LockSession
    transactions: Transactions

    async def work(self, queue: str, tasks: Tasks) -> list[TaskRun]:
        """Claim one job of `queue`, run it, record its end, free its key."""
        claim = await self.locks.claim(queue, 1, list(tasks), 1.0)
        runs = []
        for job in claim.jobs:
            runs.append(await _run(job, tasks[job.task], self.transactions, self.database))
            self.locks.forget(job.token)
            await self.locks.release()
        return runs


@asynccontextmanager
async def _open_worker(dsn: str) -> AsyncIterator[_Worker]:
    async with open_database(DatabaseOptions(dsn=dsn, name="dataloader testing")) as database:
        locks = LockSession(database, f"testing:{uuid7()}", lost=lambda _tokens: None)
        transactions = Transactions(database)
        try:
            yield _Worker(database, locks, transactions)
        finally:
            transactions.close()
            with trio.move_on_after(5, shield=True):
                await locks.close()


async def _run(job: ClaimedJob, task: Task, transactions: Transactions, database: Database | None = None) -> TaskRun:
    recorder = _Recorder()
    resources: dict[type, Any] = {
        EtlMetrics: EtlMetrics(),
        PipelineSettings: PipelineSettings({"rate_min": 0, "rate_max": 0}),
    }
    if database is not None:
        resources |= {Database: database, Transactions: transactions}
    services = RunServices(
        to_recorder=cast("trio.MemorySendChannel[ToRecord]", recorder),
        transactions=transactions,
        telemetry=Telemetry(),
        max_lines=1_000_000,
        resources=resources,
    )
    run = Run(job=job, lease_until=math.inf, claimed_at=trio.current_time())
    run.open_scope(math.inf)
    await runner.run(run, task, services, trio.CapacityLimiter(1))
    outcome = recorder.outcome
    if outcome is None:  # the handler's own transaction has committed it
        assert database is not None, "there is no transaction without one"  # noqa: S101
        record = await get_job(database, job.job_id)
        return recorder.task_run(task.name, record.status, record.result, record.error)
    status = TRANSITIONS[Status.RUNNING, outcome.step]
    if database is not None:
        finished = await database.write(aio_finish, [outcome], patient=True)
        status = finished.written.get(outcome.token, status)
    result = None if outcome.result is None else msgspec.json.decode(outcome.result)
    return recorder.task_run(task.name, status, result, outcome.error, outcome.delay_s)


class _Recorder:
    """Stands where a run's messages go, and keeps all it was shown, each progress too."""

    def __init__(self) -> None:
        self.outcome: Outcome | None = None
        self._progress: list[Any] = []
        self._lines: list[LogLine] = []

    def send_nowait(self, message: ToRecord) -> None:
        """Take over what the run has for us; it tells again when there is more."""
        run = message.run
        run.to_be_shown = False
        if run.progress is not None:
            self._progress.append(msgspec.json.decode(run.progress))
            run.progress = None
        lines, run.lines = run.lines, []
        for _, text in lines:
            line = msgspec.json.decode(text)
            self._lines.append(LogLine(line["level"], line["message"], line.get("fields", {})))
        if isinstance(message, Ended):
            self.outcome = message.outcome

    def task_run(self, task: str, status: Status, result: Any, error: str | None, delay_s: float = 0.0) -> TaskRun:
        """The run with what was shown."""
        return TaskRun(
            task=task,
            status=status,
            result=result,
            error=error,
            delay_s=delay_s,
            progress=self._progress,
            log=self._lines,
        )


class _NoTransactions:
    """Says what is missing when a handler opens a transaction."""

    def open(self, _success: object, _shield: object) -> Any:
        raise ConfigError(
            "job.transaction() needs a database: give run_task the dsn of one, as of temporary_database()"
        )


def _claimed(task: Task, args: dict[str, Any], attempt: int) -> ClaimedJob:
    new = NewJob(queue=_QUEUE, task=task.name, args=args)
    return ClaimedJob(
        job_id=new.job_id,
        token=1,
        queue=_QUEUE,
        task=new.task,
        args=msgspec.json.encode(args).decode(),
        lock_key=None,
        lock_hash=None,
        partition_key=new.partition_key,
        attempt=attempt,
        max_attempts=task.max_attempts or 5,
        lease_s=_LEASE_S,
    )

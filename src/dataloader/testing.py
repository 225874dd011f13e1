"""Helpers for testing your tasks: run one without a server, create a test database, run all queued jobs.

`run_task` is the first choice: it needs no database unless the handler opens `job.transaction()`. It runs the same code
as a worker, with the registry's resources and wrappers, but without heartbeats, listener and web. `dataloader.pytest`
has fixtures.

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
from msgspec.structs import replace

from dataloader.actors import runner
from dataloader.actors.children.pool import Children
from dataloader.actors.job_runs import Run
from dataloader.actors.lease import Lease
from dataloader.actors.recorder_messages import Ended, ToRecord
from dataloader.actors.run_services import RunServices
from dataloader.actors.signals import Claimed, KnownTasks, Recorded, Signal, Signals
from dataloader.flows.etl.declare.pipeline_config import PipelineSettings
from dataloader.flows.libraries import libraries_of
from dataloader.flows.processes.run_step import StepRun, run_step
from dataloader.jobs.errors import ConfigError, JobNotFound
from dataloader.jobs.ids import uuid7
from dataloader.jobs.listings import MAX_PAGE, JobFilter
from dataloader.jobs.model import DEFAULT_LEASE_S, DEFAULT_MAX_ATTEMPTS, ClaimedJob, JobRecord, NewJob
from dataloader.jobs.new_job import new_job
from dataloader.jobs.outcomes import Outcome
from dataloader.jobs.states import TRANSITIONS, Status
from dataloader.jobs.task import Task
from dataloader.jobs.tasks import Tasks
from dataloader.jobs.telemetry import Telemetry
from dataloader.store.connection.bridge import Database, open_database
from dataloader.store.connection.options import DatabaseOptions
from dataloader.store.embedded.postgres import embedded_postgres
from dataloader.store.migrations import migrate
from dataloader.store.processes.answers import Answers
from dataloader.store.processes.outbox_rows import post
from dataloader.store.queue.enqueue import enqueue
from dataloader.store.queue.enqueuer import Enqueuer
from dataloader.store.queue.finish import aio_finish
from dataloader.store.queue.lock_session import LockSession
from dataloader.store.queue.make_ready import ready_after
from dataloader.store.queue.reads import get_job, list_jobs, list_queues
from dataloader.store.queue.task_rows import aio_declare
from dataloader.store.queue.transaction import Transactions
from dataloader.supervisor.process_tester import ProcessTester, process_tester
from dataloader.supervisor.resources import Opened, open_resources

__all__ = [
    "Claimed",
    "KnownTasks",
    "LogLine",
    "ProcessTester",
    "Recorded",
    "Signal",
    "Signals",
    "StepRun",
    "TaskRun",
    "assert_enqueued",
    "drain_queue",
    "process_tester",
    "run_step",
    "run_task",
    "temporary_database",
]

_QUEUE: Final = "testing"
_LEASE_S: Final = 3_600
"""Lease that outlasts every test, since leases are not renewed here."""
_GRACE_S: Final = 5
_UNSAFE: Final = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}


@attrs.frozen
class LogLine:
    """Line of `job.log`."""

    level: str
    message: str
    fields: dict[str, Any]


@attrs.frozen(kw_only=True)
class TaskRun:
    """Result of one run.

    `status` is the job's: `queued` after a failure with attempts left, `Retry` or `Snooze`, with `delay_s` until the
    next run. `result`, `error` and `progress` (all that were shown) are as stored: as JSON, masked, cut. For a stage
    that moved its job on, `status` is `queued` and `result` the input of the next stage.
    """

    task: str
    status: Status
    result: Any
    error: str | None
    delay_s: float
    progress: list[Any]
    log: list[LogLine]


async def run_task(
    tasks: Tasks,
    task: str | Task[Any],
    args: object = None,
    *,
    attempt: int = 1,
    previous: object = None,
    dsn: str | None = None,
) -> TaskRun:
    """Run the handler of a task once, as a worker does, with its timeout and retry policy.

    Args:
        tasks: the registry that has the task.
        task: the task, or its name.
        args: the job's arguments, a mapping or an instance of the task's own type; they are encoded as JSON and decoded
            again.
        attempt: the run's number, from 1; only without `dsn`.
        previous: for a stage, the return value of the previous stage; only without `dsn`.
        dsn: a migrated database, for handlers that use `job.transaction()`: a real job is enqueued there, and run.

    Raises `KeyError` for a task that is not registered, `BadRequest` for args that do not fit it, and `ConfigError` for
    a resource that cannot be opened. An exception of the handler is the run's `error`.
    """
    task = tasks[_task_name(task)]
    new = new_job(task, cast("Mapping[str, Any] | None", args))
    if dsn is None:
        async with _open_bench(tasks) as bench:
            return await bench.run(replace(_claimed(task, new, attempt), more={"previous": previous}))
    async with _open_worker(dsn, tasks) as worker:
        # A separate queue, so that no other job of the database is run.
        new = attrs.evolve(new, queue=f"{_QUEUE}.{uuid7()}", max_attempts=task.max_attempts)
        await enqueue(worker.bench.database_given, [new], default_lease_s=_LEASE_S)
        [run] = await worker.work(str(new.queue))
        return run


async def drain_queue(dsn: str, tasks: Tasks) -> list[TaskRun]:
    """Run every ready job in the database at `dsn`, one after the other, and jobs that become ready by that.

    Messages of durable processes are delivered, and their events to handlers. Jobs are left that are not due, whose
    task is not in `tasks`, or whose queue is paused.
    """
    runs: list[TaskRun] = []
    async with _open_worker(dsn, tasks) as worker:
        database = worker.bench.database_given
        while new := [run for queue in await _ready_queues(database) for run in await worker.work(queue)]:
            runs += new
    return runs


async def _ready_queues(database: Database) -> list[str]:
    await post(database, DEFAULT_LEASE_S)
    while (await ready_after(database)).jobs:
        pass
    return [q.queue for q in await list_queues(database) if q.ready and not q.paused]


async def assert_enqueued(
    dsn: str, task: str | Task[Any], args: object = None, *, queue: str | None = None, times: int = 1
) -> list[JobRecord]:
    """Return the jobs of `task` that were added to the database at `dsn`, newest first, in any status.

    Args:
        dsn: a migrated database.
        task: the task, or its name.
        args: fields that their arguments must have with these values; they may have others. With the task itself also
            an instance of its own type.
        queue: the queue in which they must be.
        times: their expected number, of the newest 1,000.

    Raises `AssertionError`, with the existing jobs of that task, if their number is different.
    """
    name = _task_name(task)
    wanted = _fields_of_args(task, args)
    async with open_database(DatabaseOptions(dsn=dsn, name="dataloader testing")) as database:
        jobs = (await list_jobs(database, JobFilter(task=name), limit=MAX_PAGE, after=None)).jobs
    found = [
        job
        for job in jobs
        if (queue is None or job.queue == queue) and {name: job.args.get(name) for name in wanted} == wanted
    ]
    if len(found) != times:
        asked = f"{times} of {name!r}" + (f" in {queue!r}" if queue else "") + (f" with {wanted}" if wanted else "")
        there = "; ".join(f"{job.args} in {job.queue!r}" for job in jobs[:10]) or "none"
        raise AssertionError(f"jobs enqueued: {len(found)}, expected {asked}; jobs of the task: {there}")
    return found


def _task_name(task: str | Task[Any]) -> str:
    return task.name if isinstance(task, Task) else task


def _fields_of_args(task: str | Task[Any], args: object) -> dict[str, Any]:
    """Return the fields of `args`; for a dictionary only its own entries, without defaults."""
    if args is None or isinstance(args, Mapping):
        return dict(args or {})
    return new_job(task, cast("Mapping[str, Any]", args)).args


@contextmanager
def temporary_database(tasks: Tasks | None = None) -> Iterator[str]:
    """Yield the DSN of a migrated database on a dedicated server, which ends with the block; use a session fixture.

    It has the queues, lock keys and other defaults of `tasks`, as if a process with them had been started. Blocks for
    one or two seconds. Needs the extra `embedded`. The server trades durability for speed.
    """
    with (
        tempfile.TemporaryDirectory(prefix="dataloader-testing-") as directory,
        embedded_postgres(Path(directory), extra_settings=_UNSAFE) as server,
        ThreadPoolExecutor(1) as thread,
    ):
        # In a thread, since the caller may already be in a Trio run.
        thread.submit(trio.run, _prepare_database, server.dsn, tasks).result()
        yield server.dsn


async def _prepare_database(dsn: str, tasks: Tasks | None) -> None:
    async with open_database(DatabaseOptions(dsn=dsn)) as database:
        await migrate(database)
        if tasks is not None:
            await database.run(aio_declare, tasks.values(), "testing")


@attrs.frozen(kw_only=True)
class _Bench:
    """Runs claimed jobs with the same parts as a process."""

    tasks: Tasks
    opened: Opened
    transactions: Transactions
    database: Database | None
    children: Children

    @property
    def database_given(self) -> Database:
        """Database, for callers that have one."""
        assert self.database is not None  # noqa: S101
        return self.database

    async def run(self, job: ClaimedJob) -> TaskRun:
        """Run one job to its end, and record its outcome if there is a database."""
        task, recorder = self.tasks[job.task], _Recorder()
        run = Run(job=job, lease=Lease(job.lease_s, math.inf), claimed_at=trio.current_time())
        await runner.run_claimed(run, task, self._services(recorder), trio.CapacityLimiter(1))
        outcome = recorder.outcome
        if outcome is None:  # the handler's own transaction has committed it
            try:
                record = await get_job(self.database_given, job.job_id)
            except JobNotFound:  # for example the wake-up job of a durable process, if there is nothing left to do
                return recorder.task_run(task.name, Status.SUCCEEDED, None, None)
            return recorder.task_run(task.name, record.status, record.result, record.error)
        status = TRANSITIONS[Status.RUNNING, outcome.step]
        if self.database is not None:
            finished = await self.database.write(aio_finish, [outcome], patient=True)
            status = finished.written.get(outcome.token, status)
        text = outcome.result if outcome.to is None else outcome.previous
        result = None if text is None else msgspec.json.decode(text)
        return recorder.task_run(task.name, status, result, outcome.error, outcome.delay_s)

    def _services(self, recorder: _Recorder) -> RunServices:
        resources: dict[object, Any] = {
            **libraries_of(PipelineSettings({"rate_min": 0, "rate_max": 0})).resources,
            **self.opened.resources,
        }
        if self.database is not None:
            resources |= {
                Database: self.database,
                Transactions: self.transactions,
                Answers: Answers(self.database),
            }
        return RunServices(
            to_recorder=cast("trio.MemorySendChannel[ToRecord]", recorder),
            transactions=self.transactions,
            enqueuer=cast("Enqueuer", _NoDatabase()) if self.database is None else Enqueuer(self.database),
            telemetry=Telemetry(),
            max_lines=1_000_000,
            resources=resources,
            around=self.tasks.wraps,
            aio=self.opened.aio,
            children=self.children,
        )


@asynccontextmanager
async def _open_bench(tasks: Tasks, database: Database | None = None) -> AsyncIterator[_Bench]:
    transactions = cast("Transactions", _NoDatabase()) if database is None else Transactions(database)
    children = Children(tasks=tasks, grace_s=_GRACE_S, idle_s=_LEASE_S, telemetry=Telemetry())
    async with open_resources(tasks, until=trio.Event()) as opened:
        try:
            yield _Bench(tasks=tasks, opened=opened, transactions=transactions, database=database, children=children)
        finally:
            await children.close()  # noqa: ASYNC102 - it has its own shields and deadlines
            transactions.close()


@attrs.frozen
class _Worker:
    """Claims jobs from a database and runs them."""

    bench: _Bench
    locks: LockSession

    async def work(self, queue: str) -> list[TaskRun]:
        """Claim one job of `queue`, run it, record its outcome, and free its key."""
        claim = await self.locks.claim(queue, 1, list(self.bench.tasks), 1.0)
        runs = []
        for job in claim.jobs:
            runs.append(await self.bench.run(job))
            self.locks.forget(job.token)
            await self.locks.release()
        return runs


@asynccontextmanager
async def _open_worker(dsn: str, tasks: Tasks) -> AsyncIterator[_Worker]:
    async with open_database(DatabaseOptions(dsn=dsn, name="dataloader testing")) as database:
        locks = LockSession(database, f"testing:{uuid7()}", lost=lambda _tokens: None)
        try:
            await database.run(aio_declare, tasks.values(), "testing")
            async with _open_bench(tasks, database) as bench:
                yield _Worker(bench, locks)
        finally:
            with trio.move_on_after(5, shield=True):
                await locks.close()


class _Recorder:
    """Replaces the recorder: receives a run's messages, and keeps everything, including each progress."""

    def __init__(self) -> None:
        self.outcome: Outcome | None = None
        self._progress: list[Any] = []
        self._lines: list[LogLine] = []

    def send_nowait(self, message: ToRecord) -> None:
        """Take the run's output. The run sends a message again when there is more."""
        run = message.run
        run.outbox.is_told = False
        if (progress := run.outbox.take_progress()) is not None:
            self._progress.append(msgspec.json.decode(progress))
        for _, text in run.outbox.take_lines():
            line = msgspec.json.decode(text)
            self._lines.append(LogLine(line["level"], line["message"], line.get("fields", {})))
        if isinstance(message, Ended):
            self.outcome = message.outcome

    def task_run(self, task: str, status: Status, result: Any, error: str | None, delay_s: float = 0.0) -> TaskRun:
        """Return the run with everything that was recorded."""
        return TaskRun(
            task=task,
            status=status,
            result=result,
            error=error,
            delay_s=delay_s,
            progress=self._progress,
            log=self._lines,
        )


class _NoDatabase:
    """Raises an error that says what is missing if a handler opens a transaction, or enqueues a job."""

    def open(self, _success: object, _shield: object) -> Any:
        raise _needs_database("job.transaction()")

    async def enqueue(self, _jobs: object) -> Any:
        raise _needs_database("job.enqueue()")

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


def _needs_database(what: str) -> ConfigError:
    return ConfigError(f"{what} needs a database; pass its dsn to run_task, such as that of temporary_database()")


def _claimed(task: Task[Any], new: NewJob, attempt: int) -> ClaimedJob:
    return ClaimedJob(
        job_id=new.job_id,
        token=1,
        queue=_QUEUE,
        task=new.task,
        args=msgspec.json.encode(new.args).decode(),
        lock_key=None,
        lock_hash=None,
        partition_key=new.partition_key,
        attempt=attempt,
        max_attempts=task.max_attempts or DEFAULT_MAX_ATTEMPTS,
        lease_s=_LEASE_S,
    )

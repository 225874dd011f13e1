"""Handles of a job: what a handler can read and do.

`Job` is for async functions on Trio, `AioJob` for those on asyncio, `ThreadJob` for plain functions, which run in a
thread. `ProcessJob` and `AioProcessJob` are for functions that run in a separate process.

They have the same names; async functions await the methods that wait. Each handle calls a port of its flavor, which the
runner creates. So the domain needs no event loop, and `dataloader.testing` can give a handler a real job.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from datetime import datetime
from functools import partial
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar, Unpack, overload
from uuid import UUID

import attrs

from dataloader.jobs.handler_calls import EnqueueJob, HandlerCall, ReadAfter, TakeUnits
from dataloader.jobs.limits import Supplier
from dataloader.jobs.model import AfterResult, Enqueued, JobOptions, NewJob
from dataloader.jobs.new_job import new_job
from dataloader.jobs.outcomes import StopReason
from dataloader.jobs.task import A, Task

B = TypeVar("B")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Transaction(Protocol):
    """Transaction on the queue's database that ends with the job's success (Q12). SQL is PostgreSQL's, `$1` style.

    When the block ends, the value of `result` becomes the job's result. In a stage it moves the job on as a returned
    value would, including `Next` and `Finish`.
    """

    result: object

    async def execute(self, sql: str, *args: object) -> str:
        """Run one statement and return the command's tag, such as `INSERT 0 3`."""

    async def executemany(self, sql: str, rows: list[tuple[object, ...]]) -> None:
        """Run one statement for each row of arguments."""

    async def fetch(self, sql: str, *args: object) -> list[dict[str, Any]]:
        """Run one query and return its rows as dictionaries."""

    async def copy(self, table: str, columns: list[str], rows: list[tuple[object, ...]]) -> int:
        """Copy rows into `table` with a binary COPY and return their number."""

    async def enqueue(
        self, task: str | Task[B], args: B | Mapping[str, Any] | None = None, **options: Unpack[JobOptions]
    ) -> Enqueued:
        """Add a job as `Jobs.enqueue` does, in this transaction: its commit adds the job, a rollback does not."""

    async def enqueue_many(self, jobs: Sequence[NewJob]) -> list[Enqueued]:
        """Add jobs, all or none, in this transaction: its commit adds them, a rollback does not."""

    @property
    def enqueued(self) -> tuple[UUID, ...]:
        """IDs of the jobs that were enqueued in this transaction, in order; for `after=`."""


class ThreadTransaction(Protocol):
    """`Transaction` for plain functions: its methods block the thread and return the same values as `Transaction`'s."""

    result: object

    def execute(self, sql: str, *args: object) -> str:
        """Run one statement and return the command's tag, such as `INSERT 0 3`."""

    def executemany(self, sql: str, rows: list[tuple[object, ...]]) -> None:
        """Run one statement for each row of arguments."""

    def fetch(self, sql: str, *args: object) -> list[dict[str, Any]]:
        """Run one query and return its rows as dictionaries."""

    def copy(self, table: str, columns: list[str], rows: list[tuple[object, ...]]) -> int:
        """Copy rows into `table` with a binary COPY and return their number."""

    def enqueue(
        self, task: str | Task[B], args: B | Mapping[str, Any] | None = None, **options: Unpack[JobOptions]
    ) -> Enqueued:
        """Add a job: see `Transaction`."""

    def enqueue_many(self, jobs: Sequence[NewJob]) -> list[Enqueued]:
        """Add jobs, all or none: see `Transaction`."""

    @property
    def enqueued(self) -> tuple[UUID, ...]:
        """IDs of the jobs that were enqueued in this transaction, in order; for `after=`."""


class Ending(Protocol):
    """End of a run that a library writes. `written` says whether it was written; if not, the run continues.

    If the lease ends first, `later` writes it after the handler's end, once the database answers, unless it is void by
    then.
    """

    written: bool
    later: Callable[[], Awaitable[object]] | None


class DeclaredResource(Protocol[T_co]):
    """Result of `@tasks.resource`."""

    @property
    def function(self) -> Callable[[], AbstractAsyncContextManager[T_co]]:
        """Decorated function."""


class Port(Protocol):
    """Runner's interface for all handles. No method waits for anything outside the process."""

    def progress(self, progress: Mapping[str, Any]) -> None:
        """Keep `progress` for the next write."""

    def log(self, level: str, message: str, fields: Mapping[str, Any], load: str | None = None) -> None:
        """Keep a log line of the job, or of one of its loads, for the next write."""

    def end_log(self, load: str) -> None:
        """Log how many lines of an ended load were not kept."""

    def deadline(self) -> float:
        """Return the time at which the run is stopped unless its lease is renewed, by `trio.current_time()`."""

    def stopped_by(self) -> StopReason | None:
        """Return the reason why the run was stopped, or None while it continues."""

    def keep(self, result: object) -> None:
        """Store `result` as the job's, unless the handler returns another."""

    def resource(self, kind: Callable[..., Any]) -> Any:
        """Return the process's resource of this kind."""


class AsyncPort(Port, Protocol):
    """Port of an async handle: for Trio behind `Job`, for asyncio behind the others."""

    async def checkpoint(self) -> None:
        """Let other tasks run. Raises the flavor's cancellation if the run was stopped."""

    async def ask(self, call: HandlerCall[T]) -> T:
        """Return the answer to a call, or raise its error."""


class AsyncWorkerPort(AsyncPort, Protocol):
    """Port of an async handle in the worker's own process."""

    def transaction(self) -> AbstractAsyncContextManager[Transaction]:
        """Open a transaction that ends with the job's success."""

    def ending(self) -> AbstractAsyncContextManager[Ending]:
        """Let a library write the run's end in the block, which is shielded until the handler must have ended."""


class BlockingPort(Port, Protocol):
    """Port of a plain function's handle."""

    def checkpoint(self) -> None:
        """Raise an exception that ends the function if the run was stopped."""

    def ask(self, call: HandlerCall[T]) -> T:
        """Return the answer to a call, or raise its error."""


class ThreadPort(BlockingPort, Protocol):
    """Port of a thread's handle."""

    def transaction(self) -> AbstractContextManager[ThreadTransaction]:
        """Open a transaction that ends with the job's success."""


@attrs.frozen(eq=False)
class JobLog:
    """Writes log lines, which are kept with the job as events of kind `log`.

    `DL_LOG_LINES_PER_JOB` lines are kept for a run, and as many for each load with a separate log (`Job.log_of`).
    """

    _write: Callable[[str, str, Mapping[str, Any]], None]

    def info(self, message: str, **fields: object) -> None:
        """Log an event of the run."""
        self._write("info", message, fields)

    def warning(self, message: str, **fields: object) -> None:
        """Log an event that a reader should know but need not act on."""
        self._write("warning", message, fields)

    def error(self, message: str, **fields: object) -> None:
        """Log an error; the job continues."""
        self._write("error", message, fields)


@attrs.frozen(eq=False, kw_only=True)
class _Handle(Generic[A]):
    """Common part of all handles: the job as it was claimed, and the methods that do not wait."""

    job_id: UUID
    """ID of the job, the same in each attempt."""
    queue: str
    """Queue from which the job was claimed."""
    task: str
    """Name of the task."""
    args: A
    """Arguments of the job: a dictionary, or an instance of the task's `args=` class."""
    lock_key: str | None
    """Key of which one job runs at a time; None for a job without a key."""
    partition_key: str
    """Text from the requester. It does not limit concurrency by itself."""
    attempt: int
    """Number of this run, 1 for the first."""
    max_attempts: int
    """Number of the last possible run."""
    schedule: str | None = None
    """Schedule that added the job, if any."""
    planned_at: datetime | None = None
    """Time that the schedule had planned, also for a late or caught-up run."""
    previous: Any = None
    """Return value of the previous stage. None at a job's first stage, and for a task that is not a stage."""
    version: float | None = None
    """Version of the request that added or updated the job, in seconds since 1970, or None."""
    _port: Any

    @property
    def deadline(self) -> float:
        """Time at which this run is stopped unless its lease is renewed, in seconds by `trio.current_time()`.

        Each heartbeat moves it, up to the task's timeout.
        """
        return self._facts.deadline()

    @property
    def stopped_by(self) -> StopReason | None:
        """Reason why this run was stopped, or None while it continues; for cleanup that depends on it."""
        return self._facts.stopped_by()

    @property
    def log(self) -> JobLog:
        """Log of the job."""
        return JobLog(self._facts.log)

    def log_of(self, load: str) -> JobLog:
        """Return the log of one of the job's loads. Its lines have the field `load`, and are counted separately."""
        return JobLog(partial(self._facts.log, load=load))

    def end_log_of(self, load: str) -> None:
        """End a load's log. If more lines were logged than are kept, its last line says how many are not."""
        self._facts.end_log(load)

    def progress_nowait(self, progress: Mapping[str, Any]) -> None:
        """Show progress as `progress` does, but without a checkpoint; for the cleanup of a run that was stopped."""
        self._facts.progress(progress)

    def keep(self, result: object) -> None:
        """Store `result` as the job's, even if this run fails or is stopped. A returned value replaces it."""
        self._facts.keep(result)

    @overload
    def resource(self, kind: DeclaredResource[T]) -> T: ...

    @overload
    def resource(self, kind: Callable[..., T]) -> T: ...

    def resource(self, kind: Any) -> Any:
        """Return the process's resource of this kind.

        Args:
            kind: the class that a `@tasks.resource` yields, or the decorated function itself.

        Raises `LookupError` if the process has none.
        """
        return self._facts.resource(kind)

    def _new_job(self, task: str | Task[B], args: B | Mapping[str, Any] | None, options: JobOptions) -> NewJob:
        """Return the request for a job, with this one as its root unless the options name another."""
        return new_job(task, args, **({"root": self.job_id} | options))

    @property
    def _facts(self) -> Port:
        port: Port = self._port
        return port


HANDLE_FIELDS: Final = tuple(field.name for field in attrs.fields(_Handle) if field.name != "_port")
"""Fields of a job that handlers see."""


@attrs.frozen(eq=False, kw_only=True)
class _AsyncHandle(_Handle[A]):
    """Waiting methods of both async flavors."""

    _port: AsyncPort

    async def progress(self, progress: Mapping[str, Any]) -> None:
        """Show `progress`, a JSON object, with the job. It is written at most once a second, the last one always.

        This is a checkpoint: it raises the flavor's cancellation if the job was stopped.
        """
        self._port.progress(progress)
        await self._port.checkpoint()

    async def checkpoint(self) -> None:
        """Let other tasks run, and stop here if the job was canceled, timed out, lost its lease or is drained."""
        await self._port.checkpoint()

    async def after(self) -> dict[UUID, AfterResult]:
        """Return the outcomes of the jobs that this one runs after (`after=`), by ID. Each call reads the database.

        Raises `StoreUnavailable` if the database cannot be read now, `LookupError` if there is no database.
        """
        return await self._port.ask(ReadAfter())

    async def take(self, supplier: str | Supplier, n: int = 1, *, max_wait_s: float = 60.0) -> None:
        """Wait until a supplier takes `n` more requests, and count them. Call it right before they are sent.

        For handlers that send several: the start of a run takes the task's `cost`, which may be 0.

        Args:
            supplier: the supplier, or its name.
            n: the number of requests.
            max_wait_s: maximum wait in seconds. If it takes longer, the job continues later: see `LimitReached`.

        Raises:
            LimitReached: it will take longer. Do not catch it, and the job is snoozed for that time.
            BadRequest: no supplier has this name, or `n` is more than its smallest rate limit.
            StoreUnavailable: the database cannot be reached now.
        """
        await self._port.ask(TakeUnits(_name_of(supplier), n, max_wait_s))

    async def enqueue(
        self, task: str | Task[B], args: B | Mapping[str, Any] | None = None, **options: Unpack[JobOptions]
    ) -> Enqueued:
        """Add a job immediately, even if this run fails later.

        To add it with the job's success use `job.transaction()`. Takes the arguments and raises the errors of
        `Jobs.enqueue`. A repeated run adds the job again, unless an `idempotency_key` identifies it.
        """
        return await self._port.ask(EnqueueJob(self._new_job(task, args, options)))


@attrs.frozen(eq=False, kw_only=True)
class _AsyncWorkerHandle(_AsyncHandle[A]):
    """Methods of handlers in the worker's own process."""

    _port: AsyncWorkerPort

    def transaction(self) -> AbstractAsyncContextManager[Transaction]:
        """Open a transaction in which the handler's own rows and the job's success commit together (Q12).

        When the block ends without an error, the job is `succeeded` with the transaction's `result`, and nothing that
        the handler does later can change that. If it raises, nothing is written, and another transaction may be opened.

        Raises `LeaseLost` at the end of the block if this worker has lost the job, and `RuntimeError` at its beginning
        while another transaction is open, or after one that has committed.
        """
        return self._port.transaction()


@attrs.frozen(eq=False, kw_only=True)
class Job(_AsyncWorkerHandle[A]):
    """Handle of a handler on Trio. Its async methods raise `trio.Cancelled` if the job was stopped."""


@attrs.frozen(eq=False, kw_only=True)
class AioJob(_AsyncWorkerHandle[A]):
    """Handle of a handler on asyncio (`asyncio=True`).

    Its async methods raise `asyncio.CancelledError` if the job was stopped. Call them from the handler's own tasks.
    """


@attrs.frozen(eq=False, kw_only=True)
class _BlockingHandle(_Handle[A]):
    """Blocking methods of plain functions, in a thread or in a separate process."""

    _port: BlockingPort

    def progress(self, progress: Mapping[str, Any]) -> None:
        """Show `progress`, a JSON object, with the job, and stop here if the job was stopped.

        It is written at most once a second, the last one always.
        """
        self._port.progress(progress)
        self._port.checkpoint()

    def checkpoint(self) -> None:
        """Stop here if the job was canceled, timed out, lost its lease or is drained."""
        self._port.checkpoint()

    def after(self) -> dict[UUID, AfterResult]:
        """Return the outcomes of the jobs that this one runs after, by ID: see `Job`."""
        return self._port.ask(ReadAfter())

    def take(self, supplier: str | Supplier, n: int = 1, *, max_wait_s: float = 60.0) -> None:
        """Wait until a supplier takes `n` more requests, and count them: see `Job`."""
        self._port.ask(TakeUnits(_name_of(supplier), n, max_wait_s))

    def enqueue(
        self, task: str | Task[B], args: B | Mapping[str, Any] | None = None, **options: Unpack[JobOptions]
    ) -> Enqueued:
        """Add a job immediately, even if this run fails later: see `Job`."""
        return self._port.ask(EnqueueJob(self._new_job(task, args, options)))


@attrs.frozen(eq=False, kw_only=True)
class ThreadJob(_BlockingHandle[A]):
    """Handle of a plain function in a thread, which cannot be cancelled: call `checkpoint` between chunks.

    Its methods block the thread and raise `trio.Cancelled` if the job was stopped. Call them from the handler's own
    thread.
    """

    _port: ThreadPort

    def transaction(self) -> AbstractContextManager[ThreadTransaction]:
        """Open a transaction in which the handler's own rows and the job's success commit together: see `Job`."""
        return self._port.transaction()


@attrs.frozen(eq=False, kw_only=True)
class ProcessJob(_BlockingHandle[A]):
    """Handle of a plain function in a separate process (`process=True`).

    If the job is stopped, `JobStopped` is raised anywhere in the function, and after a grace period the process is
    killed. `deadline` is by `time.monotonic()`. There is no transaction, and `resource` has nothing: open resources in
    the function's module. Methods that need an answer of the service raise the same errors as those of a `Job`.
    """


@attrs.frozen(eq=False, kw_only=True)
class AioProcessJob(_AsyncHandle[A]):
    """Handle of an asyncio function in a separate process (`process=True, asyncio=True`): see `ProcessJob`.

    If the job is stopped, the function's task is cancelled.
    """


def _name_of(supplier: str | Supplier) -> str:
    return supplier if isinstance(supplier, str) else supplier.name


AnyJob: TypeAlias = Job[Any] | AioJob[Any] | ThreadJob[Any] | ProcessJob[Any] | AioProcessJob[Any]
"""Handle of a job, of any flavor: the argument of `@tasks.around`."""


def port_of(job: Job[Any]) -> AsyncWorkerPort:
    """Return the port of a Trio handler's job, for libraries on top of the queue that write a run's end themselves."""
    port: AsyncWorkerPort = job._port  # noqa: SLF001
    return port

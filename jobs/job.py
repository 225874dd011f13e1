"""The handles of a job: what a handler can read and do.

`Job` is for Trio's async functions, `AioJob` for asyncio's, `ThreadJob` for plain functions, which run in a thread;
`ProcessJob` and `AioProcessJob` are for functions that run in a process of their own.
They have the same names; methods that wait are awaited by async functions. Each calls a port of its flavour,
which the runner makes; so the domain needs no event loop, and `dataloader.testing` can hand a handler a real job.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from datetime import datetime
from functools import partial
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, Unpack, overload
from uuid import UUID

import attrs

from dataloader.jobs.limits import Supplier
from dataloader.jobs.model import AfterResult, Enqueued, JobOptions, NewJob
from dataloader.jobs.outcomes import StopReason
from dataloader.jobs.task import A, Task

B = TypeVar("B")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Transaction(Protocol):
    """A transaction on the queue's database that ends with the job's success (Q12). SQL is PostgreSQL's, `$1` style.

    What stands in `result` when the block ends becomes the job's result. In a stage it moves the job on as a returned
    value would, `Next` and `Finish` included.
    """

    result: object

    async def execute(self, sql: str, *args: object) -> str:
        """Run one statement; return the command's tag, such as `INSERT 0 3`."""

    async def executemany(self, sql: str, rows: list[tuple[object, ...]]) -> None:
        """Run one statement for each row of arguments."""

    async def fetch(self, sql: str, *args: object) -> list[dict[str, Any]]:
        """Run one query; return its rows as dictionaries."""

    async def copy(self, table: str, columns: list[str], rows: list[tuple[object, ...]]) -> int:
        """COPY rows into `table` in binary form; return their number."""

    async def enqueue(
        self, task: str | Task[B], args: B | Mapping[str, Any] | None = None, **options: Unpack[JobOptions]
    ) -> Enqueued:
        """Add a job as `Jobs.enqueue` does, in this transaction: its commit adds the job, a rollback does not."""

    async def enqueue_many(self, jobs: Sequence[NewJob]) -> list[Enqueued]:
        """Add jobs, all or none, in this transaction: its commit adds them, a rollback does not."""

    @property
    def enqueued(self) -> tuple[UUID, ...]:
        """The ids of the jobs that have been enqueued in it, in order; for `after=`."""


class ThreadTransaction(Protocol):
    """A `Transaction` as a plain function uses it: its methods block the thread and return what `Transaction`'s do."""

    result: object

    def execute(self, sql: str, *args: object) -> str:
        """Run one statement; return the command's tag, such as `INSERT 0 3`."""

    def executemany(self, sql: str, rows: list[tuple[object, ...]]) -> None:
        """Run one statement for each row of arguments."""

    def fetch(self, sql: str, *args: object) -> list[dict[str, Any]]:
        """Run one query; return its rows as dictionaries."""

    def copy(self, table: str, columns: list[str], rows: list[tuple[object, ...]]) -> int:
        """COPY rows into `table` in binary form; return their number."""

    def enqueue(
        self, task: str | Task[B], args: B | Mapping[str, Any] | None = None, **options: Unpack[JobOptions]
    ) -> Enqueued:
        """Add a job: see `Transaction`."""

    def enqueue_many(self, jobs: Sequence[NewJob]) -> list[Enqueued]:
        """Add jobs, all or none: see `Transaction`."""

    @property
    def enqueued(self) -> tuple[UUID, ...]:
        """The ids of the jobs that have been enqueued in it, in order; for `after=`."""


class Ending(Protocol):
    """The end of a run that a library writes. `written` says whether that was the end: else the run continues.

    If the lease ends first, `later` writes it after the body's end, once the database answers; void by then or not.
    """

    written: bool
    later: Callable[[], Awaitable[object]] | None


class Declared(Protocol[T_co]):
    """What `@tasks.resource` makes of the decorated function."""

    @property
    def function(self) -> Callable[[], AbstractAsyncContextManager[T_co]]:
        """The decorated function."""


class Port(Protocol):
    """What every handle needs of the runner; nothing here waits for anything outside of the process."""

    def progress(self, progress: Mapping[str, Any]) -> None:
        """Keep `progress` for the next write."""

    def log(self, level: str, message: str, fields: Mapping[str, Any], load: str | None = None) -> None:
        """Keep a log line, of one of the job's loads or of the job itself, for the next write."""

    def end_log(self, load: str) -> None:
        """Keep how many lines of a load that has ended were not kept."""

    def deadline(self) -> float:
        """When the run is stopped unless its lease is renewed, by `trio.current_time()`."""

    def stopped_by(self) -> StopReason | None:
        """Why the run was stopped, None while it goes on."""

    def keep(self, result: object) -> None:
        """Store `result` as the job's, unless the handler returns another."""

    def resource(self, kind: Callable[..., Any]) -> Any:
        """Return the process's resource of this kind."""


class AsyncPort(Port, Protocol):
    """The port of an async handle: Trio-flavoured behind `Job`, asyncio-flavoured behind the others."""

    async def checkpoint(self) -> None:
        """Let others run; raises the flavour's cancellation if the run was stopped."""

    async def after(self) -> dict[UUID, AfterResult]:
        """Return the outcomes of the jobs that this one runs after."""

    async def take(self, supplier: str, units: int, max_wait_s: float) -> None:
        """Wait for units of a supplier's rate limits, and take them."""

    async def enqueue(self, task: str | Task[B], args: B | Mapping[str, Any] | None, options: JobOptions) -> Enqueued:
        """Add a job."""


class AsyncWorkerPort(AsyncPort, Protocol):
    """The port of an async handle in the worker's own process."""

    def transaction(self) -> AbstractAsyncContextManager[Transaction]:
        """A transaction that ends with the job's success."""

    def ending(self) -> AbstractAsyncContextManager[Ending]:
        """For a library that writes the run's end itself, in the block: shielded until the body must have ended."""


class BlockingPort(Port, Protocol):
    """The port of a plain function's handle."""

    def checkpoint(self) -> None:
        """Raise what ends the function if the run was stopped."""

    def after(self) -> dict[UUID, AfterResult]:
        """Return the outcomes of the jobs that this one runs after."""

    def take(self, supplier: str, units: int, max_wait_s: float) -> None:
        """Wait for units of a supplier's rate limits, and take them."""

    def enqueue(self, task: str | Task[B], args: B | Mapping[str, Any] | None, options: JobOptions) -> Enqueued:
        """Add a job."""


class ThreadPort(BlockingPort, Protocol):
    """The port of a thread's handle."""

    def transaction(self) -> AbstractContextManager[ThreadTransaction]:
        """A transaction that ends with the job's success."""


@attrs.frozen(eq=False)
class JobLog:
    """Writes log lines, which are kept with the job as events of kind `log`.

    Of one run `DL_LOG_LINES_PER_JOB` lines are kept, and as many of each load that has a log of its own (`Job.log_of`).
    """

    _write: Callable[[str, str, Mapping[str, Any]], None]

    def info(self, message: str, **fields: object) -> None:
        """Log an event of the run."""
        self._write("info", message, fields)

    def warning(self, message: str, **fields: object) -> None:
        """Log an event that a reader should know but need not act on."""
        self._write("warning", message, fields)

    def error(self, message: str, **fields: object) -> None:
        """Log an error while the job goes on."""
        self._write("error", message, fields)


@attrs.frozen(eq=False, kw_only=True)
class _Handle(Generic[A]):
    """What all handles have in common: the job as it was claimed, and what needs no waiting."""

    job_id: UUID
    """The job's id, the same in each attempt."""
    queue: str
    """The queue from which it was claimed."""
    task: str
    """The task's name."""
    args: A
    """Its arguments: a dictionary, or what the task's `args=` names."""
    lock_key: str | None
    """Of all jobs with this key one runs at a time; None for a job without a key."""
    partition_key: str
    """A text that the requester gave; it excludes nothing."""
    attempt: int
    """This run's number, 1 for the first."""
    max_attempts: int
    """The number of the last run, unless one succeeds before."""
    schedule: str | None = None
    """The schedule that it is of."""
    planned_at: datetime | None = None
    """The time that its schedule had planned; a run that is late, or made up for, has it too."""
    previous: Any = None
    """What the stage before has returned; None at a job's first stage, and for a task that is no stage."""
    version: float | None = None
    """The version of the request that it is made or was updated by, an instant in seconds since 1970; None without."""
    _port: Any

    @property
    def deadline(self) -> float:
        """When this run is stopped unless its lease is renewed, in seconds by `trio.current_time()`.

        Each heartbeat moves it, up to the task's timeout.
        """
        return self._facts.deadline()

    @property
    def stopped_by(self) -> StopReason | None:
        """Why this run was stopped, None while it goes on: for clean-up that depends on it."""
        return self._facts.stopped_by()

    @property
    def log(self) -> JobLog:
        """The job's own log."""
        return JobLog(self._facts.log)

    def log_of(self, load: str) -> JobLog:
        """The log of one of the job's loads: its lines have the field `load`, and are counted by themselves."""
        return JobLog(partial(self._facts.log, load=load))

    def end_log_of(self, load: str) -> None:
        """A load has ended: if it has logged more lines than are kept, its last one says how many are not."""
        self._facts.end_log(load)

    def progress_nowait(self, progress: Mapping[str, Any]) -> None:
        """Like `progress`, but without a checkpoint: for the cleanup of a run that was stopped."""
        self._facts.progress(progress)

    def keep(self, result: object) -> None:
        """Store `result` as the job's, even if this run fails or is stopped; a returned value replaces it."""
        self._facts.keep(result)

    @overload
    def resource(self, kind: Declared[T]) -> T: ...

    @overload
    def resource(self, kind: Callable[..., T]) -> T: ...

    def resource(self, kind: Any) -> Any:
        """Return the process's resource of this kind.

        Args:
            kind: the class of what a `@tasks.resource` yields, or the decorated function itself.

        Raises `LookupError` if the process has none.
        """
        return self._facts.resource(kind)

    @property
    def _facts(self) -> Port:
        port: Port = self._port
        return port


@attrs.frozen(eq=False, kw_only=True)
class _AsyncHandle(_Handle[A]):
    """What waits, for both async flavours."""

    _port: AsyncPort

    async def progress(self, progress: Mapping[str, Any]) -> None:
        """Show `progress`, a JSON object, with the job; written at most once a second, the last one always.

        A checkpoint: it raises the flavour's cancellation if the job was stopped.
        """
        self._port.progress(progress)
        await self._port.checkpoint()

    async def checkpoint(self) -> None:
        """Let others run, and stop here if the job was canceled, timed out, lost its lease or is drained."""
        await self._port.checkpoint()

    async def after(self) -> dict[UUID, AfterResult]:
        """Return the outcomes of the jobs that this one runs after (`after=`), by id; each call reads the database.

        Raises `StoreUnavailable` when the database can't be read now, `LookupError` if there is no database.
        """
        return await self._port.after()

    async def take(self, supplier: str | Supplier, n: int = 1, *, max_wait_s: float = 60.0) -> None:
        """Wait until a supplier takes `n` more requests, and count them: to be called right before they are sent.

        For handlers that send several: the start of a run takes the task's `cost`, which may be 0.

        Args:
            supplier: the supplier, or its name.
            n: how many requests.
            max_wait_s: for how many seconds to wait. If it takes longer, the job goes on later: see `LimitReached`.

        Raises:
            LimitReached: it will take longer; not to be caught, then the job is snoozed for so long.
            BadRequest: no supplier has this name, or `n` is more than its smallest rate limit.
            StoreUnavailable: the database can't be reached now.
        """
        await self._port.take(supplier if isinstance(supplier, str) else supplier.name, n, max_wait_s)

    async def enqueue(
        self, task: str | Task[B], args: B | Mapping[str, Any] | None = None, **options: Unpack[JobOptions]
    ) -> Enqueued:
        """Add a job at once, even if this run fails later; to add it with the job's success use `job.transaction()`.

        Arguments and errors are those of `Jobs.enqueue`. A run that is repeated adds the job again, unless an
        `idempotency_key` shows that it is the same.
        """
        return await self._port.enqueue(task, args, options)


@attrs.frozen(eq=False, kw_only=True)
class _AsyncWorkerHandle(_AsyncHandle[A]):
    """What only a handler in the worker's own process has."""

    _port: AsyncWorkerPort

    def transaction(self) -> AbstractAsyncContextManager[Transaction]:
        """Open a transaction in which the handler's own rows and the job's success commit together (Q12).

        When the block ends without an error the job is `succeeded` with the transaction's `result`, and nothing the
        handler does later can change that. When it raises, nothing is written, and another may be opened.

        Raises `LeaseLost` at the end of the block if this worker has lost the job, and `RuntimeError` at its
        beginning while another one is open, or after one that has committed.
        """
        return self._port.transaction()


@attrs.frozen(eq=False, kw_only=True)
class Job(_AsyncWorkerHandle[A]):
    """The handle of a Trio-flavoured handler. Its async methods raise `trio.Cancelled` when the job was stopped."""


@attrs.frozen(eq=False, kw_only=True)
class AioJob(_AsyncWorkerHandle[A]):
    """The handle of an asyncio-flavoured handler (`asyncio=True`).

    Its async methods raise `asyncio.CancelledError` when the job was stopped; they belong to the handler's own tasks.
    """


@attrs.frozen(eq=False, kw_only=True)
class _BlockingHandle(_Handle[A]):
    """What blocks a plain function, in a thread or in a process of its own."""

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
        """Return the outcomes of the jobs that this one runs after, by id: see `Job`."""
        return self._port.after()

    def take(self, supplier: str | Supplier, n: int = 1, *, max_wait_s: float = 60.0) -> None:
        """Wait until a supplier takes `n` more requests, and count them: see `Job`."""
        self._port.take(supplier if isinstance(supplier, str) else supplier.name, n, max_wait_s)

    def enqueue(
        self, task: str | Task[B], args: B | Mapping[str, Any] | None = None, **options: Unpack[JobOptions]
    ) -> Enqueued:
        """Add a job at once, even if this run fails later: see `Job`."""
        return self._port.enqueue(task, args, options)


@attrs.frozen(eq=False, kw_only=True)
class ThreadJob(_BlockingHandle[A]):
    """The handle of a plain function in a thread, which can't be cancelled: call `checkpoint` between chunks.

    Its methods block the thread and raise `trio.Cancelled` when the job was stopped; they belong to the handler's own
    thread.
    """

    _port: ThreadPort

    def transaction(self) -> AbstractContextManager[ThreadTransaction]:
        """Open a transaction in which the handler's own rows and the job's success commit together: see `Job`."""
        return self._port.transaction()


@attrs.frozen(eq=False, kw_only=True)
class ProcessJob(_BlockingHandle[A]):
    """The handle of a plain function in a process of its own (`process=True`).

    When the job is stopped, `JobStopped` is raised wherever the function is, and after a grace the process is killed.
    `deadline` is by `time.monotonic()`. There is no transaction, and `resource` has nothing: open in the function's
    module what it needs. Methods that need an answer of the service's raise what they raise of a `Job`.
    """


@attrs.frozen(eq=False, kw_only=True)
class AioProcessJob(_AsyncHandle[A]):
    """The handle of an asyncio function in a process of its own (`process=True, asyncio=True`): see `ProcessJob`.

    When the job is stopped, the function's task is cancelled.
    """


AnyJob: TypeAlias = Job[Any] | AioJob[Any] | ThreadJob[Any] | ProcessJob[Any] | AioProcessJob[Any]
"""A job's handle, of whatever flavour: what `@tasks.around` is called with."""


def port_of(job: Job[Any]) -> AsyncWorkerPort:
    """The port of a Trio handler's job, for libraries on top of the queue that write a run's end themselves."""
    port: AsyncWorkerPort = job._port  # noqa: SLF001
    return port

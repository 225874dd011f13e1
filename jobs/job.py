"""What a handler sees of its job: `Job` in an async handler, `ThreadJob` in a plain function that runs in a thread.

The two are one job seen from two sides of the thread boundary. Everything they can do goes through `Port`, which the
runner implements; so the domain needs no database and `dataloader.testing` can hand a handler a real `Job` without one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol
from uuid import UUID

import attrs
import trio

from dataloader.jobs.outcomes import StopReason

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    # A bare `Job` is that of a task without a type of args.
    A = TypeVar("A", default=dict[str, Any])
else:
    from typing import TypeVar

    A = TypeVar("A")
T = TypeVar("T")


class Transaction(Protocol):
    """A transaction on the queue's database that ends with the job's success (Q12). SQL is PostgreSQL's, `$1` style.

    What stands in `result` when the block ends becomes the job's result.
    """

    result: object

    async def execute(self, sql: str, *args: object) -> str:
        """Run one statement; the command's tag, `INSERT 0 3`, comes back."""

    async def executemany(self, sql: str, rows: list[tuple[object, ...]]) -> None:
        """Run one statement for each row of arguments."""

    async def fetch(self, sql: str, *args: object) -> list[dict[str, Any]]:
        """Run one query; its rows come back as dictionaries."""

    async def copy(self, table: str, columns: list[str], rows: list[tuple[object, ...]]) -> int:
        """COPY rows into `table` in binary form; their number comes back."""


class Port(Protocol):
    """What a job's handle needs of the runner."""

    def progress(self, progress: Mapping[str, Any]) -> None:
        """Keep `progress` for the next write; never blocks."""

    def log(self, level: str, message: str, fields: Mapping[str, Any], load: str | None = None) -> None:
        """Keep a log line, of one of the job's loads or of the job itself, for the next write; never blocks."""

    def transaction(self) -> AbstractAsyncContextManager[Transaction]:
        """A transaction that ends with the job's success."""

    def deadline(self) -> float:
        """When the job's scope ends as things stand, by `trio.current_time()`."""

    def stopped_by(self) -> StopReason | None:
        """Why the run was stopped, None while it goes on."""

    def keep(self, result: object) -> None:
        """Make `result` the job's, unless the handler returns another."""

    def resource(self, kind: type[T]) -> T:
        """What the process has of this kind."""


@attrs.frozen(eq=False)
class JobLog:
    """Writes log lines, which are kept with the job as events of kind `log`.

    Of one run `DL_LOG_LINES_PER_JOB` lines are kept, and as many of each load that has a log of its own (`Job.log_of`).
    """

    _write: Callable[[str, str, Mapping[str, Any]], None]

    def info(self, message: str, **fields: object) -> None:
        """What happened, for whoever looks at the job."""
        self._write("info", message, fields)

    def warning(self, message: str, **fields: object) -> None:
        """What a reader should know but nobody need act on."""
        self._write("warning", message, fields)

    def error(self, message: str, **fields: object) -> None:
        """What went wrong while the job goes on."""
        self._write("error", message, fields)


@attrs.frozen(eq=False, kw_only=True)
class _Facts(Generic[A]):
    """What both kinds of handle know: the row as claimed. Nothing here changes while the run lasts."""

    job_id: UUID
    queue: str
    task: str
    args: A
    lock_key: str | None
    partition_key: str
    attempt: int
    max_attempts: int
    _port: Port

    @property
    def deadline(self) -> float:
        """When this run will be stopped as things stand, by `trio.current_time()`; each heartbeat moves it."""
        return self._port.deadline()

    @property
    def stopped_by(self) -> StopReason | None:
        """Why this run was stopped, None while it goes on: for clean-up that depends on it."""
        return self._port.stopped_by()

    def resource(self, kind: type[T]) -> T:
        """What the process has of this kind, for libraries on top of the queue. `LookupError` if it has none."""
        return self._port.resource(kind)


@attrs.frozen(eq=False, kw_only=True)
class Job(_Facts[A]):
    """The handle of an async handler.

    Its methods are checkpoints: they raise `trio.Cancelled` when the job was stopped.
    """

    @property
    def log(self) -> JobLog:
        """The job's own log."""
        return JobLog(self._port.log)

    def log_of(self, load: str) -> JobLog:
        """The log of one of the job's loads: its lines have the field `load`, and are counted by themselves."""
        return JobLog(partial(self._port.log, load=load))

    async def progress(self, progress: Mapping[str, Any]) -> None:
        """Show `progress`, a JSON object, as the job's; written at most once a second, the last one always."""
        self._port.progress(progress)
        await trio.lowlevel.checkpoint()

    def show(self, progress: Mapping[str, Any]) -> None:
        """As `progress`, but no checkpoint: for the last words of a run that was stopped."""
        self._port.progress(progress)

    def keep(self, result: object) -> None:
        """Make `result` the job's, also if this run fails or is stopped; what the handler returns replaces it."""
        self._port.keep(result)

    async def checkpoint(self) -> None:
        """Let others run, and stop here if the job was canceled, timed out, lost its lease or is drained."""
        await trio.lowlevel.checkpoint()

    def transaction(self) -> AbstractAsyncContextManager[Transaction]:
        """Open a transaction in which the handler's own rows and the job's success commit together (Q12).

        When the block ends without an error the job is `succeeded` with the transaction's `result`, and nothing the
        handler does later can change that. When it raises, nothing was written, and another may be opened.

        Raises `LeaseLost` at the end of the block if the job was no longer this worker's, and `RuntimeError` at its
        beginning while another one is open, or after one that has committed.
        """
        return self._port.transaction()


@attrs.frozen(eq=False, kw_only=True)
class ThreadJob(_Facts[A]):
    """The handle of a plain function in a thread, which can't be cancelled: call `checkpoint` between chunks."""

    @property
    def log(self) -> JobLog:
        """The job's own log; its lines are handed to the Trio thread."""
        return JobLog(self._write_line)

    def _write_line(self, level: str, message: str, fields: Mapping[str, Any]) -> None:
        trio.from_thread.run_sync(self._port.log, level, message, fields)

    def progress(self, progress: Mapping[str, Any]) -> None:
        """Show `progress` as the job's, and stop here if the job was stopped."""
        trio.from_thread.run_sync(self._port.progress, progress)
        trio.from_thread.check_cancelled()

    def checkpoint(self) -> None:
        """Stop here, by `trio.Cancelled`, if the job was canceled, timed out, lost its lease or is drained."""
        trio.from_thread.check_cancelled()

"""Port of a Trio handler's `Job`; the ports of the other flavors call this one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from types import TracebackType
from typing import Any, Final, Self, TypeVar, cast

import attrs
import trio
from msgspec.structs import replace

from dataloader.actors.aio_calls import RunAioCalls
from dataloader.actors.children.child_calls import ChildCalls
from dataloader.actors.job_runs import Run
from dataloader.actors.recorder_messages import Shown
from dataloader.actors.run_services import RunServices
from dataloader.actors.success import success_of
from dataloader.jobs.asyncio_calls import AsyncioCalls
from dataloader.jobs.calls import Calls, CallsOn
from dataloader.jobs.errors import LeaseLost, StoreUnavailable
from dataloader.jobs.handler_calls import (
    EnqueueJob,
    GetStopReason,
    GetTimeLeft,
    HandlerCall,
    ReadAfter,
    TakeUnits,
)
from dataloader.jobs.job import Transaction
from dataloader.jobs.listings import LEVELS, Level
from dataloader.jobs.logger import get_logger
from dataloader.jobs.model import ClaimedJob
from dataloader.jobs.outcomes import Outcome, StopReason
from dataloader.jobs.secrets.masking import mask, mask_text
from dataloader.jobs.task import Task
from dataloader.jobs.text import MAX_MASKED, cut_texts, read_json, storable_json, storable_text
from dataloader.store.connection.bridge import Database
from dataloader.store.limits.take import take_units
from dataloader.store.queue.reads import results_of

T = TypeVar("T")

job_log = get_logger("dataloader.job")

MAX_LINE: Final = 8_192
"""Maximum size of a stored log line in bytes."""
_BEGINNING: Final = 500
"""Characters kept of the message of a load's line that is longer."""


@attrs.define(eq=False)
class RunEnd:
    """Block in which a library itself writes that a run has ended, or that it continues."""

    _run: Run
    written: bool = False
    later: Callable[[], Awaitable[object]] | None = None
    _scope: trio.CancelScope = attrs.field(init=False)

    async def __aenter__(self) -> Self:
        """Shield the block."""
        self._scope = self._run.shield_commit()
        self._scope.__enter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        """Note that the run has ended, or that it needs its lease again."""
        try:
            is_handled = self._scope.__exit__(kind, error, traceback)
        finally:
            self._run.late = self.later
            self._run.commit_ended(well=self.written or self.later is not None)
        if self._scope.cancelled_caught:
            await trio.lowlevel.checkpoint()  # noqa: ASYNC102 - it is cancelled by now, as intended
            raise LeaseLost("the lease expired before the end of the run was written")
        return bool(is_handled)


class TrioPort:
    """Port of one run. Progress and lines go into the run's outbox, and the recorder gets a message about them."""

    def __init__(self, run: Run, services: RunServices, task: Task) -> None:
        """Create the port of a run, which has no open transaction."""
        self._run = run
        self._task = task
        self._services = services
        self._in_transaction = False

    def progress(self, progress: Mapping[str, Any]) -> None:
        """Keep the newest progress; the recorder writes it within a second."""
        self._run.outbox.put_progress(storable_json(progress))
        self._tell()

    def log(
        self, level: Level, message: str, fields: Mapping[str, Any], load: str | None = None, *, is_logged: bool = False
    ) -> None:
        """Keep a log line. After `DL_LOG_LINES_PER_JOB` lines of the run, or of a load, one says that the rest is lost.

        `is_logged`: the process's log already has the line.
        """
        most = self._services.max_lines
        count = self._run.outbox.count_line(load)
        if count > most + 1:
            return
        if count > most:
            level, message, fields = "warning", f"more than {most} lines; the rest is not stored", {}
        self._put_line(level, message, fields, load, is_logged=is_logged)

    def end_log(self, load: str) -> None:
        """End the log of a load: its last line says how many lines were not stored, if any."""
        if (lost := self._run.outbox.lines_of(load) - self._services.max_lines) > 0:
            self._put_line("warning", f"{lost:,} lines were not stored", {"not_kept": lost}, load)

    def _put_line(
        self, level: Level, message: str, fields: Mapping[str, Any], load: str | None, *, is_logged: bool = False
    ) -> None:
        if load is not None:
            fields = {"load": load, **fields}
        text = mask_text(storable_text(str(message), MAX_MASKED))
        payload = {"level": level, "message": text, **({"fields": mask(cut_texts(fields))} if fields else {})}
        line = storable_json(payload, MAX_LINE)
        if load is not None and line.startswith('{"truncated":'):
            # It must stay a line of its load.
            payload |= {"message": text[:_BEGINNING], "fields": {"load": load, **read_json(line)}}
            line = storable_json(payload, MAX_LINE)
        self._run.outbox.put_line(datetime.now(UTC), line)
        self._tell()
        if not is_logged and self._services.logged_from in LEVELS[: LEVELS.index(level) + 1]:
            _log_line(level, line)

    async def checkpoint(self) -> None:
        """Run Trio's checkpoint."""
        await trio.lowlevel.checkpoint()

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Transaction]:
        """See `dataloader.jobs.job.Job.transaction`."""
        run = self._run
        # A second one could not commit together with the job's success.
        if self._in_transaction:
            raise RuntimeError(
                "the job already has an open transaction; a handler can have one job.transaction() at a time"
            )
        if run.committed:
            raise RuntimeError("the job has already succeeded with its transaction; write all rows in that block")

        def success(result: object) -> Outcome:
            # The recorder will write nothing more of this run, so the newest progress is written here.
            outcome = replace(success_of(run.job, self._task, result), progress=run.outbox.newest_progress)
            run.committed_as = outcome.step
            return outcome

        failure: StoreUnavailable | None = None
        self._in_transaction = True
        try:
            async with self._services.transactions.open(success, run.shield_commit) as transaction:
                transaction.root = run.job.job_id
                yield transaction
        except StoreUnavailable as error:
            failure = error
        except BaseException:
            run.commit_ended(well=False)
            raise
        finally:
            self._in_transaction = False
        run.commit_ended(well=failure is None)
        if failure is not None:
            # If the lease has ended meanwhile, the body gets that cancellation instead of this error.
            await trio.lowlevel.checkpoint()
            raise failure

    def ending(self) -> RunEnd:
        """Return the block in which a library writes how the run ended, or that it continues.

        No heartbeat reads the row meanwhile. When the time passes at which the body must have ended, the block and the
        body are cancelled.
        """
        return RunEnd(self._run)

    async def ask(self, call: HandlerCall[T]) -> T:
        """Answer a call of the handler, whatever its flavor."""
        answer: Any = None
        match call:
            case ReadAfter():
                answer = await results_of(self.resource(Database), self._run.job.job_id)
            case TakeUnits():
                await take_units(self.resource(Database), call.supplier, call.units, call.max_wait_s)
            case EnqueueJob():
                [answer] = await self._services.enqueuer.enqueue([call.job])
            case GetTimeLeft():
                answer = min(self.deadline() - trio.current_time(), 1e9)
            case GetStopReason():
                answer = self.stopped_by()
            case _:
                raise TypeError(f"there is no answer to {call!r}")
        return cast("T", answer)

    def deadline(self) -> float:
        """Return the deadline of the run's body, by Trio's clock."""
        return self._run.deadline

    def stopped_by(self) -> StopReason | None:
        """Return why the run was stopped, None if it was not. The deadline may have passed without a noted reason."""
        return self._run.stopped_by() if self._run.is_stopped else None

    def keep(self, result: object) -> None:
        """Keep a result, whatever the outcome of the run is."""
        self._run.kept = None if result is None else storable_json(result)

    def resource(self, kind: object) -> Any:
        """Return the resource that was declared as `kind`, or the one of type `kind`.

        For `ClaimedJob` this is the claimed job itself, for `Calls` or a `CallsOn` child processes for its run, for
        `AsyncioCalls` the loop of asyncio handlers. Raises `LookupError` if there is none, or if several have that
        type.
        """
        if kind is ClaimedJob:
            return self._run.job
        if kind is Calls or isinstance(kind, CallsOn):
            return self._calls(kind)
        if kind is AsyncioCalls:
            return self._asyncio_calls()
        resources = self._services.resources
        if kind in resources:
            return resources[kind]
        found = [value for value in resources.values() if isinstance(kind, type) and isinstance(value, kind)]
        if len(found) == 1:
            return found[0]
        name = getattr(kind, "__qualname__", None) or getattr(kind, "name", kind)
        if found:
            raise LookupError(f"this process has {len(found)} resources of type {name}; choose one by its function")
        raise LookupError(
            f"this process has no resource {name} for jobs; declare it with @tasks.resource, or set a database"
        )

    def _asyncio_calls(self) -> AsyncioCalls:
        if self._services.aio is None:
            raise LookupError("this process has no asyncio loop of handlers; no task needs one")
        return RunAioCalls(self._services.aio)

    def _calls(self, kind: object) -> Calls:
        children, clusters = self._services.children, self._services.clusters
        if isinstance(kind, CallsOn) and clusters is not None:
            return ChildCalls(self._run, partial(clusters.lend_to_calls, kind.dask))
        # Without clusters, in tests, the processes are children of this process.
        assert children is not None, "a process with async handlers has children"  # noqa: S101
        return ChildCalls(self._run, children.lend_to_calls)

    def _tell(self) -> None:
        if not self._run.outbox.is_told and not self._run.body_ended:
            self._run.outbox.is_told = True
            self._services.to_recorder.send_nowait(Shown(self._run))


def _log_line(level: Level, line: str) -> None:
    """Send a job's stored line to the process's log: masked, bounded and readable by all."""
    kept = read_json(line)
    fields = {name: value for name, value in kept.items() if name not in {"level", "message"}}
    getattr(job_log, level)(kept.get("message", "a line too long to be stored"), **fields)

"""Port of a thread's `ThreadJob`: every operation runs in the Trio port, in Trio's thread.

Each operation runs in the Trio task that waits for the handler's thread, within the run's scope. So it is stopped as in
an async handler, and then raises `trio.Cancelled` in the thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar, Unpack
from uuid import UUID

import attrs
import trio

from dataloader.actors.trio_port import TrioPort
from dataloader.jobs.handler_calls import HandlerCall
from dataloader.jobs.job import ThreadTransaction, Transaction
from dataloader.jobs.listings import Level
from dataloader.jobs.model import Enqueued, JobOptions, NewJob
from dataloader.jobs.outcomes import StopReason
from dataloader.jobs.task import A, Task

T = TypeVar("T")


@attrs.frozen(eq=False)
class ThreadRunPort:
    """Port of one run, used only in the handler's thread."""

    _port: TrioPort

    def progress(self, progress: Mapping[str, Any]) -> None:
        """Keep the newest progress."""
        trio.from_thread.run_sync(self._port.progress, progress)

    def log(self, level: Level, message: str, fields: Mapping[str, Any], load: str | None = None) -> None:
        """Keep a log line."""
        trio.from_thread.run_sync(self._port.log, level, message, fields, load)

    def end_log(self, load: str) -> None:
        """See `TrioPort.end_log`."""
        trio.from_thread.run_sync(self._port.end_log, load)

    def checkpoint(self) -> None:
        """Raise `trio.Cancelled` if the run was stopped."""
        trio.from_thread.check_cancelled()

    @contextmanager
    def transaction(self) -> Iterator[ThreadTransaction]:
        """See `dataloader.jobs.job.Job.transaction`."""
        opened = self._port.transaction()
        transaction = _ThreadTransaction(trio.from_thread.run(opened.__aenter__))
        try:
            yield transaction
        except BaseException as error:  # noqa: ASYNC103 - raised again, because the transaction's end never swallows it
            if not trio.from_thread.run(opened.__aexit__, type(error), error, error.__traceback__):
                raise
        else:
            trio.from_thread.run(opened.__aexit__, None, None, None)

    def ask(self, call: HandlerCall[T]) -> T:
        """Return the answer to a call, or raise its error."""
        return trio.from_thread.run(self._port.ask, call)

    def deadline(self) -> float:
        """Return the deadline of the run's scope."""
        return self._port.deadline()

    def stopped_by(self) -> StopReason | None:
        """Return the reason why the run was stopped; None while it continues."""
        return trio.from_thread.run_sync(self._port.stopped_by)

    def keep(self, result: object) -> None:
        """Keep a result, whatever the outcome of the run is."""
        trio.from_thread.run_sync(self._port.keep, result)

    def resource(self, kind: object) -> Any:
        """Return a resource of the process."""
        return self._port.resource(kind)


@attrs.define(eq=False)
class _ThreadTransaction:
    """`ThreadTransaction` of a run."""

    _transaction: Transaction

    @property
    def result(self) -> object:
        """Value that becomes the job's result."""
        return self._transaction.result

    @result.setter
    def result(self, result: object) -> None:
        self._transaction.result = result

    def execute(self, sql: str, *args: object) -> str:
        """Run one statement."""
        return trio.from_thread.run(partial(self._transaction.execute, sql, *args))

    def executemany(self, sql: str, rows: list[tuple[object, ...]]) -> None:
        """Run one statement for each row of arguments."""
        trio.from_thread.run(self._transaction.executemany, sql, rows)

    def fetch(self, sql: str, *args: object) -> list[dict[str, Any]]:
        """Run one query."""
        return trio.from_thread.run(partial(self._transaction.fetch, sql, *args))

    def copy(self, table: str, columns: list[str], rows: list[tuple[object, ...]]) -> int:
        """Copy rows into `table` with COPY; return their number."""
        return trio.from_thread.run(self._transaction.copy, table, columns, rows)

    def enqueue(
        self, task: str | Task[A], args: A | Mapping[str, Any] | None = None, **options: Unpack[JobOptions]
    ) -> Enqueued:
        """Enqueue a job."""
        return trio.from_thread.run(partial(self._transaction.enqueue, task, args, **options))

    def enqueue_many(self, jobs: Sequence[NewJob]) -> list[Enqueued]:
        """Enqueue jobs, all or none."""
        return trio.from_thread.run(self._transaction.enqueue_many, jobs)

    @property
    def enqueued(self) -> tuple[UUID, ...]:
        """IDs of the jobs that were enqueued in it."""
        return self._transaction.enqueued

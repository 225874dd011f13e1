"""Port of an asyncio handler's `AioJob`: operations that wait run in the Trio port, in Trio tasks of the run.

One Trio task begins and ends a whole operation. A transaction is one operation: its task holds it open while the
handler's block uses it. The tasks are in a nursery within the run's scope, so they are stopped with the run and end
before it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, ParamSpec, TypeVar, Unpack
from uuid import UUID

import attrs
import trio

from dataloader.actors.aio_operation import AioOperation
from dataloader.actors.trio_port import TrioPort
from dataloader.jobs.handler_calls import HandlerCall
from dataloader.jobs.job import Transaction
from dataloader.jobs.listings import Level
from dataloader.jobs.model import Enqueued, JobOptions, NewJob
from dataloader.jobs.outcomes import StopReason
from dataloader.jobs.task import A, Task

P = ParamSpec("P")
T = TypeVar("T")


class _LeftByError(Exception):
    """Error that rolls back a transaction, because its block has raised."""


class AioRunPort:
    """Port of one run, used only in its asyncio tasks."""

    def __init__(self, port: TrioPort, nursery: trio.Nursery) -> None:
        """Create the port; `nursery` must stay open while the handler runs."""
        self._port = port
        self._nursery = nursery

    def progress(self, progress: Mapping[str, Any]) -> None:
        """Keep the newest progress."""
        self._port.progress(progress)

    def log(self, level: Level, message: str, fields: Mapping[str, Any], load: str | None = None) -> None:
        """Keep a log line."""
        self._port.log(level, message, fields, load)

    def end_log(self, load: str) -> None:
        """See `TrioPort.end_log`."""
        self._port.end_log(load)

    async def checkpoint(self) -> None:
        """Let other tasks run. After a stop, every call raises `CancelledError`; asyncio itself raises it only once."""
        await asyncio.sleep(0)
        if self._port.stopped_by() is not None:
            raise asyncio.CancelledError

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Transaction]:
        """See `dataloader.jobs.job.Job.transaction`."""
        opened: asyncio.Future[Transaction] = asyncio.get_running_loop().create_future()
        left = trio.Event()
        failed = False

        async def hold() -> None:
            async with self._port.transaction() as transaction:
                if not opened.done():
                    opened.set_result(transaction)
                await left.wait()
                if failed:
                    raise _LeftByError

        operation = AioOperation(self._nursery, hold)
        await operation.wait(opened)
        if not opened.done():
            operation.result()
        try:
            yield _AioTransaction(self, opened.result())
        except BaseException:
            failed = True
            left.set()
            await operation.wait()  # noqa: ASYNC102 - Trio's side has the deadlines of a commit and a rollback
            raise
        left.set()
        await operation.wait()
        operation.result()

    async def ask(self, call: HandlerCall[T]) -> T:
        """Return the answer to a call, or raise its error."""
        return await self.run(self._port.ask, call)

    async def run(self, function: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a Trio-flavored function from asyncio.

        A cancellation stops the function, and is raised when it has ended.
        """
        operation = AioOperation(self._nursery, function, *args, **kwargs)
        await operation.wait()
        return operation.result()

    def deadline(self) -> float:
        """Return the deadline of the run's scope. Trio and asyncio use the same clock."""
        return self._port.deadline()

    def stopped_by(self) -> StopReason | None:
        """Return the reason why the run was stopped; None while it continues."""
        return self._port.stopped_by()

    def keep(self, result: object) -> None:
        """Keep a result, whatever the outcome of the run is."""
        self._port.keep(result)

    def resource(self, kind: object) -> Any:
        """Return a resource of the process."""
        return self._port.resource(kind)


@attrs.define(eq=False)
class _AioTransaction:
    """`Transaction` for asyncio tasks."""

    _port: AioRunPort
    _transaction: Transaction

    @property
    def result(self) -> object:
        """Value that becomes the job's result."""
        return self._transaction.result

    @result.setter
    def result(self, result: object) -> None:
        self._transaction.result = result

    async def execute(self, sql: str, *args: object) -> str:
        """Run one statement."""
        return await self._port.run(self._transaction.execute, sql, *args)

    async def executemany(self, sql: str, rows: list[tuple[object, ...]]) -> None:
        """Run one statement for each row of arguments."""
        await self._port.run(self._transaction.executemany, sql, rows)

    async def fetch(self, sql: str, *args: object) -> list[dict[str, Any]]:
        """Run one query."""
        return await self._port.run(self._transaction.fetch, sql, *args)

    async def copy(self, table: str, columns: list[str], rows: list[tuple[object, ...]]) -> int:
        """Copy rows into `table` with COPY; return their number."""
        return await self._port.run(self._transaction.copy, table, columns, rows)

    async def enqueue(
        self, task: str | Task[A], args: A | Mapping[str, Any] | None = None, **options: Unpack[JobOptions]
    ) -> Enqueued:
        """Enqueue a job."""
        return await self._port.run(partial(self._transaction.enqueue, task, args, **options))

    async def enqueue_many(self, jobs: Sequence[NewJob]) -> list[Enqueued]:
        """Enqueue jobs, all or none."""
        return await self._port.run(self._transaction.enqueue_many, jobs)

    @property
    def enqueued(self) -> tuple[UUID, ...]:
        """IDs of the jobs that were enqueued in it."""
        return self._transaction.enqueued

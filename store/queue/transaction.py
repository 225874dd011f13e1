"""`job.transaction()`: the handler's own rows and the job's success in ONE transaction (Q12).

Only here does a transaction span several crossings. Its connections are a separate, bounded pool, so that a handler
with a long transaction does not delay other callers. They have the server's planner settings, since the SQL is the
user's. Loads write through the same pool (`run`), in operations of one crossing each.

The job's row is changed only by the last statement: the fenced update and the COMMIT are one shielded crossing. If its
reply is lost, the row shows the result: our token and `succeeded` mean that it was committed. If a stage has moved its
job on, the event history shows it. The shield ends with the lease, after which another run may begin: then the
connection is ended, and the fence decides whether a COMMIT in transit still counts.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Concatenate, Final, ParamSpec, TypeAlias, TypeVar, Unpack
from uuid import UUID

import asyncpg
import attrs
import trio

from dataloader.jobs.errors import LeaseLost, StoreError, StoreUnavailable
from dataloader.jobs.model import DEFAULT_LEASE_S, Enqueued, JobOptions, NewJob
from dataloader.jobs.new_job import new_job
from dataloader.jobs.outcomes import Outcome
from dataloader.jobs.states import Step
from dataloader.jobs.task import A, Task
from dataloader.store.connection.bridge import Database, aio_close, set_local
from dataloader.store.connection.command_tag import row_count
from dataloader.store.connection.connect import PLANNER_OF_USERS, connect
from dataloader.store.connection.driver_errors import said
from dataloader.store.connection.error_meanings import LOST_STATEMENTS, MISSING, TIMED_OUT, can_be_raised
from dataloader.store.connection.options import DatabaseOptions
from dataloader.store.queue.enqueue import aio_enqueue_within, rows_of
from dataloader.store.queue.finish import aio_finish

P = ParamSpec("P")
T = TypeVar("T")

_COMMITTED: Final = "SELECT token = $2 AND status = 'succeeded' FROM dl_jobs WHERE job_id = $1"
# The next stage may have begun meanwhile, with another token.
_MOVED: Final = """
SELECT EXISTS (
  SELECT FROM dl_job_events WHERE job_id = $1 AND kind = 'moved' AND payload ->> 'token' = $2::bigint::text
)
"""
RESOLVE_TRIES: Final = 5
COMMIT_S: Final = 2.0
"""Seconds that a cancelled caller waits for the answer to a COMMIT."""
ABANDON_S: Final = 0.25
"""Maximum seconds for closing a connection when the lease ends; they fit into the shortest margin before that."""


@attrs.define(eq=False)
class JobTransaction:
    """Open transaction: statements run one at a time on its connection. See `dataloader.jobs.job.Transaction`."""

    _database: Database
    _connection: Any
    _default_lease_s: int = DEFAULT_LEASE_S
    result: object = None
    root: UUID | None = None
    """Root of the group to which the jobs enqueued in the transaction belong."""
    _enqueued: dict[UUID, None] = attrs.field(factory=dict, init=False)

    @property
    def enqueued(self) -> tuple[UUID, ...]:
        """Jobs that have been enqueued in it, in order."""
        return tuple(self._enqueued)

    async def enqueue(
        self, task: str | Task[A], args: A | Mapping[str, Any] | None = None, **options: Unpack[JobOptions]
    ) -> Enqueued:
        """Add a job, which becomes visible together with the job's success."""
        [enqueued] = await self.enqueue_many([new_job(task, args, **options)])
        return enqueued

    async def enqueue_many(self, jobs: Sequence[NewJob]) -> list[Enqueued]:
        """Add jobs, all or none, which become visible together with the job's success."""
        jobs = [job if job.root is not None else attrs.evolve(job, root=self.root) for job in jobs]
        rows = rows_of(jobs, self._default_lease_s)
        answers = await self._database.crossing.run(aio_enqueue_within, self._connection, list(jobs), rows)
        self._enqueued |= dict.fromkeys(answer.job_id for answer in answers)
        return answers

    async def execute(self, sql: str, *args: object) -> str:
        """Run one statement; return the command's tag."""
        tag: str = await self._run(self._connection.execute, sql, *args)
        return tag

    async def executemany(self, sql: str, rows: list[tuple[object, ...]]) -> None:
        """Run one statement for each row of arguments, in one batch."""
        await self._run(self._connection.executemany, sql, rows)

    async def fetch(self, sql: str, *args: object) -> list[dict[str, Any]]:
        """Run one query; return its rows as dictionaries."""
        return [dict(record) for record in await self._run(self._connection.fetch, sql, *args)]

    async def copy(self, table: str, columns: list[str], rows: list[tuple[object, ...]]) -> int:
        """Copy rows into `table` with a binary COPY and return their number."""
        tag: str = await self._run(self._connection.copy_records_to_table, table, columns=columns, records=rows)
        return row_count(tag)

    async def _run(self, method: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs) -> T:
        async def aio_told() -> T:
            with told_of_users(self._connection):
                try:
                    return await method(*args, **kwargs)
                except TIMED_OUT as error:
                    # The server answers: this statement takes too long, or waits too long for a lock.
                    raise StoreError(said(error)) from error

        crossing = self._database.crossing
        try:
            return await crossing.run(aio_told)
        except StoreUnavailable as error:
            cause = error.__cause__
            if cause is None or not can_be_raised(cause) or self._connection.is_closed():
                raise
            if not await crossing.is_served():  # noqa: ASYNC120 - a cancellation takes the error's place
                raise
        raise StoreError(said(cause)) from cause


J = TypeVar("J", bound=JobTransaction)
Written: TypeAlias = Callable[[Callable[[Any], Awaitable[Any]]], Awaitable[Any]]


class Transactions:
    """Bounded pool for `job.transaction()`."""

    def __init__(
        self, database: Database, *, default_lease_s: int = DEFAULT_LEASE_S, commit_s: float = COMMIT_S
    ) -> None:
        """Create the pool, whose connections open at first use. Leases of enqueued jobs last `default_lease_s`.

        A cancelled `run` waits at most `commit_s` seconds for the answer to its COMMIT.
        """
        self._database = database
        self._default_lease_s = default_lease_s
        self._commit_s = commit_s
        self._limiter = trio.CapacityLimiter(database.options.transaction_pool_size)
        self._begin = _begin_with(database.options)
        self._idle: list[asyncpg.Connection[Any]] = []

    async def run(self, operation: Callable[Concatenate[Any, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run an operation in a separate transaction, for operations that take longer than the store allows otherwise.

        Raises `StoreUnavailable` if the database does not answer, or if its answer was lost: then the operation may
        have been committed. Raises `Cancelled` before the COMMIT is sent, but not if it is answered within `commit_s`.
        """
        async with self._limiter:
            return await self._database.crossing.run(
                self._aio_run, lambda connection: operation(connection, *args, **kwargs)
            )

    @asynccontextmanager
    async def open(
        self,
        success: Callable[[object], Outcome],
        shield: Callable[[], trio.CancelScope] = lambda: trio.CancelScope(shield=True),
    ) -> AsyncIterator[JobTransaction]:
        """Open a transaction that, if the block succeeds, writes the outcome `success(result)` and commits.

        The commit runs in the scope that `shield` returns, whose deadline is the last moment for its reply.

        Raises `LeaseLost` if the job no longer belonged to this worker, and `StoreUnavailable` if the result of the
        commit cannot be found out; nothing was committed in the first case.
        """

        async def end(transaction: JobTransaction, connection: Any) -> None:
            await self._commit(connection, success(transaction.result), shield())

        async with self._opened(JobTransaction, end) as transaction:
            yield transaction

    @asynccontextmanager
    async def open_for(self, kind: type[J], end: Callable[[J, Written], Awaitable[None]]) -> AsyncIterator[J]:
        """Open a transaction that `end` commits if the block succeeds, for a library with its own end of a job.

        `end` receives the transaction, and a function that runs an operation (asyncio-flavored) on its connection and
        commits immediately. Its errors roll back; `end` must find out whether a COMMIT without an answer has happened.
        """

        async def written(transaction: J, connection: Any) -> None:
            async def write(operation: Callable[[Any], Awaitable[Any]]) -> Any:
                return await self._database.crossing.run(_aio_write_and_commit, connection, operation)

            await end(transaction, write)

        async with self._opened(kind, written) as transaction:
            yield transaction

    @asynccontextmanager
    async def _opened(self, kind: type[J], end: Callable[[J, Any], Awaitable[None]]) -> AsyncIterator[J]:
        run = self._database.crossing.run
        async with self._limiter:
            connection = await run(self._aio_begin)
            try:
                transaction = kind(self._database, connection, self._default_lease_s)
                yield transaction
                await end(transaction, connection)
            except BaseException as error:
                # A cancelled caller may have to end before a lease does.
                with trio.move_on_after(2 if isinstance(error, Exception) else ABANDON_S, shield=True):
                    await run(aio_close, connection)
                if not connection.is_closed():
                    connection.terminate()
                raise
            await self._put_back(connection)

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().terminate()

    async def _aio_run(self, operation: Callable[[Any], Awaitable[T]]) -> T:
        connection = await self._aio_begin()
        try:
            result = await operation(connection)
            await _aio_commit_whole(connection, self._commit_s)
        except BaseException:
            # Closed with a message to the server: a statement that continues there keeps its locks.
            await aio_close(connection)  # noqa: ASYNC102 - asyncio's, and it has its own bound
            raise
        self._idle.append(connection)
        return result

    async def _aio_begin(self) -> Any:
        options = self._database.options
        if self._idle:
            with contextlib.suppress(asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError):
                return await _aio_begun(self._idle.pop(), self._begin, options.connect_timeout_s)
            # The other idle connections may be broken as well.
            self.close()
        patient = attrs.evolve(options, statement_timeout_s=options.transaction_timeout_s)
        connection = await connect(patient, role="transaction", planner={})
        return await _aio_begun(connection, self._begin, options.connect_timeout_s)

    async def _put_back(self, connection: Any) -> None:
        """Keep the connection for the next handler, without the settings, temporary tables and locks of this one."""
        with trio.move_on_after(2, shield=True), contextlib.suppress(StoreError):
            await self._database.crossing.run(_aio_clean, connection)
            self._idle.append(connection)
            return
        connection.terminate()

    async def _commit(self, connection: Any, outcome: Outcome, shield: trio.CancelScope) -> None:
        run = self._database.crossing.run
        with shield:
            with contextlib.suppress(StoreUnavailable), trio.move_on_after(self._database.options.write_deadline_s):
                await run(_aio_finish_and_commit, connection, outcome)
                return
            # This ends its transaction before the row is read, if the server can be reached.
            await run(aio_close, connection)
            await self._resolve(outcome)
            return
        with trio.move_on_after(ABANDON_S, shield=True):
            await run(aio_close, connection)
        connection.terminate()
        raise StoreUnavailable(
            "the commit was not confirmed before the lease or the lock_key was lost; see the job's status"
        )

    async def _resolve(self, outcome: Outcome) -> None:
        """Find out from the row whether the transaction was committed, since the reply is lost."""
        for attempt in range(RESOLVE_TRIES):
            try:
                committed = await self._database.run(_aio_committed, outcome)
            except StoreUnavailable:
                await trio.sleep(0.2 * 2**attempt)
                continue
            if committed:
                return
            raise StoreUnavailable("the transaction was not committed: its connection was lost")
        raise StoreUnavailable("the database cannot be reached; the transaction may or may not have been committed")


@contextmanager
def told_of_users(connection: Any) -> Iterator[None]:
    """Attribute errors of missing tables and wrong arguments inside the block to the user's statements.

    Raises `StoreError` for errors that would otherwise be attributed to the queue's tables or to an unreachable
    database.
    """
    try:
        yield
    except MISSING as error:
        raise StoreError(said(error)) from error
    except LOST_STATEMENTS as error:
        raise _deallocated(error) from error
    except asyncpg.InterfaceError as error:
        if connection.is_closed():
            raise
        raise StoreError(said(error)) from error


def _deallocated(error: BaseException) -> StoreError:
    return StoreError(
        f"the driver's prepared statements on this connection are lost ({said(error)}): handlers must not run"
        " DEALLOCATE, and poolers must keep prepared statements"
    )


def _begin_with(options: DatabaseOptions) -> str:
    """Return the statement that begins a transaction.

    Behind a pooler it contains the settings, because the pooler ignores those that a connection requests.
    """
    if not options.has_pooler:
        return "BEGIN"
    timeout = f"{int(options.transaction_timeout_s * 1000)}"
    timeouts = {"statement_timeout": timeout, "idle_in_transaction_session_timeout": timeout}
    return f"BEGIN; {set_local(timeouts | PLANNER_OF_USERS)}"


async def _aio_begun(connection: Any, begin: str, timeout_s: float) -> Any:
    """Begin a transaction and return the connection; close it if that fails or is cancelled."""
    try:
        await connection.execute(begin, timeout=timeout_s)
    except BaseException:
        connection.terminate()
        raise
    return connection


async def _aio_finish_and_commit(connection: Any, outcome: Outcome) -> None:
    if not connection.is_closed() and not connection.is_in_transaction():
        raise StoreError(
            "the handler ended its transaction itself: its rows and the job's success are no longer one transaction"
        )
    try:
        finished = await aio_finish(connection, [outcome], patient=True)
    except LOST_STATEMENTS as error:
        raise _deallocated(error) from error
    if outcome.token not in finished.written:
        message = f"another worker has job {outcome.job_id}: its transaction was rolled back"
        raise LeaseLost(message)
    await _aio_commit(connection)


async def _aio_write_and_commit(connection: Any, operation: Callable[[Any], Awaitable[Any]]) -> Any:
    if not connection.is_closed() and not connection.is_in_transaction():
        raise StoreError(
            "the block ended its transaction itself: its rows and the job's end are no longer one transaction"
        )
    try:
        result = await operation(connection)
    except LOST_STATEMENTS as error:
        raise _deallocated(error) from error
    await _aio_commit(connection)
    return result


async def _aio_commit(connection: Any) -> None:
    # Until now, constraints and triggers of users' tables may be deferred.
    with told_of_users(connection):
        await connection.execute("COMMIT")


async def _aio_commit_whole(connection: Any, answer_s: float) -> None:
    """Commit. If the caller is cancelled, wait for the answer: a COMMIT in transit cannot be called back."""
    commit = asyncio.ensure_future(_aio_commit(connection))
    try:
        await asyncio.shield(commit)
    except asyncio.CancelledError:  # noqa: ASYNC103 - once it has committed, the caller's scope on Trio's side stays cancelled
        await asyncio.wait({commit}, timeout=answer_s)  # noqa: ASYNC102 - asyncio's, and it has its own bound
        if not commit.done():
            commit.cancel()
            raise
        commit.result()


async def _aio_committed(connection: Any, outcome: Outcome) -> bool:
    question = _MOVED if outcome.step is Step.MOVE else _COMMITTED
    return bool(await connection.fetchval(question, outcome.job_id, outcome.token))


async def _aio_clean(connection: Any) -> None:
    # Not DISCARD ALL, which would remove the prepared statements that the driver uses.
    await connection.execute("DISCARD TEMP")
    await connection.reset()

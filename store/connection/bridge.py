"""Bridge between Trio and asyncpg: one asyncio loop, sessions with one connection each, and a pool of them.

An operation is an asyncio-flavored function `async def _aio_x(connection, *args)` that contains all its statements. It
crosses the bridge once as a whole: a crossing costs two turns of the scheduler, and a transaction must never span two
crossings. Driver errors become ours by their meaning (error_meanings.py): `StoreUnavailable` for temporary ones,
`StoreError` for others. If the code of an error is ambiguous, a probe statement decides.

Every statement has two deadlines, asyncpg's `command_timeout` and the server's `statement_timeout`. A Trio scope alone
cannot free a task whose connection hangs, because asyncpg waits for the acknowledgement of its own cancel request.

Not here: SQL. Rejected: triopg (unmaintained, one crossing for each statement); asyncpg's pool (a second kind of
session, and a third of an operation's CPU).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import asyncpg
import trio

from dataloader.jobs.errors import DataloaderError, StoreUnavailable, Unstorable
from dataloader.jobs.logger import get_logger
from dataloader.jobs.secrets.masking import mask_text
from dataloader.store.connection.connect import connect
from dataloader.store.connection.driver_errors import translate
from dataloader.store.connection.error_meanings import PROBE, ROLLED_BACK, is_unclear, misused
from dataloader.store.connection.loop import Loop, open_loop
from dataloader.store.connection.options import DatabaseOptions

P = ParamSpec("P")
T = TypeVar("T")
Connection = asyncpg.Connection

log = get_logger(__name__)

_NO_ANSWER: Final = "the database did not answer in time; the write may or may not have happened"
RETRIES: Final = 4
"""Number of attempts of an operation that the server rolls back because of others (deadlock, serialization)."""


async def acquire(lock: trio.Lock) -> None:
    """Acquire `lock`; without a checkpoint if it is free, because the caller's next call has one."""
    try:
        lock.acquire_nowait()
    except trio.WouldBlock:
        await lock.acquire()


class Crossing:
    """Runner of asyncio-flavored functions on one asyncio loop, for any Trio task."""

    def __init__(self, loop: Loop, options: DatabaseOptions) -> None:
        """Use `loop`, which must be open; a probe of the server connects by `options`."""
        self._loop = loop
        self._options = options
        self._probing = trio.Lock()
        self._probed_at = -math.inf
        self._was_served = False

    async def run(self, function: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function` to its end. Raises our errors; a cancellation is raised after asyncpg has cleaned up."""
        try:
            return await self._loop.run(function, *args, **kwargs)
        except asyncio.CancelledError as error:
            # Trio's cancellation would be trio.Cancelled, so the connection was closed during the operation.
            message = "the operation was aborted: its connection was closed"
            raise StoreUnavailable(message) from error  # noqa: ASYNC104 - asyncio's cancellation ends here, not Trio's
        except Exception as error:
            ours = error if isinstance(error, DataloaderError) else translate(error)
            unclear = isinstance(ours, Unstorable) and (is_unclear(error) or is_unclear(error.__cause__))
            if unclear and not await self.is_served():  # noqa: ASYNC120 - a cancellation replaces the error
                raise StoreUnavailable(f"the database is not available now ({ours})") from error
            if ours is None or ours is error:
                raise
            raise ours from error

    async def is_served(self) -> bool:
        """Return whether the server accepts writes now, by a probe on a separate connection.

        Only one probe runs at a time. Callers that wait for it share the result of the next one.
        """
        asked_at = trio.current_time()
        async with self._probing:
            if self._probed_at < asked_at:
                began_at = trio.current_time()
                self._was_served = await self._probe()
                self._probed_at = began_at
            return self._was_served

    async def _probe(self) -> bool:
        try:
            return await self._loop.run(_aio_probe, self._options)
        except (Exception, asyncio.CancelledError):  # noqa: ASYNC103, BLE001 - asyncio's; any error is no answer
            return False  # noqa: ASYNC104 - as above


class Database:
    """Pool of connections for short operations; each connection runs one operation at a time."""

    def __init__(self, options: DatabaseOptions, crossing: Crossing) -> None:
        """Create the pool; use `open_database` instead."""
        self.options = options
        self.crossing = crossing
        self.pool: Database = self
        """The whole pool, also of a database that uses a part of it."""
        self.share: Database | None = None
        """The part of the pool for reads over HTTP: see `read_share.share_of`."""
        self._sessions: list[Session] = []
        self._idle: list[Session] = []
        self._places = trio.Semaphore(0)
        self.add_connections(options.pool_size)

    def add_connections(self, number: int) -> None:
        """Make the pool one of `number` connections if it is smaller. They connect when they are first needed."""
        for _ in range(number - len(self._sessions)):
            session = Session(self, "pool")
            self._sessions.append(session)
            self._idle.insert(0, session)
            self._places.release()

    async def run(self, operation: Callable[Concatenate[Any, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run an operation on a connection of the pool. After a cancel its effect is unknown: see `write`."""
        return await self._run(operation, *args, **kwargs)

    async def _run(
        self, operation: Callable[Concatenate[Any, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        await self._acquire()
        session = self._idle.pop()
        try:
            return await session.run(operation, *args, **kwargs)
        finally:
            self._idle.append(session)
            self._places.release()

    async def _acquire(self) -> None:
        if self._places.value:
            self._places.acquire_nowait()
            return
        with trio.move_on_after(self.options.connect_timeout_s):
            await self._places.acquire()
            return
        raise StoreUnavailable(f"no connection of the pool was free within {self.options.connect_timeout_s:g} s")

    async def write(
        self, operation: Callable[Concatenate[Any, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run an operation shielded from cancellation, until `write_deadline_s` or an earlier deadline around it.

        Raises `StoreUnavailable` after that; whether the operation wrote is then unknown.
        """
        return await self.write_with_deadline(self.options.write_deadline_s, operation, *args, **kwargs)

    async def write_with_deadline(
        self,
        deadline_s: float,
        operation: Callable[Concatenate[Any, P], Awaitable[T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Run an operation as `write` does, with a deadline in seconds, or that of the scopes around it if earlier.

        So a silent database does not delay a job's run beyond the end of its lease.
        """
        now = trio.current_time()
        if 0 < trio.current_effective_deadline() - now < deadline_s:
            return await self.write_until(trio.current_effective_deadline(), operation, *args, **kwargs)
        with trio.move_on_after(deadline_s, shield=True):
            return await self._run(operation, *args, **kwargs)
        raise StoreUnavailable(_NO_ANSWER)

    async def write_until(
        self, until: float, operation: Callable[Concatenate[Any, P], Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run an operation as `write` does, until a time of Trio's clock. Then the connection is dropped.

        A cancellation waits until then.
        """
        with trio.CancelScope(deadline=until, shield=True) as waiting:
            await self._acquire()
            session = self._idle.pop()
            try:
                waiting.deadline = math.inf
                return await session.run_until(until, operation, *args, **kwargs)
            finally:
                self._idle.append(session)
                self._places.release()
        raise StoreUnavailable(_NO_ANSWER)

    async def serves(self, timeout_s: float) -> bool:
        """Return whether the server accepts writes within `timeout_s` seconds."""
        with trio.move_on_after(timeout_s):
            return await self.crossing.is_served()
        return False

    async def cut(self) -> None:
        """Close the pool's connections for good, abruptly; operations that wait raise `StoreUnavailable`."""
        for session in self._sessions:
            await session.cut()

    async def close(self) -> None:
        """Close the pool's connections."""
        async with trio.open_nursery() as nursery:
            for session in self._sessions:
                nursery.start_soon(session.close)

    def pool_use(self) -> tuple[int, int]:
        """Return the number of open connections of the pool, and how many of these are idle."""
        opened = [session for session in self._sessions if session.connected]
        return len(opened), sum(session in self._idle for session in opened)


async def _aio_probe(options: DatabaseOptions) -> bool:
    connection = await connect(options, role="probe")
    try:
        return bool(await connection.fetchval(PROBE) == "off")
    finally:
        await aio_close(connection)  # noqa: ASYNC102 - asyncio's, and it has its own bound


async def _aio_repeat(operation: Callable[..., Awaitable[T]], connection: asyncpg.Connection[Any]) -> T:
    """Run `operation`; run it again if the server has rolled it back because of other sessions."""
    for attempt in range(1, RETRIES):
        try:
            return await operation(connection)
        except ROLLED_BACK:
            await asyncio.sleep(0.01 * 4**attempt)
    return await operation(connection)


class Session:
    """Connection for one role, opened when first needed and again after a loss; one operation at a time.

    Only the session keeps the connection. `on_connect` (asyncio-flavored) prepares each new one.
    """

    def __init__(
        self,
        database: Database,
        role: str,
        *,
        direct: bool = False,
        on_connect: Callable[[asyncpg.Connection[Any]], Awaitable[None]] | None = None,
    ) -> None:
        """Create the session. pg_stat_activity shows `role`; `direct` uses `direct_dsn`, which bypasses a pooler."""
        self._database = database
        self._role = role
        self._direct = direct
        self._on_connect = on_connect
        self._connection: asyncpg.Connection[Any] | None = None
        self._turn = trio.Lock()
        self._at_work: asyncio.Task[Any] | None = None
        self._cut = False

    @property
    def connected(self) -> bool:
        """True while the connection is open, as far as we know."""
        return self._connection is not None and not self._connection.is_closed()

    @property
    def operation(self) -> object:
        """Object that identifies the operation in progress; None while there is none."""
        return self._at_work

    async def run(self, operation: Callable[Concatenate[Any, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run an operation when earlier ones have ended. After a cancellation its effect is unknown: see `write`."""
        return await self._in_turn(None, lambda connection: operation(connection, *args, **kwargs))

    async def run_until(
        self, until: float, operation: Callable[Concatenate[Any, P], Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run an operation as `run` does; at `until`, by Trio's clock, drop the connection.

        Raises `StoreUnavailable` then.
        """
        return await self._in_turn(None, lambda connection: operation(connection, *args, **kwargs), drop_at=until)

    async def open(self) -> None:
        """Connect, unless the session is connected as far as we know, so that the next operation need not connect."""
        await self.run(_aio_nothing)

    async def write(
        self, operation: Callable[Concatenate[Any, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run an operation shielded, with a deadline. Raises `StoreUnavailable` when its effect is unknown."""
        return await self.write_within(None, operation, *args, **kwargs)

    async def write_within(
        self,
        timeout_s: float | None,
        operation: Callable[Concatenate[Any, P], Awaitable[T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Run an operation as `write` does, for at most `timeout_s` seconds once it has the connection.

        This is for operations that must be repeated on a new connection long before the statement timeout.
        """
        with trio.move_on_after(self._database.options.write_deadline_s, shield=True):
            return await self._in_turn(timeout_s, lambda connection: operation(connection, *args, **kwargs))
        raise StoreUnavailable(
            f"the {self._role} connection did not answer in time; the operation may or may not have happened"
        )

    async def _in_turn(
        self, timeout_s: float | None, operation: Callable[..., Awaitable[T]], *, drop_at: float = math.inf
    ) -> T:
        await acquire(self._turn)
        try:
            return await self._database.crossing.run(self._aio_run, timeout_s, operation, drop_at)
        finally:
            self._turn.release()

    async def _aio_run(self, timeout_s: float | None, operation: Callable[..., Awaitable[T]], drop_at: float) -> T:
        if self._cut:
            raise asyncpg.InterfaceError(f"the {self._role} connection was closed")
        self._at_work = asyncio.current_task()
        dropping = None
        try:
            if self._connection is None or self._connection.is_closed():
                async with asyncio.timeout(None if drop_at == math.inf else drop_at - trio.current_time()):
                    self._connection = await self._aio_connect()
            if drop_at < math.inf:
                dropping = asyncio.get_running_loop().call_later(drop_at - trio.current_time(), self._drop)
            if timeout_s is None:
                return await _aio_repeat(operation, self._connection)
            async with asyncio.timeout(timeout_s):
                return await _aio_repeat(operation, self._connection)
        except asyncpg.InterfaceError as error:
            raise misused(error, self._connection) from error
        # The answer may still arrive, so the connection's state is unknown: it is not used again.
        except TimeoutError:
            self._drop()
            raise
        except asyncio.CancelledError:
            # The driver has asked the server to cancel the statement; the close waits for that, for a second.
            if self._connection is not None:
                await aio_close(self._connection)  # noqa: ASYNC102 - asyncio's, and it has its own bound
            raise
        finally:
            self._at_work = None
            if dropping is not None:
                dropping.cancel()

    async def _aio_connect(self) -> asyncpg.Connection[Any]:
        connection = await connect(self._database.options, direct=self._direct, role=self._role)
        try:
            if self._on_connect is not None:
                await self._on_connect(connection)
        except BaseException:
            connection.terminate()
            raise
        return connection

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.terminate()

    async def drop(self) -> None:
        """Close the connection abruptly: an operation that waits raises `StoreUnavailable`, the next one reconnects."""
        await self._database.crossing.run(self._aio_drop)

    async def _aio_drop(self) -> None:
        self._drop()

    async def cut(self) -> None:
        """Close the connection for good, abruptly; an operation that waits, and every later one, raises."""
        await self._database.crossing.run(self._aio_cut)

    async def _aio_cut(self) -> None:
        self._cut = True
        # The connection first: otherwise the cancelled operation would wait for the server's acknowledgement.
        self._drop()
        if self._at_work is not None:
            self._at_work.cancel()

    async def close(self) -> None:
        """Close the connection: by the protocol if that takes at most a second, else abruptly."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        with trio.move_on_after(2, shield=True):
            await self._database.crossing.run(aio_close, connection)


def set_local(settings: Mapping[str, str]) -> str:
    """Return settings for the rest of a transaction, as SQL. Their values are our own and need no quoting."""
    return "; ".join(f"SET LOCAL {name} = '{value}'" for name, value in settings.items())


async def _aio_nothing(_connection: object) -> None:
    """Do nothing: the operation of `Session.open`."""


async def aio_close(connection: asyncpg.Connection[Any]) -> None:
    """Close a connection: by the protocol if that takes at most a second, else abruptly (asyncio-flavored)."""
    try:
        await connection.close(timeout=1)
    except Exception:  # noqa: BLE001 - the connection is closed, whatever the error is
        connection.terminate()


@asynccontextmanager
async def open_database(options: DatabaseOptions) -> AsyncIterator[Database]:
    """Open the database for the length of a block. It connects at the first operation, not before.

    The asyncio loop is our own, even if the host has another one. It is shielded from cancellation until the block has
    ended, so that cleanup can still write. An error of the block is raised as it is, not in the exception groups of the
    loop's nurseries.
    """
    failure: BaseException | None = None
    async with open_loop() as loop:
        # No code awaits asyncio's callbacks, so their errors are logged.
        loop.set_exception_handler(_loop_error)
        database = Database(options, Crossing(loop, options))
        try:
            yield database
        except trio.Cancelled:
            raise
        except BaseException as error:  # noqa: BLE001 - raised again below
            failure = error
        finally:
            with trio.move_on_after(5, shield=True):
                await database.close()
    if failure is not None:
        raise failure


def _loop_error(_loop: object, context: dict[str, Any]) -> None:
    error = context.get("exception")
    log.warning("an asyncio callback failed", what=str(context.get("message")), error=mask_text(repr(error)))

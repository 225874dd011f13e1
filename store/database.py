"""The bridge between Trio and asyncpg: one asyncio loop, a pool, and sessions with a connection of their own.

An operation is an asyncio-flavoured function `async def _aio_x(connection, *args)` that holds all its statements; it is
crossed once as a whole (a crossing costs about 60 µs, and a transaction must never span two). Errors come out as ours:
`StoreUnavailable` for what passes, `StoreError` for what does not. No statement without a deadline: asyncpg's
`command_timeout` on our side and `statement_timeout` on the server's, because a Trio scope alone can't free a task
whose connection hangs (asyncpg waits for the acknowledgement of its own cancel request).

Not here: SQL. Rejected: triopg (unmaintained, a crossing a statement).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import asyncpg
import attrs
import msgspec
import structlog
import trio
import trio_asyncio

from dataloader.jobs.errors import SchemaError, StoreError, StoreUnavailable, Unstorable
from dataloader.jobs.masking import mask_text
from dataloader.jobs.text import read_json
from dataloader.store.loop import open_loop

P = ParamSpec("P")
T = TypeVar("T")
Connection = asyncpg.Connection

log = structlog.get_logger(__name__)

PLANNER: Final = {
    # Every statement of ours is meant to walk an index, whatever the statistics say at the moment: a plan made from a
    # table that was empty when it was analysed would scan a million rows. Where rows are named by their ids, further
    # conditions are written `(…) IS TRUE`, which no index serves: else a table with few running rows on record is
    # walked by status, once for each id. Without sorts the one index that has the wanted order is left. jit would start
    # at the price of a disabled scan.
    "enable_seqscan": "off",
    "enable_mergejoin": "off",
    "enable_sort": "off",
    "jit": "off",
}
FIXED_PLANS: Final = {"plan_cache_mode": "force_generic_plan"}
"""For sessions, which run the same few statements all day.

Left to itself the server plans each of them anew, for half a millisecond: lists of unknown length look dear to it.
"""
RETRIES: Final = 4
"""How often an operation is tried that the server rolled back because of others (deadlock, serialization)."""

_PASSING = (
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,
    asyncpg.OperatorInterventionError,
    asyncpg.InsufficientResourcesError,
    asyncpg.InvalidAuthorizationSpecificationError,
    asyncpg.InvalidCatalogNameError,
    asyncpg.ReadOnlySQLTransactionError,
    asyncpg.LockNotAvailableError,
    asyncpg.IdleInTransactionSessionTimeoutError,
    asyncpg.DeadlockDetectedError,
    asyncpg.SerializationError,
    asyncpg.InternalClientError,
    OSError,
    TimeoutError,
    asyncio.IncompleteReadError,
)
_UNSTORABLE = (
    asyncpg.DataError,
    asyncpg.IntegrityConstraintViolationError,
    asyncpg.ProgramLimitExceededError,
    UnicodeEncodeError,
)
_SCHEMA = (asyncpg.UndefinedTableError, asyncpg.UndefinedColumnError, asyncpg.UndefinedFunctionError)


@attrs.frozen(kw_only=True)
class DatabaseOptions:
    """Where the database is and how long to wait for it.

    `lock_dsn` is the direct way to it when `dsn` leads to a pooler.
    """

    dsn: str = attrs.field(repr=False)
    lock_dsn: str | None = attrs.field(default=None, repr=False)
    pool_size: int = 2
    transaction_pool_size: int = 4
    connect_timeout_s: float = 10.0
    statement_timeout_s: float = 30.0
    transaction_timeout_s: float = 600.0
    name: str = "dataloader"

    @property
    def write_deadline_s(self) -> float:
        """How long a write may hold up a cancellation: its connection's and statement's timeouts, and a little."""
        return self.connect_timeout_s + self.statement_timeout_s + 2.0


async def connect(
    options: DatabaseOptions,
    *,
    direct: bool = False,
    role: str = "pool",
    planner: Mapping[str, str] = PLANNER,
) -> asyncpg.Connection[Any]:
    """Open one connection (asyncio-flavoured), with our timeouts and with the planner told to use the indexes."""
    timeout_ms = str(int(options.statement_timeout_s * 1000))
    connection = await asyncpg.connect(
        options.lock_dsn if direct and options.lock_dsn else options.dsn,
        timeout=options.connect_timeout_s,
        command_timeout=options.statement_timeout_s,
        server_settings={
            "application_name": f"{options.name} {role}",
            "statement_timeout": timeout_ms,
            "idle_in_transaction_session_timeout": timeout_ms,
            "timezone": "UTC",
            # A claim looks twice, in two snapshots; the fence waits for a row and judges its newest version.
            "default_transaction_isolation": "read committed",
            **planner,
        },
    )
    try:
        # jsonb comes and goes as Python values.
        await connection.set_type_codec(
            "jsonb", encoder=_encode_json, decoder=read_json, schema="pg_catalog", format="text"
        )
    except BaseException:
        connection.terminate()
        raise
    return connection


def _encode_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def translate(error: BaseException) -> StoreError | None:
    """Our error for one of asyncpg's or the network's, None for one that is nobody's but the program's."""
    # Not its detail, which quotes rows and so the arguments of jobs.
    said = error.args[0] if isinstance(error, asyncpg.PostgresError) and error.args else error
    text = mask_text(f"{type(error).__name__}: {said}".rstrip(": "))
    if isinstance(error, _SCHEMA):
        return SchemaError(f"the queue's tables are not as expected ({text}); run `dataloader migrate`")
    if isinstance(error, _PASSING):
        return StoreUnavailable(f"the database can't serve us now ({text})")
    if isinstance(error, _UNSTORABLE):
        return Unstorable(text)
    if isinstance(error, asyncpg.PostgresError):
        return StoreError(text)
    return None


class Crossing:
    """Runs asyncio-flavoured functions on one asyncio loop for Trio tasks, wherever those were started."""

    def __init__(self, loop: Any) -> None:
        """`loop` is an open trio_asyncio loop; the context variable is not used, so any task may cross."""
        self._loop = loop

    async def run(self, function: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function` to its end. Raises our errors; `Cancelled` as always, after asyncpg has cleaned up."""
        try:
            result: T = await trio_asyncio.aio_as_trio(function, loop=self._loop)(*args, **kwargs)
        except asyncio.CancelledError as error:
            # Nobody on the Trio side asked for it (that would be trio.Cancelled): a connection was torn down under us.
            message = "the operation was cut off by its connection's end"
            raise StoreUnavailable(message) from error  # noqa: ASYNC104 - what ends here is asyncio's, not Trio's
        except Exception as error:
            ours = translate(error)
            if ours is None:
                raise
            raise ours from error
        return result


class Database:
    """A pool of connections for short operations; sessions are opened beside it."""

    def __init__(self, options: DatabaseOptions, crossing: Crossing, pool: asyncpg.Pool[Any]) -> None:
        """Use `open_database`."""
        self.options = options
        self.crossing = crossing
        self._pool = pool

    async def run(self, operation: Callable[Concatenate[Any, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run an operation on a connection of the pool. A cancellation may leave a write unknown: see `write`."""
        return await self.crossing.run(self._aio_run, operation, args, kwargs)

    async def write(
        self, operation: Callable[Concatenate[Any, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run an operation that must not be cancelled half way: shielded, with the options' deadline."""
        with trio.move_on_after(self.options.write_deadline_s, shield=True):
            return await self.run(operation, *args, **kwargs)
        raise StoreUnavailable("the database did not answer in time; whether the write happened is unknown")

    async def _aio_run(
        self, operation: Callable[..., Awaitable[T]], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> T:
        timeout_s = self.options.connect_timeout_s
        # The pool's own timeout would cost a task.
        async with asyncio.timeout(timeout_s):
            connection = await self._pool.acquire()
        try:
            return await _aio_repeat(partial(operation, connection, *args, **kwargs))
        finally:
            # It shields itself.
            await self._pool.release(connection, timeout=timeout_s)  # noqa: ASYNC102

    async def cut(self) -> None:
        """End the pool's connections without a word; operations that wait for an answer raise `StoreUnavailable`."""
        await self.crossing.run(_aio_terminate, self._pool)

    def pool_use(self) -> tuple[int, int]:
        """Connections of the pool that are open, and those of them that are idle."""
        return self._pool.get_size(), self._pool.get_idle_size()


async def _aio_repeat(operation: Callable[[], Awaitable[T]]) -> T:
    """Run `operation`, and again when the server rolled it back because of others."""
    for attempt in range(1, RETRIES):
        try:
            return await operation()
        except (asyncpg.DeadlockDetectedError, asyncpg.SerializationError):
            await asyncio.sleep(0.01 * 4**attempt)
    return await operation()


class Session:
    """One connection of its own, opened when first needed and again after it was lost; one operation at a time.

    Owner of the connection; nobody else keeps it. `on_connect` (asyncio-flavoured) prepares a new one.
    """

    def __init__(
        self,
        database: Database,
        role: str,
        *,
        direct: bool = False,
        on_connect: Callable[[asyncpg.Connection[Any]], Awaitable[None]] | None = None,
    ) -> None:
        """`role` is shown in pg_stat_activity; `direct` takes the DSN that leads past a pooler."""
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

    async def write(
        self, operation: Callable[Concatenate[Any, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run an operation in turn, shielded with a deadline. Raises `StoreUnavailable` when its effect is unknown."""
        return await self.write_within(None, operation, *args, **kwargs)

    async def write_within(
        self,
        timeout_s: float | None,
        operation: Callable[Concatenate[Any, P], Awaitable[T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """As `write`; the operation, once it has its turn and its connection, gets at most `timeout_s`.

        For what must be tried again on a new connection long before a statement's own timeout.
        """
        with trio.move_on_after(self._database.options.write_deadline_s, shield=True):
            async with self._turn:
                return await self._database.crossing.run(
                    self._aio_run, timeout_s, lambda connection: operation(connection, *args, **kwargs)
                )
        raise StoreUnavailable(f"the {self._role} connection did not answer in time; the effect is unknown")

    async def _aio_run(self, timeout_s: float | None, operation: Callable[[Any], Awaitable[T]]) -> T:
        if self._cut:
            raise asyncpg.InterfaceError(f"the {self._role} connection was cut")
        self._at_work = asyncio.current_task()
        if self._connection is None or self._connection.is_closed():
            connection = await connect(
                self._database.options, direct=self._direct, role=self._role, planner=PLANNER | FIXED_PLANS
            )
            try:
                if self._on_connect is not None:
                    await self._on_connect(connection)
            except BaseException:
                connection.terminate()
                raise
            self._connection = connection
        try:
            async with asyncio.timeout(timeout_s):
                return await _aio_repeat(partial(operation, self._connection))
        except (TimeoutError, asyncio.CancelledError):
            # The answer may still come: a connection in an unknown state is not used again.
            self._connection.terminate()
            raise
        finally:
            self._at_work = None

    async def cut(self) -> None:
        """End the connection for good, without a word; what waits for an answer of it raises `StoreUnavailable`."""
        await self._database.crossing.run(self._aio_cut)

    async def _aio_cut(self) -> None:
        self._cut = True
        # First the connection: a cancelled operation would wait on it for the server's acknowledgement.
        if self._connection is not None:
            self._connection.terminate()
        if self._at_work is not None:
            self._at_work.cancel()

    async def close(self) -> None:
        """Close the connection politely for a second, then at once."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        with trio.move_on_after(2, shield=True):
            await self._database.crossing.run(_aio_close, connection)


async def _aio_terminate(pool: asyncpg.Pool[Any]) -> None:  # noqa: ASYNC124 - needs the loop that a crossing brings
    pool.terminate()


async def _aio_close(connection: asyncpg.Connection[Any]) -> None:
    try:
        await connection.close(timeout=1)
    except Exception:  # noqa: BLE001 - whatever a dying connection says, it goes
        connection.terminate()


@asynccontextmanager
async def open_database(options: DatabaseOptions) -> AsyncIterator[Database]:
    """The database for the length of a block. Nothing is connected yet: the first operation does that, or raises.

    The asyncio loop lives inside the block, whether the host has none or another; it is shielded from cancellation
    until the block has ended, so that clean-up can still write. An error of the block comes out as it is, not in the
    groups of the loop's own nurseries.
    """
    failure: Exception | None = None
    async with open_loop() as loop:
        # By default an error in any asyncio callback kills the block (seen with a LISTEN callback that raised).
        loop.set_exception_handler(_loop_error)
        crossing = Crossing(loop)
        pool = await crossing.run(_aio_open_pool, options)
        try:
            yield Database(options, crossing, pool)
        except Exception as error:  # noqa: BLE001 - raised again below
            failure = error
        finally:
            with trio.move_on_after(5, shield=True) as scope:
                await crossing.run(_aio_close_pool, pool)
            if scope.cancelled_caught:
                pool.terminate()
    if failure is not None:
        raise failure


async def _aio_open_pool(options: DatabaseOptions) -> asyncpg.Pool[Any]:
    async def connect_pooled(*_args: object, **_kwargs: object) -> asyncpg.Connection[Any]:
        return await connect(options)

    return await asyncpg.create_pool(
        options.dsn, min_size=0, max_size=options.pool_size, connect=connect_pooled, reset=_aio_no_reset
    )


async def _aio_no_reset(connection: asyncpg.Connection[Any]) -> None:
    """Our operations leave nothing behind in a session; the default reset would be a round trip for each of them."""


async def _aio_close_pool(pool: asyncpg.Pool[Any]) -> None:
    try:
        await asyncio.wait_for(pool.close(), 3)
    except Exception:  # noqa: BLE001 - a pool that can't be closed politely is ended
        pool.terminate()


def _loop_error(_loop: object, context: dict[str, Any]) -> None:
    error = context.get("exception")
    log.warning("an asyncio callback failed", what=str(context.get("message")), error=mask_text(repr(error)))

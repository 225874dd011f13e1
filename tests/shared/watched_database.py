"""Database whose statements a test sees: each runs on the real connection, between two callbacks of the test."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import attrs

Seen: TypeAlias = Callable[..., Awaitable[None]]
"""Called with the real connection, the statement and its values, on asyncio; afterwards with its `answer`."""


async def _ignore(_connection: Any, _sql: str, *_values: Any, answer: Any = None) -> None: ...


class ProxiedConnection:
    """Connection that sends each statement by `_send`, which a subclass overrides."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    async def execute(self, sql: str, *values: Any, **options: Any) -> Any:
        return await self._send("execute", sql, *values, **options)

    async def fetch(self, sql: str, *values: Any, **options: Any) -> Any:
        return await self._send("fetch", sql, *values, **options)

    async def fetchrow(self, sql: str, *values: Any, **options: Any) -> Any:
        return await self._send("fetchrow", sql, *values, **options)

    async def fetchval(self, sql: str, *values: Any, **options: Any) -> Any:
        return await self._send("fetchval", sql, *values, **options)

    async def _send(self, method: str, sql: str, *values: Any, **options: Any) -> Any:
        return await getattr(self._connection, method)(sql, *values, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


class WatchedConnection(ProxiedConnection):
    """Connection that calls `before` and `after` around each statement."""

    def __init__(self, connection: Any, before: Seen = _ignore, after: Seen = _ignore) -> None:
        super().__init__(connection)
        self._before = before
        self._after = after

    async def _send(self, method: str, sql: str, *values: Any, **options: Any) -> Any:
        await self._before(self._connection, sql, *values)
        answer = await super()._send(method, sql, *values, **options)
        await self._after(self._connection, sql, *values, answer=answer)
        return answer


@attrs.frozen
class WatchedDatabase:
    """Database of the store, with watched connections."""

    _database: Any
    _before: Seen = attrs.field(default=_ignore, kw_only=True)
    _after: Seen = attrs.field(default=_ignore, kw_only=True)

    async def run(self, operation: Callable[..., Awaitable[Any]], *args: Any, **kwargs: Any) -> Any:
        return await self._database.run(self._watched, operation, *args, **kwargs)

    async def write(self, operation: Callable[..., Awaitable[Any]], *args: Any, **kwargs: Any) -> Any:
        return await self._database.write(self._watched, operation, *args, **kwargs)

    async def _watched(
        self, connection: Any, operation: Callable[..., Awaitable[Any]], *args: Any, **kwargs: Any
    ) -> Any:
        return await operation(WatchedConnection(connection, self._before, self._after), *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._database, name)

"""Statements that need no function around them, for `Database.run` and `Database.write` (asyncio-flavored)."""

from __future__ import annotations

from typing import Any


async def aio_fetch(connection: Any, sql: str, *values: object) -> list[Any]:
    """Return the rows of a statement."""
    return list(await connection.fetch(sql, *values))


async def aio_fetchrow(connection: Any, sql: str, *values: object) -> Any:
    """Return the first row of a statement; None if it has none."""
    return await connection.fetchrow(sql, *values)


async def aio_fetchval(connection: Any, sql: str, *values: object) -> Any:
    """Return the first value of the first row of a statement; None if it has no row."""
    return await connection.fetchval(sql, *values)

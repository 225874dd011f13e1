"""Counts of constant cost: exact up to a limit, and above it the planner's estimate."""

from __future__ import annotations

from typing import Any, Final

import msgspec

EXACT: Final = 10_000
"""Maximum exact count."""

_COUNT: Final = "SELECT count(*) FROM ({query} LIMIT {most}) AS counted"


async def aio_counted(connection: Any, query: str, *args: Any) -> int:
    """Return the number of rows of a query without an order (asyncio-flavored)."""
    counted: int = await connection.fetchval(_COUNT.format(query=query, most=EXACT + 1), *args)
    if counted <= EXACT:
        return counted
    return max(counted, await aio_estimated(connection, query, *args))


async def aio_estimated(connection: Any, query: str, *args: Any) -> int:
    """Return the planner's estimate of a query's rows (asyncio-flavored)."""
    plan = await connection.fetchval(f"EXPLAIN (FORMAT JSON) {query}", *args)
    return int(msgspec.json.decode(plan)[0]["Plan"]["Plan Rows"])

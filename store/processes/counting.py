"""Counts that cost the same however much there is: exact up to a bound, and beyond it the planner's estimate."""

from __future__ import annotations

from typing import Any, Final

import msgspec

EXACT: Final = 10_000
"""The greatest number that is counted."""

_COUNT: Final = "SELECT count(*) FROM ({query} LIMIT {most}) AS counted"


async def aio_counted(connection: Any, query: str, *args: Any) -> int:
    """How many rows a query without an order has (asyncio-flavoured)."""
    counted: int = await connection.fetchval(_COUNT.format(query=query, most=EXACT + 1), *args)
    if counted <= EXACT:
        return counted
    return max(counted, await aio_estimated(connection, query, *args))


async def aio_estimated(connection: Any, query: str, *args: Any) -> int:
    """How many rows the planner expects of a query (asyncio-flavoured)."""
    plan = await connection.fetchval(f"EXPLAIN (FORMAT JSON) {query}", *args)
    return int(msgspec.json.decode(plan)[0]["Plan"]["Plan Rows"])

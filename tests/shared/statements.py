"""Statements that the connections of a database's pool send, as the driver reports them."""

from __future__ import annotations

import asyncio
from typing import Any

import trio

from dataloader.store.connection.bridge import Database


async def record_statements(database: Database) -> list[Any]:
    """Return a list to which each statement that the pool sends from now on is added, as asyncpg's `LoggedQuery`."""
    statements: list[Any] = []
    number = database.options.pool_size
    all_here = asyncio.Barrier(number)
    async with trio.open_nursery() as nursery:
        for _ in range(number):
            nursery.start_soon(database.pool.run, _aio_record, all_here, statements)
    return statements


async def _aio_record(connection: Any, all_here: asyncio.Barrier, statements: list[Any]) -> None:
    connection.add_query_logger(statements.append)
    # A connection is free again only after each connection of the pool has a task.
    await all_here.wait()

"""Statements of users that only read: those of a load's transform."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dataloader.jobs.errors import StoreError
from dataloader.store.connection.bridge import set_local
from dataloader.store.connection.connect import PLANNER_OF_USERS
from dataloader.store.connection.error_meanings import READ_ONLY
from dataloader.store.queue.transaction import told_of_users


async def aio_read(connection: Any, sql: str, values: Sequence[object]) -> list[dict[str, Any]]:
    """Return the rows of a user's statement, in a read-only transaction (asyncio-flavored)."""
    try:
        async with connection.transaction(readonly=True):
            await connection.execute(set_local(PLANNER_OF_USERS))
            with told_of_users(connection):
                return [dict(row) for row in await connection.fetch(sql, *values)]
    except READ_ONLY as error:
        # The transaction is read-only, not the server, so this is no outage.
        raise StoreError(f"a Reader can only read: {error}") from error

"""Reader with which a transform reads the queue's database."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import trio

from dataloader.store.connection.bridge import Database, Session
from dataloader.store.etl.user_reads import aio_read

CLOSE_S: Final = 4.0


class Reader:
    """Access to the queue's database for the transform of a worker, on a dedicated connection of the worker.

    Call it in the worker's thread, which waits for the answer. Each call is a separate read-only transaction. It raises
    `StoreError`, which is a failure of the record; `StoreUnavailable` ends the run, which the queue retries.
    """

    def __init__(self, database: Database) -> None:
        """Do not connect until the first call."""
        self._session = Session(database, "workers")

    def fetch(self, sql: str, *args: Any) -> list[dict[str, Any]]:
        """Return the rows of a statement, by the names of its columns. `$1`, `$2`, … in it are the `args`."""
        rows: list[dict[str, Any]] = trio.from_thread.run(self._session.run, aio_read, sql, args)
        return rows

    def fetchval(self, sql: str, *args: Any) -> Any:
        """Return the first column of the first row, None if there is no row."""
        return next((value for row in self.fetch(sql, *args) for value in row.values()), None)

    async def close(self) -> None:
        """Close the connection permanently: an abandoned thread cannot open it again."""
        await self._session.close()
        await self._session.cut()


@asynccontextmanager
async def open_reader(database: Database) -> AsyncIterator[Reader]:
    """Open a reader for the duration of a block."""
    reader = Reader(database)
    try:
        yield reader
    finally:
        with trio.move_on_after(CLOSE_S, shield=True):
            await reader.close()

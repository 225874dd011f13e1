"""Sends single calls and starts of processes in batches, without waiting for a batch to fill.

Requests that arrive while a statement is in progress share the next one. A locked process does not delay the others:
all requests for it wait together in a separate group. A request with another result than "added" is sent again by
itself, to get its answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import trio

from dataloader.jobs.process_requests import ProcessRequest
from dataloader.store.connection.bridge import Database
from dataloader.store.connection.error_meanings import LOCKED
from dataloader.store.connection.gatherer import Gatherer
from dataloader.store.processes.requests import Asked, Row, aio_ask, aio_ask_many, row_of_request


class Asker:
    """Sends the requests of all clients in one OS process."""

    def __init__(self, database: Database, lease_s: int) -> None:
        """Set the lease of wake-up jobs, `lease_s` in seconds."""
        self._database = database
        self._lease_s = lease_s
        self._all = self._gatherer(waits=False)
        self._of_process: dict[tuple[str, str], _LockedProcess] = {}

    async def ask(self, request: ProcessRequest) -> Asked:
        """Send a request. A canceled caller sends nothing. Raises `BadRequest`, `StoreError`."""
        await trio.lowlevel.checkpoint_if_cancelled()
        if request.kind != "repair":
            row = row_of_request(request)
            asked = await self._all.ask(row)
            if asked is not None and asked.verdict == "locked":
                with self._of_locked(request) as gatherer:
                    asked = await gatherer.ask(row)
            if asked is not None and asked.verdict == "added":
                return asked
        return await self._database.write(aio_ask, request, self._lease_s)

    def _gatherer(self, *, waits: bool) -> Gatherer[Row, Asked]:
        """Return a gatherer whose statements wait for locked processes or do not."""

        async def send(rows: Sequence[Row]) -> Mapping[int, Asked]:
            return await self._database.run(_aio_ask, rows, self._lease_s, waits=waits)

        too_late = "the database did not answer in time; the request may or may not be stored"
        return Gatherer(send, self._database.options.write_deadline_s, too_late)

    @contextmanager
    def _of_locked(self, request: ProcessRequest) -> Iterator[Gatherer[Row, Asked]]:
        """Return the gatherer of the callers that wait for a locked process."""
        name = request.type, request.process_id
        if (locked := self._of_process.get(name)) is None:
            locked = self._of_process[name] = _LockedProcess(self._gatherer(waits=True))
        locked.callers += 1
        try:
            yield locked.gatherer
        finally:
            locked.callers -= 1
            if not locked.callers:
                del self._of_process[name]


async def _aio_ask(connection: Any, rows: Sequence[Row], lease_s: int, *, waits: bool) -> dict[int, Asked]:
    try:
        return await aio_ask_many(connection, rows, lease_s, waits=waits)
    except LOCKED:
        if waits:
            raise
        return {}  # a wait for a process or key of another session timed out: send each by itself


@attrs.define(eq=False)
class _LockedProcess:
    """Locked process, with the number of callers that wait for it."""

    gatherer: Gatherer[Row, Asked]
    callers: int = 0

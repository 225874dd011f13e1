"""Sends single calls and starts of processes in batches, without waiting for a batch to fill.

Requests that arrive while a statement is in progress share the next one. A locked process does not delay the others:
all requests for it wait together in a separate line. A request with another result than "added" is sent again by
itself, to get its answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import attrs
import trio

from dataloader.jobs.errors import BadRequest, StoreError, StoreUnavailable
from dataloader.jobs.process_requests import ProcessRequest
from dataloader.store.connection.bridge import Database, acquire
from dataloader.store.connection.error_meanings import LOCKED
from dataloader.store.processes.requests import Asked, Row, aio_ask, aio_ask_many, row_of

MAX_GROUP: Final = 250
"""Maximum requests of one statement."""


class Asker:
    """Sends the requests of all clients in one OS process."""

    def __init__(self, database: Database, lease_s: int) -> None:
        """Set the lease of wake-up jobs, `lease_s` in seconds."""
        self._database = database
        self._lease_s = lease_s
        self._all = _Line(waits=False)
        self._of_process: dict[tuple[str, str], _Line] = {}

    async def ask(self, request: ProcessRequest) -> Asked:
        """Send a request. A canceled caller sends nothing. Raises `BadRequest`, `StoreError`."""
        await trio.lowlevel.checkpoint_if_cancelled()
        if request.kind != "repair":
            row = row_of(request)
            asked = await self._with_others(self._all, row)
            if asked is not None and asked.verdict == "locked":
                with self._line_of(request) as line:
                    asked = await self._with_others(line, row)
            if asked is not None and asked.verdict == "added":
                return asked
        return await self._database.write(aio_ask, request, self._lease_s)

    @contextmanager
    def _line_of(self, request: ProcessRequest) -> Iterator[_Line]:
        """Return the line of the callers that wait for a locked process."""
        name = request.type, request.process_id
        line = self._of_process.setdefault(name, _Line(waits=True))
        line.users += 1
        try:
            yield line
        finally:
            line.users -= 1
            if not line.users:
                del self._of_process[name]

    async def _with_others(self, line: _Line, row: Row) -> Asked | None:
        """Return the answer "added" or "locked"; None if the request must be sent by itself."""
        group, place = line.group, len(line.group.rows)
        group.rows.append(row)
        if len(group.rows) == MAX_GROUP:
            line.group = _Group()
        if place == 0:
            await self._ask(line, group)
        else:
            # As for the first request of the group: it is sent whether or not the caller still waits.
            with trio.move_on_after(self._database.options.write_deadline_s, shield=True):
                await group.ended.wait()
        if group.error is not None:
            raise StoreUnavailable(str(group.error)) from group.error
        return group.answers.get(place)

    async def _ask(self, line: _Line, group: _Group) -> None:
        """Send the whole group when it is next. Its first caller does this and cannot be canceled meanwhile."""
        group.error = StoreUnavailable("the database did not answer in time; whether it was asked for is unknown")
        try:
            with trio.move_on_after(self._database.options.write_deadline_s, shield=True):
                await acquire(line.turn)
                try:
                    if line.group is group:
                        line.group = _Group()
                    group.answers = await self._database.run(_aio_ask, group.rows, self._lease_s, waits=line.waits)
                finally:
                    line.turn.release()
                group.error = None
        except StoreUnavailable as error:
            group.error = error
        except (StoreError, BadRequest):
            group.error = None  # one of them cannot be stored: send each by itself
        finally:
            if line.group is group:
                line.group = _Group()  # it timed out before it was sent: it must not get more requests
            group.ended.set()


async def _aio_ask(connection: Any, rows: Sequence[Row], lease_s: int, *, waits: bool) -> dict[int, Asked]:
    try:
        return await aio_ask_many(connection, rows, lease_s, waits=waits)
    except LOCKED:
        if waits:
            raise
        return {}  # a wait for a process or key of another session timed out: send each by itself


@attrs.define(eq=False)
class _Group:
    """Requests that are sent together, and their answers by the requests' places."""

    rows: list[Row] = attrs.field(factory=list)
    answers: dict[int, Asked] = attrs.field(factory=dict)
    error: StoreUnavailable | None = None
    ended: trio.Event = attrs.field(factory=trio.Event)


@attrs.define(eq=False)
class _Line:
    """Callers of one kind of statement, group after group. `waits`: for locked processes."""

    waits: bool
    users: int = 0
    group: _Group = attrs.field(factory=_Group)
    turn: trio.Lock = attrs.field(factory=trio.Lock)

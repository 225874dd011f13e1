"""Receives a request's body within the limit of its route, and bounds what all requests hold in memory together.

The limit is kept while the body comes: what is longer is refused at its first byte too many, and nothing of it is kept.
Bodies and answers of a few kilobytes are not counted, so that a flood of long ones keeps no ordinary request out. Nor
do slow clients keep long bodies out: when there is no room, the body that has been coming for longest gives way.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Final

import attrs
import trio

from dataloader.web.problems import ProblemError, too_busy
from dataloader.web.server.refusals import Refusal, Refusals

BODY_S: Final = 30.0
"""What a body may take to come."""
NOT_COUNTED: Final = 16 << 10
"""So many bytes of a body, or of an answer, are not counted."""
YOUNG_S: Final = 1.0
"""A body that has been coming for less does not give way to others yet."""
BEFORE_ITS_ROUTE: Final = 128 << 10
"""What may have come before it is known how much may."""
MOST_RECEIVED: Final = 32 << 20
MOST_SENT: Final = 32 << 20
_CLOSE: Final = {"Connection": "close"}
"""What was not read stands before the next request."""


@attrs.define(eq=False)
class Bound:
    """What requests hold, bytes or places, `most` in all. What is taken is given back by the one who took it."""

    most: int
    held: int = 0

    def take(self, number: int) -> bool:
        """Whether there is room for so many more, which are taken then."""
        if self.held + number > self.most:
            return False
        self.held += number
        return True

    def give(self, number: int) -> None:
        """So many are free again."""
        self.held -= number


class Body:
    """What has come of a request's body. In the place of Quart's, which knows one limit for all routes."""

    def __init__(
        self,
        announced: int | None,
        long_bodies: LongBodies,
        refusals: Refusals,
        ask: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint,
    ) -> None:
        """`announced` is its Content-Length, if it has one; `ask` asks a client for it that waits for that."""
        self._announced = announced
        self._ask = ask
        self._long_bodies = long_bodies
        self._refusals = refusals
        self._limit = BEFORE_ITS_ROUTE
        self._data = bytearray()
        self._taken = 0
        self._refused: ProblemError | None = None
        self._dropped = False
        self._ended = trio.Event()

    def append(self, data: bytes) -> None:
        """More of it has come. Quart calls this, and `set_complete` at the end."""
        if self._dropped or not data:
            return
        length = len(self._data) + len(data)
        more = max(0, length - NOT_COUNTED) - self._taken
        if length > self._limit:
            self._refuse_as_long()
        elif not self._long_bodies.take_for(self, more):
            self.give_way()
        else:
            self._taken += more
            self._data += data

    def set_complete(self) -> None:
        """All of it has come."""
        self._long_bodies.has_come(self)
        self._ended.set()

    def give_way(self) -> None:
        """Refuse it, because others need the room."""
        self._refusals.count(Refusal.BODIES)
        self._refuse(too_busy("Too many long bodies arrive at the same time; send the request again.", headers=_CLOSE))

    async def read(self, limit: int) -> bytearray:
        """All of it, as soon as it has come. Raises `ProblemError`: 413 over `limit`, 408 if it is late, 503."""
        self._limit = limit
        if max(self._announced or 0, len(self._data)) > limit:
            self._refuse_as_long()
        with trio.move_on_after(BODY_S) as waiting:
            if not self._ended.is_set():
                await self._ask()
            await self._ended.wait()
        if waiting.cancelled_caught:
            self._refusals.count(Refusal.LATE_BODY)
            detail = f"The body did not arrive within {BODY_S:g} s."
            self._refuse(ProblemError(HTTPStatus.REQUEST_TIMEOUT, detail, headers=_CLOSE))
        if self._refused is not None:
            raise self._refused
        return self._data

    def drop(self) -> None:
        """Forget it, and all that may still come."""
        self._dropped = True
        self._data = bytearray()
        self._long_bodies.has_come(self)
        self._long_bodies.give(self._taken)
        self._taken = 0

    def _refuse_as_long(self) -> None:
        self._refusals.count(Refusal.LONG_BODY)
        detail = f"The body must have at most {self._limit:,} bytes." if self._limit else "This address takes no body."
        self._refuse(ProblemError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, detail, headers=_CLOSE))

    def _refuse(self, problem: ProblemError) -> None:
        self._refused = problem
        self.drop()
        self._ended.set()


@attrs.define(eq=False)
class LongBodies(Bound):
    """What long bodies hold. While they come, the oldest of them makes room for the others."""

    _coming: dict[Body, float] = attrs.field(factory=dict)

    def take_for(self, body: Body, number: int) -> bool:
        """Whether there is room for `number` more bytes of a body, which are taken then."""
        if number:
            self._coming.setdefault(body, trio.current_time())
        while not self.take(number):
            oldest, began = next(iter(self._coming.items()))
            if oldest is body or trio.current_time() < began + YOUNG_S:
                return False
            oldest.give_way()
        return True

    def has_come(self, body: Body) -> None:
        """No more of it is awaited: it is complete, or was refused."""
        self._coming.pop(body, None)

"""Receives a request's body within the limit of its route, and bounds the memory of all requests together.

The limit applies while the body arrives: at the first byte beyond it, the body is refused and its bytes are dropped.
Bodies and answers of a few kilobytes are not counted, so that many long ones cannot keep ordinary requests out. Slow
clients cannot keep long bodies out either: if there is no room, the body that has been arriving for longest is refused.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Final

import attrs
import trio

from dataloader.web.problems import ProblemError, too_busy
from dataloader.web.server.limits import STANDARD, HttpLimits
from dataloader.web.server.refusals import Refusal, Refusals

NOT_COUNTED: Final = 16 << 10
"""First bytes of each body, and of each answer, that are not counted."""
_CLOSE: Final = {"Connection": "close"}
"""Header for refusals: the unread rest of the body would come before the next request."""


@attrs.define(eq=False)
class Bound:
    """Bound for bytes or slots that requests hold together: `most` in all. A caller returns the number that it took."""

    most: int
    held: int = 0

    def take(self, number: int) -> bool:
        """Take `number` more if there is room; return whether there was."""
        if self.held + number > self.most:
            return False
        self.held += number
        return True

    def give(self, number: int) -> None:
        """Give `number` back."""
        self.held -= number


class Body:
    """Part of a request's body that has arrived. Replaces Quart's class, which has one limit for all routes."""

    def __init__(
        self,
        announced: int | None,
        long_bodies: LongBodies,
        refusals: Refusals,
        ask: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint,
    ) -> None:
        """Prepare a body. `announced` is its Content-Length; `ask` sends "100 Continue" to a waiting client."""
        self._announced = announced
        self._ask = ask
        self._long_bodies = long_bodies
        self._refusals = refusals
        self._limits = long_bodies.limits
        self._limit = self._limits.body_before_route_bytes
        self._data = bytearray()
        self._taken = 0
        self._refused: ProblemError | None = None
        self._dropped = False
        self._ended = trio.Event()

    def append(self, data: bytes) -> None:
        """Add data that has arrived; `set_complete` follows at the end."""
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
        """Mark the body as complete."""
        self._long_bodies.has_come(self)
        self._ended.set()

    def give_way(self) -> None:
        """Refuse the body, because other bodies need the room."""
        self._refusals.count(Refusal.BODIES)
        self._refuse(too_busy("The server is receiving too many long bodies; send the request again.", headers=_CLOSE))

    async def read(self, limit: int) -> bytearray:
        """Wait for the whole body and return it.

        Raises `ProblemError`: 413 if it has more than `limit` bytes, 408 if it is late, 503 if there is no room for it.
        """
        self._limit = limit
        if max(self._announced or 0, len(self._data)) > limit:
            self._refuse_as_long()
        with trio.move_on_after(self._limits.body_s) as waiting:
            if not self._ended.is_set():
                await self._ask()
            await self._ended.wait()
        if waiting.cancelled_caught:
            self._refusals.count(Refusal.LATE_BODY)
            detail = f"The body did not arrive within {self._limits.body_s:g} s."
            self._refuse(ProblemError(HTTPStatus.REQUEST_TIMEOUT, detail, headers=_CLOSE))
        if self._refused is not None:
            raise self._refused
        return self._data

    def drop(self) -> None:
        """Free the body's memory, and ignore data that still arrives."""
        self._dropped = True
        self._data = bytearray()
        self._long_bodies.has_come(self)
        self._long_bodies.give(self._taken)
        self._taken = 0

    def _refuse_as_long(self) -> None:
        self._refusals.count(Refusal.LONG_BODY)
        detail = (
            f"The body must have at most {self._limit:,} bytes." if self._limit else "This address accepts no body."
        )
        self._refuse(ProblemError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, detail, headers=_CLOSE))

    def _refuse(self, problem: ProblemError) -> None:
        self._refused = problem
        self.drop()
        self._ended.set()


@attrs.define(eq=False)
class LongBodies(Bound):
    """Bound for the bytes that long bodies hold. While they arrive, the oldest of them gives way to the others."""

    limits: HttpLimits = attrs.field(default=STANDARD, kw_only=True)
    _coming: dict[Body, float] = attrs.field(factory=dict)

    def take_for(self, body: Body, number: int) -> bool:
        """Take `number` more bytes for a body if there is room; return whether there was."""
        if number:
            self._coming.setdefault(body, trio.current_time())
        while not self.take(number):
            oldest, began = next(iter(self._coming.items()))
            if oldest is body or trio.current_time() < began + self.limits.young_body_s:
                return False
            oldest.give_way()
        return True

    def has_come(self, body: Body) -> None:
        """Note that a body no longer arrives: it is complete, or was refused."""
        self._coming.pop(body, None)

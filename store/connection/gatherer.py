"""Sends the requests of many callers together, without waiting for a group to fill."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, Generic, TypeVar

import attrs
import trio

from dataloader.jobs.errors import BadRequest, StoreError, StoreUnavailable
from dataloader.store.connection.bridge import acquire

R = TypeVar("R")
A = TypeVar("A")

MAX_GROUP: Final = 250
"""Maximum requests of one statement."""


@attrs.define(eq=False)
class _GatheredGroup(Generic[R, A]):
    """Requests that are sent together, and their answers by the requests' places."""

    requests: list[R] = attrs.field(factory=list)
    answers: Mapping[int, A] = attrs.field(factory=dict)
    error: StoreUnavailable | None = None
    ended: trio.Event | None = None
    """Event for the callers of all requests but the first, made by the second."""


@attrs.define(eq=False)
class Gatherer(Generic[R, A]):
    """Gatherer of the requests for one kind of statement.

    Requests that arrive while a statement is in progress share the next one. `send` runs the statement and returns the
    answers by the requests' places. Its callers wait up to `answer_s` seconds; `too_late` is the text of their error.
    `yields` says after a statement whether the tasks that it has woken run before its callers resume.
    """

    _send: Callable[[Sequence[R]], Awaitable[Mapping[int, A]]]
    _answer_s: float
    _too_late: str
    _yields: Callable[[], bool] | None = None
    _group: _GatheredGroup[R, A] = attrs.field(factory=_GatheredGroup, init=False)
    _turn: trio.Lock = attrs.field(factory=trio.Lock, init=False)

    async def ask(self, request: R) -> A | None:
        """Return the answer to a request, or None if the request must be sent by itself.

        The request is sent even if its caller is cancelled meanwhile. Raises `StoreUnavailable`; it is then unknown
        whether it had an effect.
        """
        group, place = self._group, len(self._group.requests)
        group.requests.append(request)
        if len(group.requests) == MAX_GROUP:
            self._group = _GatheredGroup()
        if place == 0:
            await self._send_group(group)
        else:
            if group.ended is None:
                group.ended = trio.Event()
            # As for the first request of the group: it is sent whether or not the caller still waits.
            with trio.move_on_after(self._answer_s, shield=True):
                await group.ended.wait()
        if group.error is not None:
            raise StoreUnavailable(str(group.error)) from group.error
        return group.answers.get(place)

    async def _send_group(self, group: _GatheredGroup[R, A]) -> None:
        """Send the whole group when it is next. Its first caller does this and cannot be canceled meanwhile."""
        group.error = StoreUnavailable(self._too_late)
        try:
            with trio.move_on_after(self._answer_s, shield=True):
                await acquire(self._turn)
                try:
                    if self._group is group:
                        self._group = _GatheredGroup()
                    group.answers = await self._send(group.requests)
                finally:
                    self._turn.release()
                group.error = None
                if self._yields is not None and self._yields():
                    # Two turns of the loop: in the first one the callers may still come first.
                    await trio.lowlevel.cancel_shielded_checkpoint()
                    await trio.lowlevel.cancel_shielded_checkpoint()
        except StoreUnavailable as error:
            group.error = error
        except (StoreError, BadRequest):
            group.error = None  # one of them cannot be stored: send each by itself
        finally:
            if self._group is group:
                self._group = _GatheredGroup()  # it timed out before it was sent: it must not get more requests
            if group.ended is not None:
                group.ended.set()

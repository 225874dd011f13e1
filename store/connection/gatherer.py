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
    """Event for the callers that do not send the group, made by the first of them."""


@attrs.define(eq=False)
class Gatherer(Generic[R, A]):
    """Gatherer of the requests for one kind of statement.

    Requests that arrive while a statement is in progress share the next one. `send` runs the statement and returns the
    answers by the requests' places. Its callers wait up to `answer_s` seconds; `too_late` is the text of their error.
    `yields` says after a statement whether the tasks that it has woken run before its callers resume.

    The first caller of a group sends it, and no caller can leave before the answer. With a `nursery`, a task of the
    nursery sends the group, so that canceled callers leave immediately. If the nursery is canceled, callers get the
    error `too_late`.
    """

    _send: Callable[[Sequence[R]], Awaitable[Mapping[int, A]]]
    _answer_s: float
    _too_late: str
    _yields: Callable[[], bool] | None = None
    _nursery: trio.Nursery | None = None
    _max_group: int = MAX_GROUP
    _group: _GatheredGroup[R, A] = attrs.field(factory=_GatheredGroup, init=False)
    _turn: trio.Lock = attrs.field(factory=trio.Lock, init=False)

    async def ask(self, request: R) -> A | None:
        """Return the answer to a request, or None if the request must be sent by itself.

        The request is sent even if its caller is canceled meanwhile. Raises `StoreUnavailable`; it is then unknown
        whether it had an effect.
        """
        group, place = self._group, len(self._group.requests)
        group.requests.append(request)
        if place == 0:
            group.error = StoreUnavailable(self._too_late)  # until the statement has ended
        if len(group.requests) == self._max_group:
            self._group = _GatheredGroup()
        if place == 0 and self._nursery is None:
            await self._send_group(group)
        else:
            if group.ended is None:
                group.ended = trio.Event()
                if self._nursery is not None:
                    self._nursery.start_soon(self._send_group, group)
            if self._nursery is not None:
                await group.ended.wait()  # the task has a deadline
            else:
                # As for the first request of the group: it is sent whether or not the caller still waits.
                with trio.move_on_after(self._answer_s, shield=True):
                    await group.ended.wait()
        if group.error is not None:
            raise StoreUnavailable(str(group.error)) from group.error
        return group.answers.get(place)

    async def _send_group(self, group: _GatheredGroup[R, A]) -> None:
        """Send the whole group when it is next. A caller that does this cannot be canceled meanwhile."""
        try:
            with trio.move_on_after(self._answer_s, shield=self._nursery is None):
                await acquire(self._turn)
                try:
                    if self._nursery is not None:
                        # Callers that the statement before has woken ask again in this turn of the loop. They join.
                        await trio.lowlevel.checkpoint()
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

"""Rate limiter: one request at a time to a source, across all processes, with pauses and rate limits.

The database stores each supplier's request slot (store/etl/suppliers.py). This file waits for the slot and shows the
wait in the run's progress. A run has the slot until its request has ended: the response is read or its connection is
closed. The pause begins then. A source may still work on a canceled request, so the rate limiter waits a little for its
response before it closes the connection.
"""

from __future__ import annotations

import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Final, Generic, TypeVar

import attrs
import trio

from dataloader.flows.etl.declare.pipeline_limits import LIMITS
from dataloader.flows.etl.run.load_progress import LoadProgress
from dataloader.jobs.errors import StoreError
from dataloader.jobs.limits import RateLimit
from dataloader.store.connection.bridge import Database
from dataloader.store.etl.suppliers import SlotAnswer, aio_return_slot, aio_take_slot
from dataloader.store.limits.closed_supplier import ClosedSupplier

T = TypeVar("T")

LEASE_MARGIN_S: Final = 15.0
"""Seconds that a slot's lease outlasts the request's deadline: the time for the statements of the database."""
LOOK_S: Final = (0.1, 1.0)
"""Shortest and longest pause, in seconds, between checks of a slot that another run has: its end is unknown."""


@attrs.define(kw_only=True)
class SlotForRequest:
    """Right to send one request.

    Attributes:
        linger_s: returns the seconds to wait for the response to a canceled request.
        ends_at: time when the slot ends at the latest, by Trio's clock.
        hint_s: seconds for which the source asks for no request, by its response.
        tries: number of the request's try, from 1.
    """

    linger_s: Callable[[], float]
    ends_at: float = math.inf
    hint_s: float = 0.0
    tries: int = 1

    def within(self, timeout_s: float) -> float:
        """Return the seconds for the request: `timeout_s`, or less if the slot ends sooner."""
        return max(0.0, min(timeout_s, self.ends_at - trio.current_time()))

    async def send(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Await the slot's request, for `linger_s()` after a cancellation. Raises the errors of `ask`."""
        await trio.lowlevel.checkpoint_if_cancelled()
        sent = _Sent[T]()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(sent.run, ask)
                try:
                    await sent.ended.wait()
                finally:
                    sent.scope.deadline = trio.current_time() + self.linger_s()
        except BaseExceptionGroup:
            # Only this task has raised: it was canceled. Raise the cancellation outside of the nursery's exception
            # group.
            await trio.lowlevel.checkpoint_if_cancelled()  # noqa: ASYNC120 - it raises that cancellation
            raise
        return sent.answer()


@attrs.define
class _Sent(Generic[T]):
    """Request that continues when its waiting task is canceled, until the deadline of its `scope`."""

    scope: trio.CancelScope = attrs.field(factory=lambda: trio.CancelScope(shield=True))
    ended: trio.Event = attrs.field(factory=trio.Event)
    _answer: list[T] = attrs.field(factory=list)
    _error: Exception | None = None

    async def run(self, ask: Callable[[], Awaitable[T]]) -> None:
        with self.scope:
            try:
                self._answer.append(await ask())
            except Exception as error:  # noqa: BLE001 - any error of a source is raised in the waiting task
                self._error = error
        self.ended.set()

    def answer(self) -> T:
        if self._error is not None:
            raise self._error
        return self._answer[0]


@attrs.frozen(kw_only=True)
class RateLimiter:
    """Request slots of one run, whose fencing token is `holder`. Times are in seconds.

    `linger_s` returns the time to wait for the response to a canceled request. A run that was stopped has `last_word_s`
    to return its slot.
    """

    database: Database
    holder: int
    progress: LoadProgress
    rate_min: float
    rate_max: float
    lease_s: float
    linger_s: Callable[[], float] = lambda: LIMITS.linger_s
    last_word_s: float = 2.5
    rate_limits: tuple[RateLimit, ...] = ()
    draw: random.Random = attrs.field(factory=random.Random)

    @asynccontextmanager
    async def slot(self, source: str | None, tries: int) -> AsyncIterator[SlotForRequest]:
        """Wait for the slot of `source` for a try of a request, and hold it in a block. None has no limit."""
        slot = SlotForRequest(linger_s=self.linger_s, tries=tries)
        if source is None:
            yield slot
            return
        slot.ends_at = await self._wait(source)
        try:
            yield slot
        finally:
            pause_s = self.draw.uniform(self.rate_min, self.rate_max)
            waits_for = "pause" if slot.hint_s <= pause_s else "retry-after"
            # Shielded even in a stopped run: otherwise no request could be sent until the slot's lease ends.
            until = max(trio.current_effective_deadline(), trio.current_time() + self.last_word_s)
            with trio.CancelScope(deadline=until, shield=True):
                await self.database.write(aio_return_slot, source, self.holder, max(pause_s, slot.hint_s), waits_for)

    async def _wait(self, source: str) -> float:
        """Wait for the slot; return the time when it ends at the latest, by Trio's clock."""
        look_s, closed = LOOK_S[0], ClosedSupplier(source)
        try:
            while True:
                asked_at = trio.current_time()
                try:
                    answer = await self.database.write(
                        aio_take_slot, source, self.holder, self.lease_s, self.rate_limits
                    )
                except StoreError as error:
                    answer = SlotAnswer(closed.wait_s(error), "error")
                if answer.waits_for is None:
                    return asked_at + self.lease_s
                wait_s = answer.wait_s
                if answer.waits_for == "request":
                    wait_s, look_s = min(wait_s, look_s * self.draw.uniform(0.8, 1.2)), min(look_s * 2, LOOK_S[1])
                self.progress.waiting = {
                    "for": "rate-limit" if answer.waits_for == "budget" else answer.waits_for,
                    "source": source,
                    "until": (datetime.now(UTC) + timedelta(seconds=answer.wait_s)).isoformat(timespec="seconds"),
                }
                await trio.sleep(wait_s)
        finally:
            self.progress.waiting = None

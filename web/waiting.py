"""Readers that wait for a change of a job (Q3's `?wait=`): a bounded number, and all are answered when a drain begins.

Each of them makes the database look at its job now and then, and holds a connection. Whoever waits when the process
begins to shut down hears how the job stands, instead of being cut off at the end.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Final
from uuid import UUID

import attrs
import trio

from dataloader.store.queue.waits import Waits
from dataloader.web.problems import RETRY_AFTER_S, ProblemError
from dataloader.web.server.refusals import Refusal, Refusals

LATE_WAIT_S: Final = 1.0
"""The longest wait once a drain has begun: short enough to be answered, long enough that nobody asks all the time."""


@attrs.define(eq=False)
class Waiting:
    """The waiting readers of one app; `most` may wait at a time."""

    waits: Waits
    refusals: Refusals
    most: int
    _readers: set[trio.CancelScope] = attrs.field(factory=set)
    _draining: bool = False

    async def until_changed(self, job_id: UUID, *, timeout_s: float) -> None:
        """As in `Waits`, but no longer than until a drain begins. Raises `ProblemError` 429 when too many wait."""
        if len(self._readers) >= self.most:
            self.refusals.count(Refusal.WAITS)
            raise ProblemError(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"{self.most} requests wait already; send it again later, or without `wait`.",
                kind="too-many-waits",
                headers={"Retry-After": str(RETRY_AFTER_S)},
            )
        with trio.CancelScope() as reader:
            self._readers.add(reader)
            try:
                bound_s = LATE_WAIT_S if self._draining else timeout_s
                await self.waits.until_changed(job_id, timeout_s=min(timeout_s, bound_s))
            finally:
                self._readers.discard(reader)

    def answer_all(self) -> None:
        """A drain begins: answer those who wait. Who comes later waits for a moment only."""
        self._draining = True
        for reader in [*self._readers]:
            reader.cancel()

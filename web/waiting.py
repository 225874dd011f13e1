"""Readers that wait for a job's change or an answer (`?wait=`): a bounded number, all answered when a drain begins.

Each of them makes the database look at its job now and then, and holds a connection. Whoever waits when the process
begins to shut down hears how the job stands, instead of being cut off at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Final
from uuid import UUID

import attrs
import trio

from dataloader.jobs.process_listings import ProcessAnswer
from dataloader.store.processes.answers import Waiter
from dataloader.store.queue.waits import Waits
from dataloader.web.problems import RETRY_AFTER_S, ProblemError
from dataloader.web.server.refusals import Refusal, Refusals

LATE_WAIT_S: Final = 1.0
"""The longest wait once a drain has begun: short enough to be answered, long enough that nobody asks all the time."""


@attrs.define(eq=False)
class Waiting:
    """The waiting readers of one app; `most` may wait at a time."""

    waits: Waits
    answers: Waiter
    refusals: Refusals
    most: int
    _readers: set[trio.CancelScope] = attrs.field(factory=set)
    _draining: bool = False

    async def until_changed(self, job_id: UUID, *, timeout_s: float) -> None:
        """As in `Waits`, but no longer than until a drain begins. Raises `ProblemError` 429 when too many wait."""
        self.check_room()
        with self.reader():
            await self.waits.until_changed(job_id, timeout_s=self.bound_s(timeout_s))

    async def wait(self, task_id: int, *, timeout_s: float, is_new: bool = False) -> ProcessAnswer:
        """As in `Answers`, but no longer than until a drain begins, and not at all when too many wait.

        What was asked for is asked for already, so that its answer can be waited for by another request.
        """
        if timeout_s > 0 and self.is_full:
            self.refusals.count(Refusal.WAITS)
        elif timeout_s > 0:
            with self.reader():
                return await self.answers.wait(task_id, timeout_s=self.bound_s(timeout_s), is_new=is_new)
        return await self.answers.wait(task_id, timeout_s=0)

    def told(self, task_id: int, answer: ProcessAnswer | None = None) -> None:
        """As in `Answers`."""
        self.answers.told(task_id, answer)

    def check_room(self) -> None:
        """Raise `ProblemError` 429 when no more readers may wait."""
        if self.is_full:
            self.refusals.count(Refusal.WAITS)
            raise ProblemError(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"{self.most} requests wait already; send it again later, or without `wait`.",
                kind="too-many-waits",
                headers={"Retry-After": str(RETRY_AFTER_S)},
            )

    @property
    def is_full(self) -> bool:
        """Whether no more readers may wait."""
        return len(self._readers) >= self.most

    def bound_s(self, timeout_s: float) -> float:
        """How long somebody may wait who asks for `timeout_s`."""
        return min(timeout_s, LATE_WAIT_S) if self._draining else timeout_s

    @contextmanager
    def reader(self) -> Iterator[trio.CancelScope]:
        """One who waits for the length of a block, which ends when a drain begins."""
        with trio.CancelScope() as reader:
            self._readers.add(reader)
            try:
                yield reader
            finally:
                self._readers.discard(reader)

    def answer_all(self) -> None:
        """A drain begins: answer those who wait. Who comes later waits for a moment only."""
        self._draining = True
        for reader in [*self._readers]:
            reader.cancel()

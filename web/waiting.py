"""Requests that wait for a job's change or an answer (`?wait=`): a bounded number, all answered when a drain begins.

Each waiting request holds a connection and causes reads of its job. When the process begins to shut down, all waiting
requests are answered with the job's current status, so that none is cut off at the end.

The places are shared by the callers; a caller is an API token. If all places are taken, a caller can get one from the
caller with the most places: the longest wait of that caller is answered with the current status.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from uuid import UUID

import attrs
import trio

from dataloader.jobs.process_listings import ProcessAnswer
from dataloader.store.processes.answers import Waiter
from dataloader.store.queue.waits import Waits
from dataloader.web.problems import ProblemError
from dataloader.web.server.limits import STANDARD, HttpLimits
from dataloader.web.server.refusals import Refusal, Refusals


@attrs.define(eq=False)
class Waiting:
    """Waiting requests of one app; at most `most` wait at a time."""

    waits: Waits
    answers: Waiter
    refusals: Refusals
    most: int
    limits: HttpLimits = STANDARD
    _readers: dict[trio.CancelScope, str] = attrs.field(factory=dict)
    """Waiting requests with their callers, the longest wait first."""
    _draining: bool = False

    def of(self, caller: str) -> WaitingCaller:
        """Return the waits of one caller, named by its API token."""
        return WaitingCaller(self, caller)

    async def until_changed(self, job_id: UUID, *, timeout_s: float, caller: str) -> None:
        """Wait as `Waits.until_changed` does, but only until a drain begins.

        Raises `ProblemError` 429 if too many wait.
        """
        self.check_room(caller)
        with self.reader(caller):
            await self.waits.until_changed(job_id, timeout_s=self.bound_s(timeout_s))

    async def wait(
        self, task_id: int, *, timeout_s: float, is_new: bool = False, ident: UUID | None = None, caller: str
    ) -> ProcessAnswer:
        """Wait as `Answers.wait` does, but only until a drain begins, and not at all if too many wait.

        The request itself is stored already, so another request can wait for its answer.
        """
        if timeout_s > 0 and not self._has_room(caller):
            self.refusals.count(Refusal.WAITS)
        elif timeout_s > 0:
            with self.reader(caller):
                return await self.answers.wait(task_id, timeout_s=self.bound_s(timeout_s), is_new=is_new, ident=ident)
        return await self.answers.wait(task_id, timeout_s=0)

    def told(self, task_id: int, answer: ProcessAnswer | None = None) -> None:
        """See `Answers.told`."""
        self.answers.told(task_id, answer)

    def check_room(self, caller: str) -> None:
        """Raise `ProblemError` 429 if no more requests may wait."""
        if not self._has_room(caller):
            self.refusals.count(Refusal.WAITS)
            raise ProblemError(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"The limit of {self.most} waiting requests is reached; retry later, or without `wait`.",
                kind="too-many-waits",
                headers={"Retry-After": str(self.limits.wait_again_s)},
            )

    @property
    def is_full(self) -> bool:
        """True if no more requests may wait."""
        return len(self._readers) >= self.most

    def _has_room(self, caller: str) -> bool:
        """Return True if a request of this caller may wait. If necessary, end the longest wait of another caller."""
        if not self.is_full:
            return True
        places = Counter(self._readers.values())
        greatest, most = places.most_common(1)[0]
        if most <= places[caller] + 1:
            return False
        reader = next(reader for reader, other in self._readers.items() if other == greatest)
        del self._readers[reader]
        reader.cancel()
        return True

    def bound_s(self, timeout_s: float) -> float:
        """Return the allowed wait for a request of `timeout_s` seconds."""
        return min(timeout_s, self.limits.late_wait_s) if self._draining else timeout_s

    @contextmanager
    def reader(self, caller: str) -> Iterator[trio.CancelScope]:
        """Register a waiting request for the duration of a block, which ends when a drain begins."""
        with trio.CancelScope() as reader:
            self._readers[reader] = caller
            try:
                yield reader
            finally:
                self._readers.pop(reader, None)

    def answer_all(self) -> None:
        """Answer all waiting requests, since a drain begins. Later requests wait only briefly."""
        self._draining = True
        for reader in [*self._readers]:
            reader.cancel()


@attrs.frozen
class WaitingCaller:
    """Waits of one caller, for a `DatabasePerformer` as its `answers`."""

    waiting: Waiting
    caller: str

    async def wait(
        self, task_id: int, *, timeout_s: float, is_new: bool = False, ident: UUID | None = None
    ) -> ProcessAnswer:
        """See `Waiting.wait`."""
        return await self.waiting.wait(task_id, timeout_s=timeout_s, is_new=is_new, ident=ident, caller=self.caller)

    def told(self, task_id: int, answer: ProcessAnswer | None = None) -> None:
        """See `Answers.told`."""
        self.waiting.told(task_id, answer)

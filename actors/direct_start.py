"""Immediate start of jobs that this process enqueues while a slot is free: their rows are inserted as claimed.

This saves the notification and the claim, half of the way from a trigger to the handler. It is done only if a claim
would find nothing else. Jobs with a key, a time or predecessors are claimed as usual, and so are those that a user's
transaction adds. The statement decides what only the database knows: whether the queue is paused, and whether the task
has a key. The lock session receives the ID of each such job before the statement is sent, so that no repair considers
the job lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from uuid import UUID

import attrs

from dataloader.actors.dispatcher import Dispatcher
from dataloader.jobs.model import ClaimedJob, NewJob
from dataloader.jobs.task import Task
from dataloader.store.queue.lock_session import LockSession


@attrs.frozen(eq=False, kw_only=True)
class DirectStart:
    """`Starter` for the queues of this process from which it takes jobs of all its tasks."""

    tasks: Mapping[str, Task[Any]]
    dispatchers: Mapping[str, Dispatcher]
    locks: LockSession

    @property
    def worker(self) -> str:
        """Name of this process in `claimed_by` of its jobs."""
        return self.locks.worker

    def reserve(self, job: NewJob) -> str | None:
        """See `Starter.reserve`."""
        dispatcher = self._dispatcher_of(job)
        if dispatcher is None or not dispatcher.reserve():
            return None
        if not self.locks.expect(job.job_id):
            dispatcher.slots.unreserve()
            return None
        return dispatcher.queue

    def added(self, jobs: Iterable[NewJob]) -> None:
        """See `Starter.added`."""
        for job in jobs:
            if (dispatcher := self._dispatcher_of(job)) is not None:
                dispatcher.added()

    def _dispatcher_of(self, job: NewJob) -> Dispatcher | None:
        """Return the dispatcher that could start `job` without a claim."""
        if job.lock_key is not None or job.available_at is not None:
            return None
        task = self.tasks.get(job.task)
        if task is None or task.lock_key is not None:
            return None
        dispatcher = self.dispatchers.get(job.queue or task.queue or "")
        return dispatcher if dispatcher is not None and dispatcher.knows(job.task) else None

    def answered(self, reserved: Mapping[UUID, str], jobs: Sequence[ClaimedJob], sent_at: float) -> None:
        """See `Starter.answered`."""
        started = {job.job_id: job for job in jobs}
        for job_id, queue in reserved.items():
            job = started.get(job_id)
            self.locks.adopt(job_id, None if job is None else job.token)
            if job is None:
                self.dispatchers[queue].slots.unreserve()
            else:
                self.dispatchers[queue].slots.start_reserved(job, sent_at)

    def unanswered(self, reserved: Mapping[UUID, str]) -> None:
        """See `Starter.unanswered`."""
        for job_id, queue in reserved.items():
            self.locks.doubt(job_id)
            self.dispatchers[queue].slots.unreserve()
            self.dispatchers[queue].wake.set()  # its next claim repairs

"""Starts jobs that are added in this process at once where a slot is free: their rows are inserted as claimed by it.

That saves the notification and the claim, half of the way from a trigger to the handler. It is done only where a claim
would find nothing else. Jobs with a key, a time or predecessors are claimed as ever, and so are those that a user's
transaction adds. What only the database knows (is the queue paused, has the task a key?) the statement decides. The
lock session learns of each such job before the statement is sent, so that no repair takes it for a lost one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

import attrs

from dataloader.actors.dispatcher import Dispatcher
from dataloader.jobs.model import ClaimedJob, NewJob
from dataloader.jobs.task import Task
from dataloader.store.queue.lock_session import LockSession


@attrs.frozen(eq=False, kw_only=True)
class DirectStart:
    """A `Starter` for the queues of this process from which it takes jobs of all its tasks."""

    tasks: Mapping[str, Task[Any]]
    dispatchers: Mapping[str, Dispatcher]
    locks: LockSession

    @property
    def worker(self) -> str:
        """The name that is `claimed_by` of its jobs."""
        return self.locks.worker

    def reserve(self, job: NewJob) -> str | None:
        """As in `Starter`."""
        if job.lock_key is not None or job.available_at is not None:
            return None
        task = self.tasks.get(job.task)
        if task is None or task.lock_key is not None:
            return None
        dispatcher = self.dispatchers.get(job.queue or task.queue or "")
        if dispatcher is None or not dispatcher.knows(job.task) or not dispatcher.reserve():
            return None
        if not self.locks.expect(job.job_id):
            dispatcher.slots.unreserve()
            return None
        return dispatcher.queue

    def answered(self, reserved: Mapping[UUID, str], jobs: Sequence[ClaimedJob], sent_at: float) -> None:
        """As in `Starter`."""
        started = {job.job_id: job for job in jobs}
        for job_id, queue in reserved.items():
            job = started.get(job_id)
            self.locks.adopt(job_id, None if job is None else job.token)
            if job is None:
                self.dispatchers[queue].slots.unreserve()
            else:
                self.dispatchers[queue].slots.start_reserved(job, sent_at)

    def unanswered(self, reserved: Mapping[UUID, str]) -> None:
        """As in `Starter`."""
        for job_id, queue in reserved.items():
            self.locks.doubt(job_id)
            self.dispatchers[queue].slots.unreserve()
            self.dispatchers[queue].wake.set()  # its next claim repairs

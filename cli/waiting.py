"""Waits of commands for a job, which survive and report outages of the database or the service.

The job continues during an outage, and so does the wait: only reads are repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Final
from uuid import UUID

import attrs
import trio

from dataloader.jobs.client.jobs import Jobs, told_of_changes
from dataloader.jobs.errors import StoreUnavailable
from dataloader.jobs.model import JobRecord
from dataloader.jobs.secrets.masking import mask_text

AWAY_S: Final = 1.0
"""Seconds until the next try after an outage was noticed."""
MOST_AWAY_S: Final = 600.0
"""Maximum seconds of an outage during a wait. A restart or a failover takes less."""


@attrs.define
class Patience:
    """Survives outages of a database or a service during a wait for a job, and reports them by `tell`."""

    job_id: UUID
    tell: Callable[[str], Any]
    most_away_s: float = MOST_AWAY_S
    _gives_up_at: float | None = attrs.field(default=None, init=False)

    async def outlast(self, error: StoreUnavailable) -> None:
        """Return when it is time for the next try. Raises `StoreUnavailable` after `most_away_s` without an answer."""
        minutes = f"{self.most_away_s / 60:g} minutes"
        if self._gives_up_at is None:
            self._gives_up_at = trio.current_time() + self.most_away_s
            self.tell(f"{error}; waiting for up to {minutes}")
        elif trio.current_time() >= self._gives_up_at:
            todo = f"check the job later with `dataloader status {self.job_id}`"
            raise StoreUnavailable(f"gave up after {minutes} without an answer: {error}; {todo}") from error
        await trio.sleep(AWAY_S)

    def answered(self) -> None:
        """Note that an outage, if there was one, has ended."""
        if self._gives_up_at is not None:
            self._gives_up_at = None
            self.tell("the connection is restored")


async def wait_for_end(
    jobs: Jobs,
    job_id: UUID,
    *,
    timeout_s: float,
    on_change: Callable[[JobRecord], Any],
    tell: Callable[[str], Any] = lambda _said: None,
    most_away_s: float = MOST_AWAY_S,
) -> JobRecord:
    """Return the job as soon as it has ended, or its last known state after `timeout_s` seconds.

    Args:
        jobs: the queue.
        job_id: ID of an existing job.
        timeout_s: maximum seconds of the wait.
        on_change: called with the first state of the job and after each change.
        tell: called with texts about outages, for processes without a supervisor that logs them.
        most_away_s: maximum seconds of an outage.

    Raises:
        StoreUnavailable: there was no answer for `most_away_s`, or none within `timeout_s`.
    """
    patience, told = Patience(job_id, tell, most_away_s), told_of_changes(on_change)
    seen: list[JobRecord] = []

    def changed(job: JobRecord) -> None:
        patience.answered()
        seen[:] = [job]
        told(job)

    with trio.move_on_after(timeout_s):
        while True:
            try:
                return await jobs.wait(job_id, on_change=changed)
            except StoreUnavailable as error:
                await patience.outlast(error)
    if seen:
        return seen[0]
    try:
        return await jobs.get(job_id)
    except StoreUnavailable as error:
        raise StoreUnavailable(f"the job {job_id} was enqueued, but cannot be read: {error}") from error


async def served_instead(jobs: Jobs, queue: str) -> list[str] | None:
    """Return the served queues if no worker serves this one; None if one does."""
    served = {name for worker in await jobs.workers() for name in worker.queues}
    return None if _shows(served, queue) else sorted(served)


async def is_known(jobs: Jobs, task: str) -> bool:
    """Return whether a worker knows the task or does not declare its tasks."""
    return any(worker.tasks is None or _shows(worker.tasks, task) for worker in await jobs.workers())


async def knows_task(jobs: Jobs, queue: str, task: str) -> bool:
    """Return whether a worker of the queue may know the task: it does, or does not declare its tasks."""
    for worker in await jobs.workers():
        only = next((names for name, names in (worker.only_tasks or {}).items() if _shows([name], queue)), worker.tasks)
        if _shows(worker.queues, queue) and (only is None or _shows(only, task)):
            return True
    return False


def _shows(names: Collection[str], name: str) -> bool:
    """Return whether a name is among these. A service shows them without their secrets."""
    return name in names or mask_text(name) in names

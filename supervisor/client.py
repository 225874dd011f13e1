"""What the command line asks of a queue, whether it speaks with the database or with a running service.

client_store.py and client_http.py implement it; nothing else does. Every method raises our own errors:
`StoreUnavailable` when there is no answer, `JobNotFound`, `BadRequest`, and so on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from typing import Any, Final, Protocol
from uuid import UUID

import attrs
import trio

from dataloader.jobs.errors import StoreUnavailable
from dataloader.jobs.listings import AuditRecord, JobFilter, JobPage, Level, LogPage
from dataloader.jobs.model import Enqueued, JobEvent, JobRecord, NewJob, QueueRecord, WorkerRecord
from dataloader.jobs.page_cursor import After
from dataloader.jobs.secrets.masking import mask_text
from dataloader.store.etl.run_records import FailureLine, LoadPage, LoadRecord

BULK: Final = 1_000
"""Jobs that one bulk action changes: their rows stay locked until it commits, so more are done in several."""


class Client(Protocol):
    """A queue as an operator sees it."""

    async def trigger(self, job: NewJob) -> Enqueued:
        """Add a job, and see how its queue stands. `IdempotencyConflict` when its key stands for another request."""

    async def job(self, job_id: UUID) -> JobRecord:
        """The job as it stands."""

    async def change(self, seen: JobRecord) -> JobRecord:
        """The job again, when its status or progress is no longer as `seen`, or some seconds later as it is.

        What keeps its queue from taking it is seen within those seconds.
        """

    async def jobs(self, wanted: JobFilter, *, limit: int, after: str | None) -> JobPage:
        """A page of jobs, newest first; `after` is the `next` of the page before."""

    async def events(self, job_id: UUID, *, after: int, limit: int) -> list[JobEvent]:
        """The job's journal, oldest first, from behind the event `after`."""

    async def logs(
        self, job_id: UUID, *, after: After, limit: int, level: Level | None = None, load: str | None = None
    ) -> LogPage:
        """What the job has logged, oldest line first, from behind the event `after`; `store.job_logs` says the rest."""

    async def cancel(self, job_id: UUID) -> JobRecord:
        """Cancel a queued job, ask a running one to end, leave an ended one as it is."""

    async def retry(self, job_id: UUID, *, force: bool = False) -> JobRecord:
        """Queue a failed, canceled or lost job again. `Conflict` for another one.

        With `force` also a running one whose lease never ends and that nobody renews.
        """

    async def cancel_many(self, wanted: JobFilter) -> int:
        """Cancel every job that the filter finds; how many there were."""

    async def retry_many(self, wanted: JobFilter) -> int:
        """Queue every failed, canceled or lost job that the filter finds again; how many there were."""

    async def queues(self) -> list[QueueRecord]:
        """The queues, with the jobs that have not ended."""

    async def pause(self, queue: str) -> None:
        """Let no process start jobs of the queue."""

    async def resume(self, queue: str) -> None:
        """End a pause."""

    async def workers(self) -> list[WorkerRecord]:
        """The processes that have beaten lately."""

    async def audit(self, *, limit: int, before: int | None) -> list[AuditRecord]:
        """What operators did, latest first, from before the entry `before`."""

    async def loads(self, *, limit: int, after: str | None) -> LoadPage:
        """A page of the loads that have run, by name; `after` is the `next` of the page before."""

    async def load(self, name: str) -> LoadRecord:
        """How far a load has come. `LoadNotFound` if it has never run."""

    async def failures_of_run(self, run_id: UUID, *, after: int, limit: int) -> list[FailureLine]:
        """What failed in a run, oldest first, from behind the failure `after`. `RunNotFound` if there is none."""

    async def failures_of_load(self, name: str, *, after: int, limit: int) -> list[FailureLine]:
        """What failed in any run of a load and is not solved, in the same way. `LoadNotFound` if it has never run."""


async def served_instead(client: Client, queue: str) -> list[str] | None:
    """The queues that are served, when nobody serves this one; None when somebody does."""
    served = {name for worker in await client.workers() for name in worker.queues}
    return None if _shows(served, queue) else sorted(served)


async def knows_task(client: Client, queue: str, task: str) -> bool:
    """Whether a worker of the queue may know the task: it does, or does not tell."""
    known = [worker.tasks for worker in await client.workers() if _shows(worker.queues, queue)]
    return any(tasks is None or _shows(tasks, task) for tasks in known)


def _shows(names: Collection[str], name: str) -> bool:
    """Whether a name is among these. A service shows them without their secrets."""
    return name in names or mask_text(name) in names


AWAY_S: Final = 1.0
"""How long a database, or a service, that is away is left alone."""
MOST_AWAY_S: Final = 600.0
"""How long those who wait for a job wait for an answer. A restart or a failover takes less."""


MANY_AGAIN: Final = BULK // 2


async def repeat_bulk(change: Callable[[], Awaitable[int]], *, least: int) -> int:
    """Repeat a bulk action, which changes `BULK` jobs at most, while it changes `least` or more; how many in all.

    Less than were asked for says nothing: some may have ended meanwhile, or somebody has them. What is retried may fail
    at once and fit again, so that goes on only while it is `MANY_AGAIN`.
    """
    count = 0
    while True:
        changed = await change()
        count += changed
        if changed < least:
            return count


@attrs.define
class Patience:
    """Outlasts a database, or a service, that is away while somebody waits for a job; `tell` hears when, and its end.

    The job goes on meanwhile, and so does the wait: nothing but reading is repeated.
    """

    job_id: UUID
    tell: Callable[[str], Any]
    _gives_up_at: float | None = attrs.field(default=None, init=False)

    async def outlast(self, error: StoreUnavailable) -> None:
        """Return when it is time to ask again. Raises `StoreUnavailable` after `MOST_AWAY_S` without an answer."""
        minutes = f"{MOST_AWAY_S / 60:g} minutes"
        if self._gives_up_at is None:
            self._gives_up_at = trio.current_time() + MOST_AWAY_S
            self.tell(f"{error}; waiting for it for {minutes} at most")
        elif trio.current_time() >= self._gives_up_at:
            todo = f"ask for the job later by `dataloader status {self.job_id}`"
            raise StoreUnavailable(f"gave up after {minutes} without an answer: {error}; {todo}") from error
        await trio.sleep(AWAY_S)

    def answered(self) -> None:
        """An outage, if there was one, is over."""
        if self._gives_up_at is not None:
            self._gives_up_at = None
            self.tell("it answers again")


async def job_that_was_added(
    client: Client, job_id: UUID, *, timeout_s: float, tell: Callable[[str], Any]
) -> JobRecord:
    """The job, as soon as its database, or the service, answers; asked a last time after `timeout_s` seconds."""
    patience = Patience(job_id, tell)
    with trio.move_on_after(timeout_s):
        while True:
            try:
                job = await client.job(job_id)
            except StoreUnavailable as error:
                await patience.outlast(error)
            else:
                patience.answered()
                return job
    try:
        return await client.job(job_id)
    except StoreUnavailable as error:
        raise StoreUnavailable(f"the job {job_id} was added, but can't be asked for: {error}") from error


async def wait_for_end(
    client: Client,
    job: JobRecord,
    *,
    timeout_s: float,
    on_change: Callable[[JobRecord], Any],
    tell: Callable[[str], Any] = lambda _said: None,
) -> JobRecord:
    """Wait until the job has ended, or `timeout_s` seconds; how it stands then comes back.

    `tell` hears of outages, where no supervisor in the process logs them. Raises `StoreUnavailable` after `MOST_AWAY_S`
    without an answer.
    """
    patience = Patience(job.job_id, tell)
    with trio.move_on_after(timeout_s):
        while not job.status.is_final:
            try:
                now = await client.change(job)
            except StoreUnavailable as error:
                await patience.outlast(error)
                continue
            patience.answered()
            if _shown(now) != _shown(job):
                on_change(now)
            job = now
    return job


def _shown(job: JobRecord) -> tuple[object, ...]:
    return job.status, job.attempt, job.progress, job.waits_for, job.queue_state

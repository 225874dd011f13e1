"""Enqueuer, which adds the jobs of concurrent callers together; a single job is added immediately."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol
from uuid import UUID

import trio

from dataloader.jobs.errors import BadRequest, StoreError, StoreUnavailable
from dataloader.jobs.model import DEFAULT_LEASE_S, ClaimedJob, Enqueued, NewJob
from dataloader.jobs.states import Status
from dataloader.store.connection.bridge import Database
from dataloader.store.connection.gatherer import Gatherer
from dataloader.store.queue.enqueue import ANSWER_S, enqueue, enqueue_unique, row_of
from dataloader.store.queue.job_inserts import JOB_ID, Row, aio_insert, aio_insert_started


class Starter(Protocol):
    """Starts jobs in this process as soon as they are added, without a claim; `worker` holds them then."""

    @property
    def worker(self) -> str:
        """Name of this process as `claimed_by`."""

    def reserve(self, job: NewJob) -> str | None:
        """Reserve a slot for a job that is about to be added; return the slot's queue, or None if the job has to wait.

        Jobs added before it come first.
        """

    def added(self, jobs: Iterable[NewJob]) -> None:
        """Record that `jobs` were added without a slot, so that no job which is added later starts before them."""

    def answered(self, reserved: Mapping[UUID, str], jobs: Sequence[ClaimedJob], sent_at: float) -> None:
        """Start `jobs`, which a statement of `sent_at` added as ours, and free the other slots.

        `reserved` has the queue of each job with a slot.
        """

    def unanswered(self, reserved: Mapping[UUID, str]) -> None:
        """Free the slots of jobs for which it is unknown whether they were added."""


class Enqueuer:
    """Adds jobs for one process.

    Single jobs that arrive during a statement are added together by the next one; each caller gets its own answer.
    With a `starter`, jobs that find a free slot in this process start immediately.
    """

    starter: Starter | None = None

    def __init__(self, database: Database, *, default_lease_s: int = DEFAULT_LEASE_S) -> None:
        """Set the lease of jobs that have none, neither from their request nor from their task, in seconds."""
        self._database = database
        self.default_lease_s = default_lease_s
        too_late = "the database did not answer in time; the job may or may not have been added"
        self._are_starting = False
        # Added jobs start before their callers resume, since an answer over HTTP takes longer than a start.
        self._together = Gatherer(self._insert, ANSWER_S, too_late, lambda: self._are_starting)
        # Tasks whose last job was a unique one. Their jobs are sent as unique ones, which saves a statement.
        self._unique: set[str] = set()

    async def enqueue(self, jobs: Sequence[NewJob]) -> list[Enqueued]:
        """Add jobs as the function `enqueue` does. A caller that is already canceled adds nothing."""
        await trio.lowlevel.checkpoint_if_cancelled()
        # A job with a key may wait for another client's transaction, so no other job is added with it.
        job = jobs[0] if len(jobs) == 1 and jobs[0].idempotency_key is None and jobs[0].after is None else None
        if job is not None and (job.version is not None or job.task in self._unique):
            if (answer := await enqueue_unique(self._database, job, default_lease_s=self.default_lease_s)) is not None:
                return [answer]
            self._unique.discard(job.task)
        elif job is not None:
            queue = await self._together.ask((job, row_of(job, self.default_lease_s)))
            if queue is not None:
                return [Enqueued(job.job_id, Status.QUEUED, created=True, queue=queue)]
        answers = await enqueue(self._database, jobs, default_lease_s=self.default_lease_s)
        if self.starter is not None:
            self.starter.added(jobs)
        if job is not None and answers[0].did != "again":
            self._unique.add(job.task)  # the shared statement has not added it for this reason
        return answers

    async def _insert(self, requests: Sequence[tuple[NewJob, Row]]) -> dict[int, str]:
        """Return the queues of the added jobs, by the positions of their requests."""
        jobs, rows = [job for job, _ in requests], [row for _, row in requests]
        starter, self._are_starting = self.starter, False
        # Jobs that handlers add have a root. The statement that also starts jobs has no column for it.
        if starter is None or any(job.root is not None for job in jobs):
            added = await self._database.run(aio_insert, rows)
        else:
            added = await self._insert_for(starter, jobs, rows)
        # If an ID occurs twice, the second request is sent by itself and gets the answer of a repetition.
        return {place: queue for place, row in enumerate(rows) if (queue := added.pop(row[JOB_ID], None)) is not None}

    async def _insert_for(self, starter: Starter, jobs: list[NewJob], rows: list[Row]) -> dict[UUID, str]:
        slots = [starter.reserve(job) for job in jobs]
        reserved = {job.job_id: slot for job, slot in zip(jobs, slots, strict=True) if slot is not None}
        if not reserved:
            added = await self._database.run(aio_insert, rows)
            starter.added(jobs)
            return added
        try:
            added, started, sent_at = await self._database.run(aio_insert_started, rows, slots, starter.worker)
        except BaseException as error:
            if isinstance(error, StoreError | BadRequest) and not isinstance(error, StoreUnavailable):
                starter.answered(reserved, [], 0)  # the server has rolled the statement back
            else:
                starter.unanswered(reserved)
            raise
        starter.answered(reserved, started, sent_at)
        if len(started) < len(jobs):
            ids = {job.job_id for job in started}
            starter.added(job for job in jobs if job.job_id not in ids)
        self._are_starting = bool(started)
        return added

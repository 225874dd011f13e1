"""Adds the jobs that come one by one, together: nobody waits for others to come, and many callers cost little more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Protocol
from uuid import UUID

import attrs
import trio

from dataloader.jobs.errors import BadRequest, StoreError, StoreUnavailable
from dataloader.jobs.model import DEFAULT_LEASE_S, ClaimedJob, Enqueued, NewJob
from dataloader.jobs.states import Status
from dataloader.store.connection.bridge import Database, acquire
from dataloader.store.queue.enqueue import ANSWER_S, enqueue, enqueue_unique, row_of
from dataloader.store.queue.job_inserts import JOB_ID, Row, aio_insert, aio_insert_started

MAX_GROUP: Final = 250
"""Jobs that came one by one and are added in one statement, at the most."""


class Starter(Protocol):
    """Starts jobs in this process as soon as they are added, without a claim: `worker` has them then."""

    @property
    def worker(self) -> str:
        """The name of this process as `claimed_by`."""

    def reserve(self, job: NewJob) -> str | None:
        """Reserve a slot for a job that is about to be added; return the slot's queue, or None if the job has to wait.

        Jobs added before it come first.
        """

    def added(self, jobs: Iterable[NewJob]) -> None:
        """Note that `jobs` were added without a slot, so that no job which is added later starts before them."""

    def answered(self, reserved: Mapping[UUID, str], jobs: Sequence[ClaimedJob], sent_at: float) -> None:
        """Of the jobs with a slot (`reserved`: their queues) `jobs` were added as ours, by a statement of `sent_at`."""

    def unanswered(self, reserved: Mapping[UUID, str]) -> None:
        """Whether the jobs with a slot were added, as ours, is unknown."""


class Enqueuer:
    """Adds jobs for one process.

    Those that come one by one while a statement is under way are added by the next one, together: nobody waits for
    others to come, and many callers cost little more than one. Each has its own answer. `starter` has those started
    at once that find a free slot in this process.
    """

    starter: Starter | None = None

    def __init__(
        self, database: Database, *, default_lease_s: int = DEFAULT_LEASE_S, answer_s: float = ANSWER_S
    ) -> None:
        """Leases last `default_lease_s` where neither a job nor its task says how long.

        A caller waits at most `answer_s` seconds for the statement before, and for the one with its job.
        """
        self.answer_s = answer_s
        self._database = database
        self.default_lease_s = default_lease_s
        self._group = _Group()
        self._turn = trio.Lock()
        # Tasks whose jobs were unique when one was added last: they are asked for as such, in one statement.
        self._unique: set[str] = set()

    async def enqueue(self, jobs: Sequence[NewJob]) -> list[Enqueued]:
        """As the function `enqueue`. Who is cancelled already adds nothing."""
        await trio.lowlevel.checkpoint_if_cancelled()
        # One with a key may have to wait for a transaction of somebody else, and nobody should wait with it.
        job = jobs[0] if len(jobs) == 1 and jobs[0].idempotency_key is None and jobs[0].after is None else None
        if job is not None and (job.version is not None or job.task in self._unique):
            if (answer := await enqueue_unique(self._database, job, default_lease_s=self.default_lease_s)) is not None:
                return [answer]
            self._unique.discard(job.task)
        elif job is not None:
            queue = await self._with_others(job, row_of(job, self.default_lease_s))
            if queue is not None:
                return [Enqueued(job.job_id, Status.QUEUED, created=True, queue=queue)]
        answers = await enqueue(self._database, jobs, default_lease_s=self.default_lease_s)
        if self.starter is not None:
            self.starter.added(jobs)
        if job is not None and answers[0].did != "again":
            self._unique.add(job.task)  # that is why the statement for all others has not added it
        return answers

    async def _with_others(self, job: NewJob, row: Row) -> str | None:
        """The queue of the row that was added; None if something stands against it, or against one of its group."""
        group = self._group
        group.jobs.append(job)
        group.rows.append(row)
        if len(group.rows) == MAX_GROUP:
            self._group = _Group()
        if len(group.rows) == 1:
            await self._add(group)
        else:
            # As for the first: our row goes in whether or not we are there to hear of it.
            with trio.move_on_after(self.answer_s, shield=True):
                await group.ended.wait()
        if group.error is not None:
            raise StoreUnavailable(str(group.error)) from group.error
        # For one request alone: another one with the same id in this group is answered as any that comes later.
        return group.added.pop(row[JOB_ID], None)

    async def _add(self, group: _Group) -> None:
        """Add all that has gathered in `group` by our turn: for its first, who can't be cancelled meanwhile."""
        group.error = StoreUnavailable("the database did not answer in time; whether the job was added is unknown")
        try:
            # The write before, and ours.
            with trio.move_on_after(self.answer_s, shield=True):
                await acquire(self._turn)
                try:
                    if self._group is group:
                        self._group = _Group()
                    group.added, starts = await self._insert(group)
                finally:
                    self._turn.release()
                group.error = None
                if starts:
                    # They begin before their callers go on: to make an answer over HTTP takes longer than a turn of the
                    # loop. Two turns, since in the next one the callers may come first.
                    await trio.lowlevel.cancel_shielded_checkpoint()
                    await trio.lowlevel.cancel_shielded_checkpoint()
        except StoreUnavailable as error:
            group.error = error
        except (StoreError, BadRequest):
            group.error = None  # one of them can't be stored: each is tried by itself
        finally:
            if self._group is group:
                self._group = _Group()  # its time was over before its turn came: nobody may join it any more
            group.ended.set()

    async def _insert(self, group: _Group) -> tuple[dict[UUID, str], bool]:
        """The ids that were added, with their queues, and whether some of them start at once."""
        starter = self.starter
        # What handlers add has a root, for which the statement below has no place.
        if starter is None or any(job.root is not None for job in group.jobs):
            return await self._database.run(aio_insert, group.rows), False
        slots = [starter.reserve(job) for job in group.jobs]
        reserved = {job.job_id: slot for job, slot in zip(group.jobs, slots, strict=True) if slot is not None}
        if not reserved:
            added = await self._database.run(aio_insert, group.rows)
            starter.added(group.jobs)
            return added, False
        try:
            added, jobs, sent_at = await self._database.run(aio_insert_started, group.rows, slots, starter.worker)
        except BaseException as error:
            if isinstance(error, StoreError | BadRequest) and not isinstance(error, StoreUnavailable):
                starter.answered(reserved, [], 0)  # what the server has refused it has undone
            else:
                starter.unanswered(reserved)
            raise
        starter.answered(reserved, jobs, sent_at)
        if len(jobs) < len(group.jobs):
            started = {job.job_id for job in jobs}
            starter.added(job for job in group.jobs if job.job_id not in started)
        return added, bool(jobs)


@attrs.define(eq=False)
class _Group:
    """Jobs that are added together as rows, and what came of it."""

    jobs: list[NewJob] = attrs.field(factory=list)
    rows: list[Row] = attrs.field(factory=list)
    added: dict[UUID, str] = attrs.field(factory=dict)
    error: StoreUnavailable | None = None
    ended: trio.Event = attrs.field(factory=trio.Event)

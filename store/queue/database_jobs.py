"""`Jobs` over the database: what programs, HTTP views, commands and handlers do with the queue, by its tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final
from uuid import UUID

import attrs

from dataloader.jobs.contract import Change, Jobs, Operator, check_id, told_of_changes
from dataloader.jobs.duplicates import DuplicateGroup
from dataloader.jobs.errors import Draining
from dataloader.jobs.failures import ErrorGroupPage, ErrorPage, FailureState, GroupRetried, GroupRetry
from dataloader.jobs.listings import EVERY_JOB, AuditPage, EventPage, JobFilter, JobPage, Level, LogPage
from dataloader.jobs.model import Enqueued, JobRecord, NewJob, QueueRecord, WorkerRecord
from dataloader.jobs.page_cursor import After
from dataloader.jobs.run_stats import RunStatsPage, StatsFilter
from dataloader.jobs.states import Status
from dataloader.jobs.wait_reasons import WaitReason
from dataloader.store.connection.bridge import Database
from dataloader.store.queue import control, failures, reads
from dataloader.store.queue.duplicates import cancel_duplicates, list_duplicates
from dataloader.store.queue.enqueuer import Enqueuer
from dataloader.store.queue.job_logs import list_log
from dataloader.store.queue.queue_states import ServedQueues
from dataloader.store.queue.run_stats import list_run_stats
from dataloader.store.queue.waits import Waits
from dataloader.store.queue.why import why_waits

STATE_S: Final = 5.0
"""Between two looks at the queue of a queued job, whose state is no change of the job that the database would tell."""


@attrs.frozen(kw_only=True)
class DatabaseJobs(Jobs):
    """The queue by its tables, on Trio. `operator` signs the audit; `draining` says that no new jobs are taken."""

    database: Database
    operator: Operator
    enqueuer: Enqueuer
    served: ServedQueues
    waits: Waits
    draining: Callable[[], bool] = lambda: False

    def signed(self, operator: Operator) -> DatabaseJobs:
        """The same queue for somebody else."""
        return attrs.evolve(self, operator=operator)

    async def enqueue_many(self, jobs: Sequence[NewJob]) -> list[Enqueued]:
        """As in `Jobs`. A cancellation comes before anything is added; the adding itself takes 12 s at the most."""
        if self.draining():
            raise Draining("this process is shutting down and takes no new jobs")
        return await self.served.enqueue(self.enqueuer, jobs)

    async def get(self, job_id: UUID) -> JobRecord:
        """As in `Jobs`."""
        check_id(job_id)
        return await reads.get_job(self.database, job_id)

    async def why(self, job_id: UUID) -> WaitReason:
        """As in `Jobs`."""
        check_id(job_id)
        return await why_waits(self.database, job_id)

    async def find(self, wanted: JobFilter = EVERY_JOB, *, limit: int = 50, after: After = None) -> JobPage:
        """As in `Jobs`."""
        return await reads.list_jobs(self.database, wanted, limit=limit, after=after)

    async def events(self, job_id: UUID, *, limit: int = 200, after: After = None) -> EventPage:
        """As in `Jobs`."""
        check_id(job_id)
        return await reads.list_events(self.database, job_id, after=after, limit=limit)

    async def logs(
        self,
        job_id: UUID,
        *,
        limit: int = 200,
        after: After = None,
        level: Level | None = None,
        load: str | None = None,
    ) -> LogPage:
        """As in `Jobs`."""
        check_id(job_id)
        return await list_log(self.database, job_id, after=after, limit=limit, level=level, load=load)

    async def wait(self, job_id: UUID, *, on_change: Callable[[JobRecord], object] | None = None) -> JobRecord:
        """As in `Jobs`."""
        job = await self.get(job_id)
        tell = told_of_changes(on_change)
        tell(job)
        while not job.status.is_final:
            looks_at_queue = on_change is not None and job.status is Status.QUEUED
            job = await self.waits.wait(job_id, timeout_s=STATE_S if looks_at_queue else math.inf, seen=job)
            tell(job)
        return job

    async def error_groups(
        self,
        *,
        task: str | None = None,
        state: FailureState | None = None,
        exact: bool = False,
        limit: int = 50,
        after: After = None,
    ) -> ErrorGroupPage:
        """As in `Jobs`."""
        return await failures.list_error_groups(
            self.database, task=task, state=state, exact=exact, limit=limit, after=after
        )

    async def duplicates(
        self, *, task: str | None = None, queue: str | None = None, limit: int = 50
    ) -> list[DuplicateGroup]:
        """As in `Jobs`."""
        return await list_duplicates(self.database, task=task, queue=queue, limit=limit)

    async def cancel_duplicates(self, task: str, *, queue: str | None = None, limit: int = 1_000) -> int:
        """As in `Jobs`."""
        return await cancel_duplicates(self.database, [task], self.operator, queue=queue, limit=limit)

    async def errors(
        self,
        *,
        task: str | None = None,
        queue: str | None = None,
        group: str | None = None,
        job_id: UUID | None = None,
        limit: int = 100,
        after: After = None,
    ) -> ErrorPage:
        """As in `Jobs`."""
        return await failures.list_errors(
            self.database, task=task, queue=queue, group=group, job_id=job_id, limit=limit, after=after
        )

    async def queues(self) -> list[QueueRecord]:
        """As in `Jobs`."""
        return await reads.list_queues(self.database)

    async def pause(self, queue: str) -> None:
        """As in `Jobs`."""
        await control.pause(self.database, queue, self.operator)

    async def resume(self, queue: str) -> None:
        """As in `Jobs`."""
        await control.resume(self.database, queue, self.operator)

    async def workers(self) -> list[WorkerRecord]:
        """As in `Jobs`."""
        return await reads.list_workers(self.database)

    async def audit(self, *, limit: int = 100, after: After = None) -> AuditPage:
        """As in `Jobs`."""
        return await reads.list_audit(self.database, limit=limit, after=after)

    async def stats(self, wanted: StatsFilter, *, limit: int = 1_000, after: After = None) -> RunStatsPage:
        """As in `Jobs`."""
        return await list_run_stats(self.database, wanted, limit=limit, after=after)

    async def _change(self, change: Change, job_id: UUID) -> JobRecord:
        match change.action:
            case "cancel":
                return await control.cancel(self.database, job_id, self.operator)
            case "retry":
                return await control.retry(self.database, job_id, self.operator, force=change.force)
            case "run_now":
                return await control.run_now(self.database, job_id, self.operator)
            case "set_priority":
                return await control.set_priority(self.database, job_id, change.priority, self.operator)

    async def _change_many(self, change: Change, wanted: JobFilter, limit: int) -> int:
        who = self.operator
        match change.action:
            case "cancel":
                return await control.cancel_many(self.database, wanted, who, limit=limit)
            case "retry":
                return await control.retry_many(self.database, wanted, who, limit=limit)
            case "run_now":
                return await control.run_now_many(self.database, wanted, who, limit=limit)
            case "set_priority":
                return await control.set_priority_many(self.database, wanted, change.priority, who, limit=limit)

    async def retry_some_of_group(self, wanted: GroupRetry, *, limit: int, after: After = None) -> GroupRetried:
        """As in `Jobs`."""
        return await failures.retry_group(self.database, wanted, self.operator, limit=limit, after=after)

"""`Jobs`: jobs and queues for programs, commands, handlers and HTTP views."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Final, TypeVar, Unpack, overload
from uuid import UUID

import attrs

from dataloader.jobs.client.client_part import ClientPart
from dataloader.jobs.contract import BATCH
from dataloader.jobs.duplicates import DuplicateGroup
from dataloader.jobs.errors import BadRequest
from dataloader.jobs.failures import ErrorGroupPage, ErrorPage, FailureState, GroupRetried, GroupRetry
from dataloader.jobs.listings import EVERY_JOB, MAX_PAGE, AuditPage, EventPage, JobFilter, JobPage, Level, LogPage
from dataloader.jobs.model import Enqueued, JobOptions, JobRecord, NewJob, QueueRecord, WorkerRecord
from dataloader.jobs.new_job import new_job
from dataloader.jobs.operations import failures, queues
from dataloader.jobs.operations import jobs as operations
from dataloader.jobs.operations.operation import Operation
from dataloader.jobs.page_cursor import After, cursor_text
from dataloader.jobs.run_stats import RunStatsPage, StatsFilter
from dataloader.jobs.states import Status
from dataloader.jobs.task import A, Task
from dataloader.jobs.wait_reasons import WaitReason

R = TypeVar("R")

MOST_RETRIED_AGAIN: Final = BATCH // 2
"""Changed jobs of a batch of retries from which on another batch follows.

A retried job may fail immediately and match the filter again, so retries continue only while half of a batch changes.
"""


@attrs.frozen
class Jobs(ClientPart):
    """Jobs and queues: `client.jobs` of `open_client`, or `supervisor.jobs`."""

    async def perform(self, operation: Operation[R]) -> R:
        """Perform an operation and return its answer. The methods below build operations on jobs."""
        return await self.performer.perform(operation)

    async def enqueue(
        self, task: str | Task[A], args: A | Mapping[str, Any] | None = None, **options: Unpack[JobOptions]
    ) -> Enqueued:
        """Add one job.

        Args:
            task: the task, or its name.
            args: an instance of the task's own type, or a JSON object.
            options: those of `NewJob`, such as `queue`, `lock_key`, `idempotency_key`.

        Raises:
            BadRequest: a value is not allowed.
            IdempotencyConflict: the idempotency key, or the job's id, belongs to another request.
            Draining: this process, or the service, is shutting down.
            StoreUnavailable: whether the job was added is unknown; the same request again, with the same
                `idempotency_key` or `job_id`, adds it once.
        """
        [enqueued] = await self.enqueue_many([new_job(task, args, **options)])
        return enqueued

    async def enqueue_many(self, jobs: Sequence[NewJob]) -> list[Enqueued]:
        """Add jobs, all or none. The answers are in the order of the jobs. Raises the errors of `enqueue`."""
        return await self.performer.enqueue(jobs)

    async def get(self, job_id: UUID) -> JobRecord:
        """Return the job. Raises `JobNotFound`, `BadRequest`."""
        return await self.perform(operations.GetJob(job_id))

    async def why(self, job_id: UUID) -> WaitReason:
        """Return the reason why the job does not run now, in one sentence. Raises `JobNotFound`, `BadRequest`."""
        return await self.perform(operations.ShowWhy(job_id))

    async def find(self, wanted: JobFilter = EVERY_JOB, *, limit: int = 50, after: After = None) -> JobPage:
        """Return a page of at most `limit` (1 to 1,000) jobs, newest first. `after` is the `next` of the previous page.

        A page of jobs with megabytes of args or results has fewer jobs. Raises `BadRequest`.
        """
        return await self.perform(operations.ListJobs(**wanted.criteria(), limit=limit, after=cursor_text(after)))

    async def events(self, job_id: UUID, *, limit: int = 200, after: After = None) -> EventPage:
        """Return the job's event history, oldest event first: at most `limit` (1 to 1,000) events.

        The page begins after `after`: the `next` of the previous page, or the `event_id` of any event of the job.

        Raises `JobNotFound`, `BadRequest`.
        """
        return await self.perform(operations.ListEvents(job_id, limit, cursor_text(after)))

    async def logs(
        self,
        job_id: UUID,
        *,
        limit: int = 200,
        after: After = None,
        level: Level | None = None,
        load: str | None = None,
    ) -> LogPage:
        """Return the job's log, oldest line first: at most `limit` (1 to 1,000) lines.

        Args:
            job_id: the job's id.
            limit: the most lines.
            after: the `next` of the previous page, or the `event_id` of the last line that was read.
            level: the lowest level.
            load: only lines about this load of a flow.

        Raises `JobNotFound`, `BadRequest`.
        """
        return await self.perform(operations.ListLog(job_id, limit, cursor_text(after), level, load))

    async def wait(self, job_id: UUID, *, on_change: Callable[[JobRecord], object] | None = None) -> JobRecord:
        """Wait until the job has ended, and return it. A cancel scope limits the wait.

        Args:
            job_id: the job's id.
            on_change: called with the job when the wait begins, and after each observed change of its status, attempt,
                progress or `waits_for`, including its end.

        Raises:
            JobNotFound: no job has this id, or it was deleted.
            StoreUnavailable: no answer came; the job continues, and another call can wait for it.
        """
        tell = told_of_changes(on_change)
        job = await self.get(job_id)
        tell(job)
        while not job.status.is_final:
            with_queue = on_change is not None and job.status is Status.QUEUED
            job = await self.performer.changed_job(job, with_queue=with_queue)
            tell(job)
        return job

    @overload
    async def cancel(self, which: UUID) -> JobRecord: ...

    @overload
    async def cancel(self, which: JobFilter, *, limit: int | None = None) -> int: ...

    async def cancel(self, which: UUID | JobFilter, *, limit: int | None = None) -> JobRecord | int:
        """Cancel a job, or all jobs that match a filter.

        A queued job is canceled immediately. A running job is asked to stop. An ended job stays as it is.

        A filter needs a criterion. With `limit` (1 to 10,000), at most that many jobs are canceled, in one transaction.
        Without it all are canceled, in several transactions. Returns the number of jobs, without those that were asked
        to stop before.

        Raises `JobNotFound`, `BadRequest`, and `Conflict` for one job that wakes a durable process.
        """
        if isinstance(which, UUID):
            return await self.perform(operations.CancelJob(which))
        return await self._change_all(operations.CancelMany, which, limit)

    @overload
    async def retry(self, which: UUID, *, force: bool = False) -> JobRecord: ...

    @overload
    async def retry(self, which: JobFilter, *, limit: int | None = None) -> int: ...

    async def retry(self, which: UUID | JobFilter, *, force: bool = False, limit: int | None = None) -> JobRecord | int:
        """Queue a failed, canceled or lost job again, from attempt 0, or all such jobs that match a filter.

        With `force`, also one running job whose lease never ends and is not renewed. `limit` works as in `cancel`.
        Raises `Conflict` for one job with another status, `JobNotFound`, `BadRequest`.
        """
        if isinstance(which, UUID):
            return await self.perform(operations.RetryJob(which, force))
        return await self._change_all(operations.RetryMany, which, limit, least=MOST_RETRIED_AGAIN)

    @overload
    async def run_now(self, which: UUID) -> JobRecord: ...

    @overload
    async def run_now(self, which: JobFilter, *, limit: int | None = None) -> int: ...

    async def run_now(self, which: UUID | JobFilter, *, limit: int | None = None) -> JobRecord | int:
        """Make a delayed job due now, or all delayed jobs that match a filter.

        A job whose `lock_key` is held still waits for the key. `limit` works as in `cancel`. Raises `Conflict` for one
        job that is not queued, `JobNotFound`, `BadRequest`.
        """
        if isinstance(which, UUID):
            return await self.perform(operations.RunJobNow(which))
        return await self._change_all(operations.RunManyNow, which, limit)

    @overload
    async def set_priority(self, which: UUID, priority: int) -> JobRecord: ...

    @overload
    async def set_priority(self, which: JobFilter, priority: int, *, limit: int | None = None) -> int: ...

    async def set_priority(
        self, which: UUID | JobFilter, priority: int, *, limit: int | None = None
    ) -> JobRecord | int:
        """Change the priority of a queued job, or of all queued jobs that match a filter. The smallest runs first.

        `limit` works as in `cancel`. Jobs that already have the priority are not counted. Raises `Conflict` for one job
        that is not queued, `JobNotFound`, `BadRequest`.
        """
        if isinstance(which, UUID):
            return await self.perform(operations.ChangePriority(job_id=which, priority=priority))
        return await self._change_all(partial(operations.ChangeManyPriorities, priority=priority), which, limit)

    async def error_groups(
        self,
        *,
        task: str | None = None,
        state: FailureState | None = None,
        exact: bool = False,
        limit: int = 50,
        after: After = None,
    ) -> ErrorGroupPage:
        """Return jobs that failed for good or wait for a retry, counted by task and error, the largest group first.

        Each page is counted again: a group whose number of jobs changes may appear on two pages, or on none.
        `JobFilter(error_group=…)` finds the jobs of a group.

        Args:
            task: only groups of this task.
            state: only jobs that wait for a retry (`waiting`), or only jobs that failed for good (`failed`).
            exact: group by the whole first line of at most 20,000 jobs: the newest 1,000 of each kind of error.
            limit: the most groups, 1 to 1,000.
            after: the `next` of the previous page.

        Raises `BadRequest`.
        """
        wanted = failures.ListErrorGroups(task=task, state=state, exact=exact, limit=limit, after=cursor_text(after))
        return await self.perform(wanted)

    async def retry_group(
        self,
        group: str,
        *,
        at: datetime | None = None,
        spread_s: float = 0.0,
        state: FailureState | None = None,
        limit: int | None = None,
    ) -> int:
        """Retry the jobs of a group of errors, each once, and return their number.

        A job that failed for good is queued as if it were new. A job that waits for a retry gets another time. A job
        that has started meanwhile stays as it is.

        Args:
            group: the group's id.
            at: the time of the retries; None and a past time mean now.
            spread_s: seconds after `at` over which the jobs are spread at random, 0 to 2,592,000 (30 days).
            state: only jobs that wait for a retry (`waiting`), or only jobs that failed for good (`failed`).
            limit: the most jobs that are read, oldest first, 1 to 10,000, in one transaction. None: all, in several
                transactions.

        Raises `ErrorGroupNotFound` if the group has no job, and `BadRequest`.
        """
        wanted = GroupRetry(group=group, at=at, spread_s=spread_s, state=state)
        retried = await self.retry_some_of_group(wanted, limit=BATCH if limit is None else limit)
        count = retried.changed
        while limit is None and retried.next is not None:
            retried = await self.retry_some_of_group(wanted, limit=BATCH, after=retried.next)
            count += retried.changed
        return count

    async def retry_some_of_group(self, wanted: GroupRetry, *, limit: int, after: After = None) -> GroupRetried:
        """Retry at most `limit` (1 to 10,000) jobs of a group in one transaction, oldest first, after `after`.

        Raises `ErrorGroupNotFound` if the group has no job.
        """
        fields = attrs.asdict(wanted, recurse=False)
        return await self.perform(failures.RetryErrorGroup(**fields, limit=limit, after=cursor_text(after)))

    async def duplicates(
        self, *, task: str | None = None, queue: str | None = None, limit: int = 50
    ) -> list[DuplicateGroup]:
        """Return at most `limit` (1 to 1,000) groups of waiting jobs with the same queue, task, args and partition key.

        The largest groups come first. All waiting jobs are read. Raises `BadRequest`.
        """
        return (await self.perform(failures.ListDuplicates(task=task, queue=queue, limit=limit))).groups

    async def cancel_duplicates(self, task: str, *, queue: str | None = None, limit: int = 1_000) -> int:
        """Cancel at most `limit` (1 to 10,000) duplicates of a task and return their number. One of each group stays.

        It is a job that other jobs wait for, or else the most urgent and oldest one. Raises `BadRequest`.
        """
        return (await self.perform(failures.CancelDuplicates(task=task, queue=queue, limit=limit))).changed

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
        """Return the error log, latest first: a row for each run that failed, also of deleted jobs.

        Args:
            task: only errors of this task.
            queue: only errors of this queue.
            group: only errors of this group.
            job_id: only errors of this job.
            limit: the most rows, 1 to 1,000.
            after: the `next` of the previous page, or the `error_id` of any row.

        Raises `BadRequest`.
        """
        wanted = failures.ListErrors(
            task=task, queue=queue, group=group, job_id=job_id, limit=limit, after=cursor_text(after)
        )
        return await self.perform(wanted)

    async def queues(self) -> list[QueueRecord]:
        """Return every queue that has jobs that have not ended, is served, or is paused, by name."""
        page = await self.perform(queues.ListQueues(limit=MAX_PAGE))
        found = page.queues
        while page.next is not None:
            page = await self.perform(queues.ListQueues(limit=MAX_PAGE, after=page.next))
            found = found + page.queues
        return found

    async def pause(self, queue: str) -> None:
        """Pause a queue: no process starts its jobs; running jobs continue. Raises `BadRequest`."""
        await self.perform(queues.PauseQueue(queue))

    async def resume(self, queue: str) -> None:
        """End a queue's pause. Raises `BadRequest`."""
        await self.perform(queues.ResumeQueue(queue))

    async def workers(self) -> list[WorkerRecord]:
        """Return the processes that sent a heartbeat in the last minute, by name."""
        page = await self.perform(queues.ListWorkers(limit=MAX_PAGE))
        found = page.workers
        while page.next is not None:
            page = await self.perform(queues.ListWorkers(limit=MAX_PAGE, after=page.next))
            found = found + page.workers
        return found

    async def audit(self, *, limit: int = 100, after: After = None) -> AuditPage:
        """Return operators' actions, latest first: at most `limit` (1 to 1,000).

        `after` is the `next` of the previous page. Raises `BadRequest`.
        """
        return await self.perform(queues.ListAudit(limit=limit, after=cursor_text(after)))

    async def stats(self, wanted: StatsFilter, *, limit: int = 1_000, after: After = None) -> RunStatsPage:
        """Return statistics of runs, by time, queue, task and outcome: at most `limit` (1 to 1,000) rows.

        They cover the runs of dataloader's processes, also of deleted jobs. `after` is the `next` of the previous page.
        Raises `BadRequest`.
        """
        fields = attrs.asdict(wanted, recurse=False)
        return await self.perform(queues.ListStats(**fields, limit=limit, after=cursor_text(after)))

    async def _change_all(
        self,
        change: Callable[..., Operation[operations.Changed]],
        wanted: JobFilter,
        limit: int | None,
        *,
        least: int = 1,
    ) -> int:
        """Change up to `limit` jobs; without a limit, change batches until one changes fewer than `least` jobs."""
        if not isinstance(wanted, JobFilter):
            raise BadRequest("which", f"must be a UUID or a JobFilter, not {wanted!r:.200}")
        if wanted == EVERY_JOB:
            raise BadRequest(
                "which", "must have a criterion, such as queue or status; an empty JobFilter would match all jobs"
            )
        batch = change(**wanted.criteria(), limit=BATCH if limit is None else limit)
        count = changed = (await self.perform(batch)).changed
        while limit is None and changed >= least:
            changed = (await self.perform(batch)).changed
            count += changed
        return count


def told_of_changes(on_change: Callable[[JobRecord], object] | None) -> Callable[[JobRecord], None]:
    """Return a function to call with each state of the job that was read. It calls `on_change` if the state differs."""
    told: list[object] = [None]

    def tell(job: JobRecord) -> None:
        now = job.status, job.attempt, job.progress, job.waits_for, job.queue_state
        if on_change is not None and now != told[0]:
            told[0] = now
            on_change(job)

    return tell

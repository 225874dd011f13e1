"""Implementations of the operations on jobs, queues and failures over the database."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

from dataloader.jobs.duplicates import DuplicateGroups
from dataloader.jobs.failures import ErrorGroupPage, ErrorPage, GroupRetried, GroupRetry, group_key
from dataloader.jobs.listings import AuditPage, EventPage, JobFilter, JobPage, LogPage, QueuePage, WorkerPage
from dataloader.jobs.model import JobRecord
from dataloader.jobs.operations.failures import (
    CancelDuplicates,
    ListDuplicates,
    ListErrorGroups,
    ListErrors,
    ListGroupJobs,
    RetryErrorGroup,
)
from dataloader.jobs.operations.jobs import (
    CancelJob,
    CancelMany,
    Changed,
    ChangeManyPriorities,
    ChangePriority,
    GetJob,
    ListEvents,
    ListJobs,
    ListLog,
    RetryJob,
    RetryMany,
    RunJobNow,
    RunManyNow,
    ShowWhy,
)
from dataloader.jobs.operations.queues import (
    ListAudit,
    ListQueues,
    ListStats,
    ListWorkers,
    PauseQueue,
    QueuePaused,
    ResumeQueue,
)
from dataloader.jobs.run_stats import RunStatsPage, StatsFilter
from dataloader.jobs.wait_reasons import WaitReason
from dataloader.store.implementations import Store, implements
from dataloader.store.queue import control, duplicates, failures, job_logs, name_pages, reads, run_stats, why

_DAY: Final = timedelta(days=1)


@implements(GetJob)
async def _get_job(store: Store, request: GetJob) -> JobRecord:
    return await reads.get_job(store.database, request.job_id)


@implements(ShowWhy)
async def _show_why(store: Store, request: ShowWhy) -> WaitReason:
    return await why.why_waits(store.database, request.job_id)


@implements(ListJobs)
async def _list_jobs(store: Store, request: ListJobs) -> JobPage:
    return await reads.list_jobs(store.database, request.job_filter(), limit=request.limit, after=request.after)


@implements(ListEvents)
async def _list_job_events(store: Store, request: ListEvents) -> EventPage:
    return await reads.list_events(store.database, request.job_id, limit=request.limit, after=request.after)


@implements(ListLog)
async def _list_log(store: Store, request: ListLog) -> LogPage:
    return await job_logs.list_log(
        store.database, request.job_id, limit=request.limit, after=request.after, level=request.level, load=request.load
    )


@implements(CancelJob)
async def _cancel(store: Store, request: CancelJob) -> JobRecord:
    return await control.cancel(store.database, request.job_id, store.operator)


@implements(RetryJob)
async def _retry(store: Store, request: RetryJob) -> JobRecord:
    return await control.retry(store.database, request.job_id, store.operator, force=request.force)


@implements(RunJobNow)
async def _run_now(store: Store, request: RunJobNow) -> JobRecord:
    return await control.run_now(store.database, request.job_id, store.operator)


@implements(ChangePriority)
async def _set_priority(store: Store, request: ChangePriority) -> JobRecord:
    return await control.set_priority(store.database, request.job_id, request.priority, store.operator)


@implements(CancelMany)
async def _cancel_many(store: Store, request: CancelMany) -> Changed:
    return Changed(await control.cancel_many(store.database, request.job_filter(), store.operator, limit=request.limit))


@implements(RetryMany)
async def _retry_many(store: Store, request: RetryMany) -> Changed:
    return Changed(await control.retry_many(store.database, request.job_filter(), store.operator, limit=request.limit))


@implements(RunManyNow)
async def _run_many_now(store: Store, request: RunManyNow) -> Changed:
    return Changed(
        await control.run_now_many(store.database, request.job_filter(), store.operator, limit=request.limit)
    )


@implements(ChangeManyPriorities)
async def _change_many_priorities(store: Store, request: ChangeManyPriorities) -> Changed:
    wanted = request.job_filter()
    return Changed(
        await control.set_priority_many(store.database, wanted, request.priority, store.operator, limit=request.limit)
    )


@implements(ListErrorGroups)
async def _list_error_groups(store: Store, request: ListErrorGroups) -> ErrorGroupPage:
    return await failures.list_error_groups(
        store.database,
        task=request.task,
        state=request.state,
        exact=request.exact,
        limit=request.limit,
        after=request.after,
    )


@implements(ListErrors)
async def _list_job_errors(store: Store, request: ListErrors) -> ErrorPage:
    return await failures.list_errors(
        store.database,
        task=request.task,
        queue=request.queue,
        group=request.group,
        job_id=request.job_id,
        limit=request.limit,
        after=request.after,
    )


@implements(ListGroupJobs)
async def _list_group_jobs(store: Store, request: ListGroupJobs) -> JobPage:
    group_key("group", request.group)
    wanted = JobFilter(error_group=request.group)
    return await reads.list_jobs(store.database, wanted, limit=request.limit, after=request.after)


@implements(RetryErrorGroup)
async def _retry_error_group(store: Store, request: RetryErrorGroup) -> GroupRetried:
    wanted = GroupRetry(group=request.group, at=request.at, spread_s=request.spread_s, state=request.state)
    return await failures.retry_group(store.database, wanted, store.operator, limit=request.limit, after=request.after)


@implements(ListDuplicates)
async def _list_duplicates(store: Store, request: ListDuplicates) -> DuplicateGroups:
    groups = await duplicates.list_duplicates(
        store.database, task=request.task, queue=request.queue, limit=request.limit
    )
    return DuplicateGroups(groups)


@implements(CancelDuplicates)
async def _cancel_duplicates(store: Store, request: CancelDuplicates) -> Changed:
    changed = await duplicates.cancel_duplicates(
        store.database, [request.task], store.operator, queue=request.queue, limit=request.limit
    )
    return Changed(changed)


@implements(ListQueues)
async def _list_queues(store: Store, request: ListQueues) -> QueuePage:
    return await name_pages.page_of_queues(store.database, limit=request.limit, after=request.after)


@implements(PauseQueue)
async def _pause_queue(store: Store, request: PauseQueue) -> QueuePaused:
    await control.pause(store.database, request.queue, store.operator)
    return QueuePaused(request.queue, paused=True)


@implements(ResumeQueue)
async def _resume_queue(store: Store, request: ResumeQueue) -> QueuePaused:
    await control.resume(store.database, request.queue, store.operator)
    return QueuePaused(request.queue, paused=False)


@implements(ListWorkers)
async def _list_workers(store: Store, request: ListWorkers) -> WorkerPage:
    return await name_pages.page_of_workers(store.database, limit=request.limit, after=request.after)


@implements(ListStats)
async def _list_stats(store: Store, request: ListStats) -> RunStatsPage:
    wanted = StatsFilter(
        begin=request.begin or datetime.now(UTC) - _DAY,
        end=request.end,
        queue=request.queue,
        task=request.task,
        by=request.by,
    )
    return await run_stats.list_run_stats(store.database, wanted, limit=request.limit, after=request.after)


@implements(ListAudit)
async def _list_audit(store: Store, request: ListAudit) -> AuditPage:
    after = request.before if request.after is None else request.after
    return await reads.list_audit(store.database, limit=request.limit, after=after)

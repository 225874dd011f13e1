"""What failed (R2, S6): groups of jobs by their error, the jobs of a group and their retry, and the log of errors."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final
from uuid import UUID

import trio
from msgspec import Meta, Struct

from dataloader.jobs.contract import MAX_BULK
from dataloader.jobs.failures import (
    MAX_SPREAD_S,
    ErrorGroupPage,
    ErrorPage,
    FailureState,
    GroupRetried,
    GroupRetry,
    group_key,
)
from dataloader.jobs.listings import JobFilter, JobPage
from dataloader.jobs.model import Instant
from dataloader.web import shown
from dataloader.web.api.job_fields import QueueName, TaskName
from dataloader.web.auth import Role
from dataloader.web.paging import AfterPage, Limit, PageQuery, page_answer
from dataloader.web.routes import Answer, Call, Routes

routes: Final = Routes()

State = Annotated[
    FailureState, Meta(description="`waiting`: jobs that wait for a retry; `failed`: those that failed for good.")
]
GroupName = Annotated[str, Meta(description="The id of a group of errors.", examples=["00c8f1de4a91b37e"])]


class ErrorGroupsQuery(PageQuery, kw_only=True):
    """A page of the groups of errors, those with the most jobs first."""

    task: TaskName | None = None
    state: State | None = None
    exact: Annotated[bool, Meta(description="Group by the first line as it is. Every job is read.")] = False


class ErrorsQuery(PageQuery, kw_only=True):
    """A page of the log of errors, latest first."""

    limit: Limit = 100
    after: Annotated[AfterPage, Meta(description="`next` of the page before, or an `error_id`.")] | None = None
    task: TaskName | None = None
    queue: QueueName | None = None
    group: GroupName | None = None
    job_id: Annotated[UUID, Meta(description="Only errors of this job.")] | None = None


class GroupJobsQuery(PageQuery, kw_only=True):
    """A page of the jobs of a group, newest first."""


class GroupRetryRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """When the jobs of a group are retried."""

    EXAMPLE: ClassVar[Any] = {"at": "2026-11-20T18:00:00Z", "spread_s": 600}

    at: Annotated[Instant, Meta(description="When; null, and what has passed, mean now.")] | None = None
    spread_s: Annotated[
        float, Meta(ge=0, le=MAX_SPREAD_S, description="Seconds from then on over which the jobs are spread.")
    ] = 0.0
    state: State | None = None
    limit: Annotated[int, Meta(ge=1, le=MAX_BULK, description="The most jobs that one request looks at.")] = 1_000
    after: AfterPage | None = None


@routes.add("GET", "/api/v1/errors", role=Role.READ, query=ErrorGroupsQuery, answers={200: ErrorGroupPage}, pages=True)
async def list_error_groups(call: Call, query: ErrorGroupsQuery) -> Answer:
    """Count the jobs that failed for good or wait for a retry, by task and error; the most jobs first.

    Each page is counted anew.
    """
    page = await call.jobs.error_groups(
        task=query.task, state=query.state, exact=query.exact, limit=query.limit, after=query.after
    )
    return page_answer(call, ErrorGroupPage(list(map(shown.error_group, page.groups)), page.next))


@routes.add("GET", "/api/v1/errors/log", role=Role.READ, query=ErrorsQuery, answers={200: ErrorPage}, pages=True)
async def list_errors(call: Call, query: ErrorsQuery) -> Answer:
    """Read the log of errors, latest first: a row for each run that failed, also of jobs that were deleted."""
    page = await call.jobs.errors(
        task=query.task,
        queue=query.queue,
        group=query.group,
        job_id=query.job_id,
        limit=query.limit,
        after=query.after,
    )
    errors = []
    for record in page.errors:
        errors.append(shown.error(record))
        # A page may have megabytes: the loop must turn in between.
        await trio.lowlevel.checkpoint()
    return page_answer(call, ErrorPage(errors, page.next))


@routes.add(
    "GET",
    "/api/v1/errors/<path:group>/jobs",
    role=Role.READ,
    query=GroupJobsQuery,
    answers={200: JobPage},
    pages=True,
)
async def list_group_jobs(call: Call, group: str, query: GroupJobsQuery) -> Answer:
    """List the jobs of a group of errors, newest first; the same as the list of jobs with this `error_group`."""
    group_key("group", group)
    page = await call.jobs.find(JobFilter(error_group=group), limit=query.limit, after=query.after)
    return page_answer(call, JobPage(await call.masked(shown.job, page.jobs), page.next))


@routes.add(
    "POST",
    "/api/v1/errors/<path:group>/retry",
    role=Role.ADMIN,
    body=GroupRetryRequest,
    answers={200: GroupRetried},
)
async def retry_error_group(call: Call, group: str, body: GroupRetryRequest) -> Answer:
    """Retry the jobs of a group of errors, oldest first, up to its limit; repeat with `next` as `after` until null.

    Those that failed for good are queued as if they were new; of those that wait for a retry the next attempt is moved.
    A job that has begun meanwhile is left. 404 if the group has no job.
    """
    wanted = GroupRetry(group=group, at=body.at, spread_s=body.spread_s, state=body.state)
    return Answer(value=await call.jobs.retry_some_of_group(wanted, limit=body.limit, after=body.after))

"""Operations on failures: groups of jobs by their error, the error log, and duplicates."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final
from uuid import UUID

from msgspec import Meta, Struct

from dataloader.jobs.contract import MAX_BULK
from dataloader.jobs.duplicates import DuplicateGroups
from dataloader.jobs.failures import (
    MAX_SPREAD_S,
    ErrorGroupNotFound,
    ErrorGroupPage,
    ErrorPage,
    FailureState,
    GroupRetried,
)
from dataloader.jobs.listings import JobPage
from dataloader.jobs.model import Instant
from dataloader.jobs.operations.fields import AfterPage, Limit, QueueName, TaskName
from dataloader.jobs.operations.jobs import Changed
from dataloader.jobs.operations.operation import Operation, Operations
from dataloader.jobs.roles import Role

failures: Final = Operations()

State = Annotated[
    FailureState, Meta(description="`waiting`: jobs that wait for a retry; `failed`: jobs that failed for good.")
]
GroupName = Annotated[str, Meta(description="ID of an error group.", examples=["00c8f1de4a91b37e"])]


@failures.declare("GET", "/errors", role=Role.READ)
class ListErrorGroups(Operation[ErrorGroupPage], kw_only=True):
    """Count the jobs that failed for good or wait for a retry, by task and error; the most jobs first.

    Each page counts again.
    """

    limit: Limit = 50
    after: AfterPage | None = None
    task: TaskName | None = None
    state: State | None = None
    exact: Annotated[
        bool,
        Meta(
            description="Group by the exact first line. Counts the newest 1,000 jobs of each kind of error, "
            "and at most 20,000 in total."
        ),
    ] = False


@failures.declare("GET", "/errors/log", role=Role.READ)
class ListErrors(Operation[ErrorPage], kw_only=True):
    """Read the error log, latest first: a row per failed run, including those of deleted jobs."""

    limit: Limit = 100
    after: Annotated[AfterPage, Meta(description="`next` of the previous page, or an `error_id`.")] | None = None
    task: TaskName | None = None
    queue: QueueName | None = None
    group: GroupName | None = None
    job_id: Annotated[UUID, Meta(description="Only errors of this job.")] | None = None


@failures.declare("GET", "/errors/{group}/jobs", role=Role.READ)
class ListGroupJobs(Operation[JobPage]):
    """List the jobs of a group of errors, newest first. It is the same as the list of jobs with this `error_group`."""

    group: str
    limit: Limit = 50
    after: AfterPage | None = None


class GroupRetryRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Time and filter of a retry of a group's jobs."""

    EXAMPLE: ClassVar[Any] = {"at": "2026-11-20T18:00:00Z", "spread_s": 600}

    at: Annotated[Instant, Meta(description="Start. Null and past times mean now.")] | None = None
    spread_s: Annotated[
        float, Meta(ge=0, le=MAX_SPREAD_S, description="Seconds after the start over which the jobs are spread.")
    ] = 0.0
    state: State | None = None
    limit: Annotated[int, Meta(ge=1, le=MAX_BULK, description="Maximum number of jobs that one request processes.")] = (
        1_000
    )
    after: AfterPage | None = None


@failures.declare("POST", "/errors/{group}/retry", role=Role.ADMIN, errors=(ErrorGroupNotFound,))
class RetryErrorGroup(GroupRetryRequest, Operation[GroupRetried], kw_only=True):
    """Retry the jobs of a group of errors, oldest first, up to its limit; repeat with `next` as `after` until null.

    Jobs that failed for good are queued as if they were new. For jobs that wait for a retry, the next attempt is moved.
    A job that has started meanwhile does not change. 404 if the group has no job.
    """

    group: str


@failures.declare("GET", "/duplicates", role=Role.READ, large=True)
class ListDuplicates(Operation[DuplicateGroups], kw_only=True):
    """List groups of waiting jobs with the same queue, task, args and partition_key, the largest first."""

    task: TaskName | None = None
    queue: QueueName | None = None
    limit: Limit = 50


class CancelDuplicatesRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Task whose duplicates are canceled."""

    EXAMPLE: ClassVar[Any] = {"task": "load.rates"}

    task: TaskName
    queue: QueueName | None = None
    limit: Annotated[int, Meta(ge=1, le=MAX_BULK, description="Maximum number of jobs that are canceled.")] = 1_000


@failures.declare("POST", "/duplicates/cancel", role=Role.ADMIN)
class CancelDuplicates(CancelDuplicatesRequest, Operation[Changed]):
    """Cancel a task's duplicates, except the best of each group: the most urgent, then the oldest."""

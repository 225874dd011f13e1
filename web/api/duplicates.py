"""Duplicates over HTTP: waiting jobs with the same task and args are listed, and canceled but for the best (S6)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final

from msgspec import Meta, Struct

from dataloader.jobs.contract import MAX_BULK
from dataloader.jobs.duplicates import DuplicateGroups
from dataloader.web import shown
from dataloader.web.api.job_actions import Changed
from dataloader.web.api.job_fields import QueueName, TaskName
from dataloader.web.auth import Role
from dataloader.web.paging import Limit
from dataloader.web.routes import Answer, Call, Routes

routes: Final = Routes()


class DuplicatesQuery(Struct, forbid_unknown_fields=True, kw_only=True):
    """Which duplicates are looked for."""

    task: TaskName | None = None
    queue: QueueName | None = None
    limit: Limit = 50


class CancelDuplicatesRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """The task whose duplicates are canceled."""

    EXAMPLE: ClassVar[Any] = {"task": "load.rates"}

    task: TaskName
    queue: QueueName | None = None
    limit: Annotated[int, Meta(ge=1, le=MAX_BULK, description="The most jobs that are canceled.")] = 1_000


@routes.add(
    "GET", "/api/v1/duplicates", role=Role.READ, query=DuplicatesQuery, answers={200: DuplicateGroups}, rows=True
)
async def list_duplicates(call: Call, query: DuplicatesQuery) -> Answer:
    """List groups of waiting jobs with the same queue, task, args and partition_key, the largest first."""
    groups = await call.jobs.duplicates(task=query.task, queue=query.queue, limit=query.limit)
    return Answer(value=DuplicateGroups(list(map(shown.duplicates, groups))))


@routes.add(
    "POST",
    "/api/v1/duplicates/cancel",
    role=Role.ADMIN,
    body=CancelDuplicatesRequest,
    answers={200: Changed},
)
async def cancel_duplicates(call: Call, body: CancelDuplicatesRequest) -> Answer:
    """Cancel a task's duplicates, but for the best of each group: the most urgent, of these the oldest."""
    changed = await call.jobs.cancel_duplicates(body.task, queue=body.queue, limit=body.limit)
    return Answer(value=Changed(changed))

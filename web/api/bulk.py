"""Bulk operations, which outlive their request: they are started, monitored and stopped."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any, ClassVar, Final
from uuid import UUID

from msgspec import Meta

from dataloader.jobs.bulk_contract import MAX_CHOSEN, Action, BulkCount, BulkPage, BulkRecord, Chosen
from dataloader.jobs.contract import Change
from dataloader.jobs.model import MAX_INT
from dataloader.jobs.operations.fields import Criteria, Priority
from dataloader.jobs.roles import Role
from dataloader.web import shown
from dataloader.web.paging import PageQuery, page_answer
from dataloader.web.routes import Answer, Call, Routes

routes: Final = Routes()

FREEZE_S: Final = 45.0
"""Seconds in which the jobs of an operation must be frozen; a million jobs take several."""


class BulkActRequest(Criteria, kw_only=True):
    """Action, and the jobs: those that match the criteria, of which at least one is given, or `job_ids`."""

    EXAMPLE: ClassVar[Any] = {"action": "retry", "queue": "load.cbr", "status": ["failed"]}

    action: Annotated[Action, Meta(description="What is done to each job.")]
    priority: Annotated[Priority | None, Meta(description="The new priority, for `set_priority`.")] = None
    job_ids: (
        Annotated[list[UUID], Meta(min_length=1, max_length=MAX_CHOSEN, description="The jobs, instead of criteria.")]
        | None
    ) = None
    bulk_id: (
        Annotated[UUID, Meta(description="The act's id, made by you: a repeated request begins no other.")] | None
    ) = None
    most: Annotated[int, Meta(ge=0, le=MAX_INT, description="Begin nothing if it is for more jobs.")] | None = None
    dry_run: Annotated[bool, Meta(description="Begin nothing, only count the jobs: answered 200.")] = False

    def __post_init__(self) -> None:
        """Refuse contradictory fields, in addition to the checks of `JobFilter`."""
        super().__post_init__()
        given = [name for name in Criteria.__struct_fields__ if getattr(self, name) is not None]
        if self.job_ids is not None and given:
            raise ValueError(f"$: job_ids, or criteria such as {given[0]}, not both")
        if self.job_ids is None and not given:
            raise ValueError(f"$: job_ids, or at least one of {', '.join(Criteria.__struct_fields__)}")
        if (self.priority is None) == (self.action == "set_priority"):
            raise ValueError("$: set_priority needs a priority, and nothing else has one")

    @property
    def change(self) -> Change:
        """Change of each job."""
        return Change(action=self.action, priority=self.priority or 0)

    @property
    def chosen(self) -> Chosen:
        """Jobs of the operation."""
        return self.job_filter() if self.job_ids is None else self.job_ids


class BulkQuery(PageQuery, kw_only=True):
    """Page of bulk operations."""


@routes.add(
    "POST",
    "/api/v1/bulk",
    role=Role.ADMIN,
    body=BulkActRequest,
    answers={200: BulkCount, 202: BulkRecord},
    deadline_s=FREEZE_S,
)
async def start_bulk(call: Call, body: BulkActRequest) -> Answer:
    """Begin a bulk operation: cancel, retry, run now or change of priority.

    Its jobs are those that match now, frozen: later jobs are not included. It continues without the caller, 500 jobs at
    a time; its ID shows its progress.
    """
    if body.dry_run:
        return Answer(value=await call.bulk.count(body.change, body.chosen))
    record = await call.bulk.start(body.change, body.chosen, bulk_id=body.bulk_id, most=body.most)
    return Answer(
        value=shown.bulk(record),
        status=HTTPStatus.ACCEPTED,
        headers={"Location": f"/api/v1/bulk/{record.bulk_id}"},
    )


@routes.add("GET", "/api/v1/bulk", role=Role.ADMIN, query=BulkQuery, answers={200: BulkPage}, pages=True)
async def list_bulk(call: Call, query: BulkQuery) -> Answer:
    """List the bulk operations, latest first."""
    page = await call.bulk.find(limit=query.limit, after=query.after)
    return page_answer(call, BulkPage(list(map(shown.bulk, page.bulk)), page.next))


@routes.add("GET", "/api/v1/bulk/<uuid:bulk_id>", role=Role.ADMIN, answers={200: BulkRecord})
async def get_bulk(call: Call, bulk_id: UUID) -> Answer:
    """Show a bulk operation and its progress."""
    return Answer(value=shown.bulk(await call.bulk.get(bulk_id)))


@routes.add("POST", "/api/v1/bulk/<uuid:bulk_id>/stop", role=Role.ADMIN, answers={200: BulkRecord})
async def stop_bulk(call: Call, bulk_id: UUID) -> Answer:
    """Stop a bulk operation. Changed jobs stay changed, and an operation that has ended does not change."""
    return Answer(value=shown.bulk(await call.bulk.stop(bulk_id)))

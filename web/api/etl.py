"""Loads over HTTP: runs and their timelines, loads, and failures.

All routes only read. A load is started, canceled and retried as a job. Texts of sources and handlers are shown without
their secrets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final
from uuid import UUID

import attrs
import trio
from msgspec import Meta, Struct

from dataloader.jobs.listings import MAX_PAGE
from dataloader.jobs.model import Instant, about
from dataloader.jobs.operations.fields import AfterPage, Limit, LoadName
from dataloader.jobs.page_cursor import Next
from dataloader.jobs.roles import Role
from dataloader.jobs.secrets.masking import mask_text
from dataloader.store.etl import run_records
from dataloader.store.etl.run_records import (
    MAX_LOADS,
    FailureLine,
    FailurePage,
    LoadPage,
    LoadRecord,
    RunPage,
    RunRecord,
    RunTask,
)
from dataloader.web import shown
from dataloader.web.paging import PageQuery, page_answer
from dataloader.web.routes import Answer, Call, Routes

routes: Final = Routes()


class RunsQuery(PageQuery, kw_only=True):
    """Page of runs, newest first."""

    name: Annotated[LoadName, Meta(description="Only runs of this load or flow.")] | None = None


class TimelineQuery(PageQuery, kw_only=True):
    """Page of a run's tasks, in the order of their registration."""

    limit: Limit = MAX_PAGE


class LoadsQuery(PageQuery, kw_only=True):
    """Page of loads, by name."""

    limit: Annotated[int, Meta(ge=1, le=MAX_LOADS, description="The most rows of the page.")] = 50


class FailuresQuery(PageQuery, kw_only=True):
    """Page of failures, oldest first."""

    limit: Limit = 100
    after: Annotated[AfterPage, Meta(description="`next` of the page before, or a `failure_id`.")] | None = None


class RunTimeline(Struct, frozen=True, kw_only=True):
    """Run and its tasks, in the order of their registration."""

    run_id: Annotated[UUID, about("The run's id, which is its job's.")]
    name: Annotated[str, about("The load or the flow that ran.")]
    kind: Annotated[str, about("`load` or `flow`.")]
    status: Annotated[
        str,
        Meta(
            description="`running`, `waiting` for another run of a load, then `succeeded`, `succeeded_with_failures`, "
            "`failed`, `canceled` or `interrupted`; if the run could not record one, its job's status."
        ),
    ]
    started_at: Annotated[Instant, about("When it began.")]
    finished_at: Annotated[Instant | None, about("When it ended.")]
    reason: (
        Annotated[
            str, Meta(description="The reason for its status: its failures and their number; for a flow see its tasks.")
        ]
        | None
    )
    counts: Annotated[dict[str, Any], about("Its counts: requests, rows and more, by name.")]
    tasks: Annotated[list[RunTask], about("Its tasks, in the order of their registration.")]
    next: Next


@routes.add("GET", "/api/v1/runs", role=Role.READ, query=RunsQuery, answers={200: RunPage}, pages=True)
async def list_runs(call: Call, query: RunsQuery) -> Answer:
    """List runs of loads and flows, newest first."""
    page = await run_records.page_of_runs(call.services.database, name=query.name, limit=query.limit, after=query.after)
    return page_answer(call, RunPage([_masked_run(run) for run in page.runs], page.next))


async def _masked_failures(found: Sequence[FailureLine]) -> list[FailureLine]:
    failures = []
    for failure in found:
        failures.append(failure.masked())
        # Each has two kilobytes, so other tasks must be able to run in between.
        await trio.lowlevel.checkpoint()
    return failures


def _masked_run(run: RunRecord) -> RunRecord:
    return attrs.evolve(run, name=mask_text(run.name), reason=shown.text(run.reason), counts=shown.fields(run.counts))


@routes.add(
    "GET",
    "/api/v1/runs/<uuid:run_id>/timeline",
    role=Role.READ,
    query=TimelineQuery,
    answers={200: RunTimeline},
    pages=True,
)
async def show_timeline(call: Call, run_id: UUID, query: TimelineQuery) -> Answer:
    """Show the beginning, end and outcome of each task of a run, and the times of its phases.

    A run's ID is its job's. A run whose job has ended without a recorded outcome shows the job's status. Phases appear
    when the task has ended.
    """
    timeline = await run_records.get_timeline(call.services.database, run_id, limit=query.limit, after=query.after)
    run, tasks = _masked_run(timeline.run), list(map(_masked_task, timeline.tasks))
    return page_answer(call, RunTimeline(**attrs.asdict(run), tasks=tasks, next=timeline.next))


def _masked_task(task: RunTask) -> RunTask:
    return attrs.evolve(
        task,
        task=mask_text(task.task),
        layer=mask_text(task.layer),
        reason=shown.text(task.reason),
        phases=shown.fields(task.phases),
        tables=shown.fields(task.tables),
        counts=shown.fields(task.counts),
    )


@routes.add(
    "GET",
    "/api/v1/runs/<uuid:run_id>/failures",
    role=Role.READ,
    query=FailuresQuery,
    answers={200: FailurePage},
    pages=True,
)
async def list_failures_of_run(call: Call, run_id: UUID, query: FailuresQuery) -> Answer:
    """List the failures of a run, oldest first."""
    page = await run_records.page_of_run_failures(call.services.database, run_id, after=query.after, limit=query.limit)
    return page_answer(call, FailurePage(await _masked_failures(page.failures), page.next))


@routes.add("GET", "/api/v1/loads", role=Role.READ, query=LoadsQuery, answers={200: LoadPage}, pages=True)
async def list_loads(call: Call, query: LoadsQuery) -> Answer:
    """List the loads of this database, by name."""
    page = await run_records.page_of_loads(call.services.database, limit=query.limit, after=query.after)
    return page_answer(call, LoadPage([_masked_load(load) for load in page.loads], page.next))


@routes.add("GET", "/api/v1/loads/<path:load>", role=Role.READ, answers={200: LoadRecord})
async def show_load(call: Call, load: str) -> Answer:
    """Show a load's progress, its last run, and the number of unresolved failures (counted up to 1,000)."""
    return Answer(value=_masked_load(await run_records.get_load(call.services.database, load)))


def _masked_load(load: LoadRecord) -> LoadRecord:
    last = load.last_run
    if last is None:
        return load
    return attrs.evolve(
        load, last_run=attrs.evolve(last, reason=shown.text(last.reason), counts=shown.fields(last.counts))
    )


@routes.add(
    "GET",
    "/api/v1/loads/<path:load>/failures",
    role=Role.READ,
    query=FailuresQuery,
    answers={200: FailurePage},
    pages=True,
)
async def list_failures_of_load(call: Call, load: str, query: FailuresQuery) -> Answer:
    """List the failures of a load, in any run, that are not resolved yet, oldest first."""
    page = await run_records.page_of_load_failures(call.services.database, load, after=query.after, limit=query.limit)
    return page_answer(call, FailurePage(await _masked_failures(page.failures), page.next))

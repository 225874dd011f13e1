"""Reads of durable processes over HTTP: one, pages of them, their events and tasks; and waits for them."""

from __future__ import annotations

from typing import Annotated, Any, Final

import attrs
import msgspec
from msgspec import Meta, Struct

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.model import about
from dataloader.jobs.operations.fields import AfterPage, Limit
from dataloader.jobs.process_listings import (
    ProcessErrorPage,
    ProcessEventPage,
    ProcessFilter,
    ProcessPage,
    ProcessRecord,
    ProcessStatus,
    ProcessTask,
    ProcessTaskPage,
    ProcessVersion,
)
from dataloader.jobs.roles import Role
from dataloader.jobs.secrets.masking import mask_text
from dataloader.web import shown
from dataloader.web.api.jobs import MAX_WAIT_S
from dataloader.web.api.processes import ADDRESS, ProcessId, ProcessType, TaskQuery, WaitQuery
from dataloader.web.paging import PageQuery, page_answer
from dataloader.web.routes import DEADLINE_S, Answer, Call, Routes

routes: Final = Routes()


class ProcessesQuery(PageQuery, kw_only=True):
    """Page of processes, newest first."""

    type: ProcessType | None = None
    process_id: ProcessId | None = None
    status: ProcessStatus | None = None
    metadata: (
        Annotated[
            str, Meta(description="A JSON object: what their metadata have at least.", examples=['{"tenant":"a"}'])
        ]
        | None
    ) = None
    error_group: Annotated[str, about("The id of a group of errors.")] | None = None

    def wanted(self) -> ProcessFilter:
        """Return the domain's filter. Raises `BadRequest`."""
        metadata = None
        if self.metadata is not None:
            try:
                metadata = msgspec.json.decode(self.metadata, type=dict[str, Any])
            except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
                raise BadRequest("metadata", f"is not a JSON object: {error}") from error
            metadata = shown.searchable(metadata)
        return ProcessFilter(
            type=self.type,
            process_id=self.process_id,
            status=self.status,
            metadata=metadata,
            error_group=self.error_group,
        )


class HistoryQuery(PageQuery, kw_only=True):
    """Page of a process's history."""

    limit: Limit = 200
    after: Annotated[AfterPage, Meta(description="`next` of the page before, or a row's number.")] | None = None
    newest_first: Annotated[bool, about("Whether the page begins with the latest.")] = False


class VersionsQuery(Struct, forbid_unknown_fields=True, kw_only=True):
    """Query with a type."""

    type: ProcessType | None = None


class VersionList(Struct, frozen=True):
    """Versions of types of processes."""

    versions: Annotated[list[ProcessVersion], about("The versions, the newest of a type first.")]


class ProcessErrorsQuery(PageQuery, kw_only=True):
    """Page of the groups of errors, those with the most processes first."""

    type: ProcessType | None = None


_WAITS: Final[dict[str, Any]] = {"query": WaitQuery, "deadline_s": DEADLINE_S + MAX_WAIT_S}
_WAITS_FOR_TASK: Final[dict[str, Any]] = _WAITS | {"query": TaskQuery}


@routes.add("GET", "/api/v1/processes", role=Role.READ, query=ProcessesQuery, answers={200: ProcessPage}, pages=True)
async def list_processes(call: Call, query: ProcessesQuery) -> Answer:
    """List processes, newest first. A page of long states has fewer than `limit`."""
    page = await call.processes.find(query.wanted(), limit=query.limit, after=query.after)
    return page_answer(call, ProcessPage(await call.masked(shown.process, page.processes), page.next))


@routes.add("GET", ADDRESS, role=Role.READ, answers={200: ProcessRecord}, **_WAITS)
async def show_process(call: Call, process_type: str, process_id: str, query: WaitQuery) -> Answer:
    """Show a process. With `wait`, return when its first step has finished, or after `wait` seconds."""
    if query.wait > 0:
        call.services.waiting.check_room(call.operator.name)
    found = await call.processes.get(process_type, process_id, wait_s=query.wait)
    [record] = await call.masked(shown.process, [found])
    return Answer(value=record)


@routes.add("GET", f"{ADDRESS}/events", role=Role.READ, query=HistoryQuery, answers={200: ProcessEventPage}, pages=True)
async def list_process_events(call: Call, process_type: str, process_id: str, query: HistoryQuery) -> Answer:
    """List a process's events, oldest first. To follow them, send the last `event_id` as `after`."""
    page = await call.processes.events(
        process_type, process_id, limit=query.limit, after=query.after, newest_first=query.newest_first
    )
    return page_answer(call, ProcessEventPage(await call.masked(shown.process_event, page.events), page.next))


@routes.add("GET", f"{ADDRESS}/tasks", role=Role.READ, query=HistoryQuery, answers={200: ProcessTaskPage}, pages=True)
async def list_process_tasks(call: Call, process_type: str, process_id: str, query: HistoryQuery) -> Answer:
    """List a process's requests and timers, oldest first."""
    page = await call.processes.tasks(
        process_type, process_id, limit=query.limit, after=query.after, newest_first=query.newest_first
    )
    return page_answer(call, ProcessTaskPage(await call.masked(shown.process_task, page.tasks), page.next))


@routes.add(
    "GET", "/api/v1/processes/tasks/<int:task_id>", role=Role.READ, answers={200: ProcessTask}, **_WAITS_FOR_TASK
)
async def show_process_task(call: Call, task_id: int, query: TaskQuery) -> Answer:
    """Show a task. With `wait`, return when it has its answer, or after `wait` seconds."""
    if query.wait > 0:
        call.services.waiting.check_room(call.operator.name)
    found = await call.processes.task(task_id, wait_s=query.wait, ident=query.ident)
    [task] = await call.masked(shown.process_task, [found])
    return Answer(value=task)


@routes.add(
    "GET",
    "/api/v1/processes/errors",
    role=Role.READ,
    query=ProcessErrorsQuery,
    answers={200: ProcessErrorPage},
    pages=True,
)
async def list_process_errors(call: Call, query: ProcessErrorsQuery) -> Answer:
    """Count the processes in error by type and error, the most processes first. Each page counts again."""
    page = await call.processes.errors(process_type=query.type, limit=query.limit, after=query.after)
    return page_answer(call, ProcessErrorPage(list(map(shown.process_error_group, page.groups)), page.next))


@routes.add("GET", "/api/v1/processes/versions", role=Role.READ, query=VersionsQuery, answers={200: VersionList})
async def list_process_versions(call: Call, query: VersionsQuery) -> Answer:
    """List the versions of types that have processes or are served, with their processes by status."""
    found = await call.processes.versions(query.type)
    return Answer(value=VersionList(await call.masked(_version, found)))


def _version(one: ProcessVersion) -> ProcessVersion:
    return attrs.evolve(one, type=mask_text(one.type))

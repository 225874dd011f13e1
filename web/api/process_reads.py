"""Durable processes are looked at over HTTP: one, pages of them, their events and tasks; and waited for (P1, P2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, TypeVar

import msgspec
import trio
from msgspec import Meta

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.model import about
from dataloader.jobs.process_listings import (
    ProcessErrorPage,
    ProcessEventPage,
    ProcessFilter,
    ProcessPage,
    ProcessRecord,
    ProcessStatus,
    ProcessTask,
    ProcessTaskPage,
)
from dataloader.web import shown
from dataloader.web.api.jobs import MAX_WAIT_S
from dataloader.web.api.processes import ADDRESS, ProcessId, ProcessType, WaitQuery
from dataloader.web.auth import Role
from dataloader.web.paging import AfterPage, Limit, PageQuery, page_answer
from dataloader.web.routes import DEADLINE_S, Answer, Call, Routes

R = TypeVar("R")

routes: Final = Routes()


class ProcessesQuery(PageQuery, kw_only=True):
    """A page of processes, newest first."""

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
        """The same for the domain. Raises `BadRequest`."""
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
    """A page of what has happened in a process."""

    limit: Limit = 200
    after: Annotated[AfterPage, Meta(description="`next` of the page before, or a row's number.")] | None = None
    newest_first: Annotated[bool, about("Whether the page begins with the latest.")] = False


class ProcessErrorsQuery(PageQuery, kw_only=True):
    """A page of the groups of errors, those with the most processes first."""

    type: ProcessType | None = None


_WAITS: Final[dict[str, Any]] = {"query": WaitQuery, "waits": True, "deadline_s": DEADLINE_S + MAX_WAIT_S}


@routes.add("GET", "/api/v1/processes", role=Role.READ, query=ProcessesQuery, answers={200: ProcessPage}, pages=True)
async def list_processes(call: Call, query: ProcessesQuery) -> Answer:
    """List processes, newest first. A page of long states has fewer than `limit`."""
    page = await call.processes.find(query.wanted(), limit=query.limit, after=query.after)
    return page_answer(call, ProcessPage(await _masked(call, shown.process, page.processes), page.next))


@routes.add("GET", ADDRESS, role=Role.READ, answers={200: ProcessRecord}, **_WAITS)
async def show_process(call: Call, process_type: str, process_id: str, query: WaitQuery) -> Answer:
    """Show a process; with `wait`, one whose first step is not done as soon as it is, or after so many seconds."""
    if query.wait > 0:
        call.services.waiting.check_room()
    found = await call.processes.get(process_type, process_id, wait_s=query.wait)
    [record] = await _masked(call, shown.process, [found])
    return Answer(value=record)


@routes.add("GET", f"{ADDRESS}/events", role=Role.READ, query=HistoryQuery, answers={200: ProcessEventPage}, pages=True)
async def list_process_events(call: Call, process_type: str, process_id: str, query: HistoryQuery) -> Answer:
    """Read a process's events, oldest first. To follow them, send the last `event_id` as `after`."""
    page = await call.processes.events(
        process_type, process_id, limit=query.limit, after=query.after, newest_first=query.newest_first
    )
    return page_answer(call, ProcessEventPage(await _masked(call, shown.process_event, page.events), page.next))


@routes.add("GET", f"{ADDRESS}/tasks", role=Role.READ, query=HistoryQuery, answers={200: ProcessTaskPage}, pages=True)
async def list_process_tasks(call: Call, process_type: str, process_id: str, query: HistoryQuery) -> Answer:
    """List what was asked of a process, and its timers, oldest first."""
    page = await call.processes.tasks(
        process_type, process_id, limit=query.limit, after=query.after, newest_first=query.newest_first
    )
    return page_answer(call, ProcessTaskPage(await _masked(call, shown.process_task, page.tasks), page.next))


@routes.add("GET", "/api/v1/processes/tasks/<int:task_id>", role=Role.READ, answers={200: ProcessTask}, **_WAITS)
async def show_process_task(call: Call, task_id: int, query: WaitQuery) -> Answer:
    """Show a task; with `wait`, as soon as it has its answer, or after so many seconds."""
    if query.wait > 0:
        call.services.waiting.check_room()
    [task] = await _masked(call, shown.process_task, [await call.processes.task(task_id, wait_s=query.wait)])
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
    """Count the processes in error by type and error, the most processes first. Each page is counted anew."""
    page = await call.processes.errors(process_type=query.type, limit=query.limit, after=query.after)
    return page_answer(call, ProcessErrorPage(list(map(shown.process_error_group, page.groups)), page.next))


async def _masked(call: Call, mask: Callable[[R], R], records: Sequence[R]) -> list[R]:
    """The records without secrets. In a thread: a megabyte takes a tenth of a second."""
    masking = call.services.turns.masking
    return await trio.to_thread.run_sync(lambda: list(map(mask, records)), limiter=masking)

"""Page of one durable process: its status and wait reason, its state, and a timeline of its tasks and events."""

from __future__ import annotations

from typing import Any, Final, Literal

from msgspec import Struct

from dataloader.jobs.process_listings import ENDED
from dataloader.jobs.secrets.masking import mask_text
from dataloader.jobs.secrets.record_masks import masked
from dataloader.store.processes.process_story import MOST_WAITING, read_story
from dataloader.web.pages.copies import copies
from dataloader.web.pages.page_answers import HtmlPage, PageAnswer, json_file
from dataloader.web.pages.page_routes import PageRoutes
from dataloader.web.pages.process_words import KINDS, in_line, state_words, what_of
from dataloader.web.pages.visit import Visit

pages: Final = PageRoutes()

REFRESH_S: Final = 1.0
TASKS: Final = 25
EVENTS: Final = 50
_MOST_EVENT: Final = 4_000
"""Maximum number of displayed characters of an event."""


class ProcessQuery(Struct, forbid_unknown_fields=True, kw_only=True):
    """Query with a process; `after`: the cursor of its tasks or events."""

    type: str
    id: str
    after: str | None = None


class TaskQuery(Struct, forbid_unknown_fields=True, kw_only=True):
    """The query of a task's page. `whole`: a value to download. The page shows only its beginning."""

    whole: Literal["args", "context", "response"] | None = None


class StateQuery(Struct, forbid_unknown_fields=True, kw_only=True):
    """The process. `whole`: a value to download. The page shows only its beginning."""

    type: str
    id: str
    whole: Literal["state", "metadata"] | None = None


@pages.show("/process", query=ProcessQuery)
async def show_process_page(visit: Visit, query: ProcessQuery) -> PageAnswer:
    """Show a process. The live part has everything that changes."""
    own = await read_story(visit.services.database, query.type, query.id, limit=TASKS, after=query.after)
    story = await visit.in_thread(masked, own)
    is_mended = own.running is not None or own.timer is not None or own.waiting > 0
    address = f"/api/v1/processes/{query.type}/{query.id}"
    values: dict[str, Any] = {
        "own": own,
        "story": story,
        "state": state_words(own),
        "is_first": query.after is None,
        "most_waiting": MOST_WAITING,
        "can_mend": own.status == "error" and not is_mended,
        "what_of": what_of,
        "kinds": KINDS,
        "in_line": in_line,
        "which": {"type": query.type, "id": query.id},
        "copies": () if visit.part else copies(visit, address, {}, ["process", "show", query.type, query.id]),
    }
    return HtmlPage("process.html", f"{story.type} {story.process_id}", values, refresh_s=REFRESH_S)


@pages.show("/process/task/<int:task_id>", query=TaskQuery)
async def show_process_task(visit: Visit, task_id: int, query: TaskQuery) -> PageAnswer:
    """Show a task of a process with its input and its answer."""
    own = await visit.processes.task(task_id)
    task = await visit.in_thread(masked, own)
    if query.whole is not None:
        return await visit.in_thread(json_file, getattr(task, query.whole), f"{query.whole}-of-task-{task_id}.json")
    values = {
        "own": own,
        "task": task,
        "what": what_of(own.kind, own.method),
    }
    title = f"Task {task_id} of {task.type} {task.process_id}"
    return HtmlPage("process_task.html", title, values, refresh_s=None if own.status in ENDED else REFRESH_S)


@pages.show("/process/events", query=ProcessQuery)
async def show_process_events(visit: Visit, query: ProcessQuery) -> PageAnswer:
    """Show all events of a process, in order."""
    page = await visit.processes.events(query.type, query.id, limit=EVENTS, after=query.after)
    events = await visit.in_thread(lambda: [(one, in_line(masked(one).payload)) for one in page.events])
    values = {
        "type": mask_text(query.type),
        "id": mask_text(query.id),
        "which": {"type": query.type, "id": query.id},
        "events": events,
        "next": page.next,
        "most": _MOST_EVENT,
    }
    return HtmlPage("process_events.html", f"Events of {values['type']} {values['id']}", values)


@pages.show("/process/state", query=StateQuery)
async def show_process_state(visit: Visit, query: StateQuery) -> PageAnswer:
    """Show a state, and metadata, that are too long for the page of their process."""
    own = await visit.processes.get(query.type, query.id)
    record = await visit.in_thread(masked, own)
    if query.whole is not None:
        return await visit.in_thread(json_file, getattr(record, query.whole), f"{query.whole}.json")
    values = {"record": record, "which": {"type": query.type, "id": query.id}}
    return HtmlPage("process_state.html", f"State of {record.type} {record.process_id}", values)

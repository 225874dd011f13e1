"""Queues: the waiting jobs of each by reason, running jobs, workers; pause and resume; and the processes."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta, Struct

from dataloader.jobs.roles import Role
from dataloader.jobs.secrets.masking import mask_text
from dataloader.jobs.secrets.record_masks import masked
from dataloader.store.queue.depths import read_depths
from dataloader.store.queue.serving import PROCESSES, read_processes, read_queue
from dataloader.web.pages.addresses import own_path
from dataloader.web.pages.page_answers import HtmlPage, PageAnswer, Redirect, Undo
from dataloader.web.pages.page_routes import PageRoutes
from dataloader.web.pages.visit import Visit

pages: Final = PageRoutes()

PAGE: Final = 100
REFRESH_S: Final = 5.0
"""Seconds between refreshes of the depths."""


class QueuesQuery(Struct, forbid_unknown_fields=True, kw_only=True):
    """Page of queues, by name: `after` is the number of queues to skip."""

    after: Annotated[int, Meta(ge=0)] = 0


class QueueQuery(Struct, forbid_unknown_fields=True, kw_only=True):
    """Query with a queue."""

    name: str


class QueueForm(Struct, forbid_unknown_fields=True, kw_only=True):
    """Queue, and the page to return to."""

    queue: Annotated[str, Meta(min_length=1)]
    to: str = "/ui/queues"


@pages.show("/queues", query=QueuesQuery)
async def show_queues(visit: Visit, query: QueuesQuery) -> PageAnswer:
    """Show the queues that have work, are served or are paused, by name."""
    depths = await read_depths(visit.services.database)
    end = query.after + PAGE
    values = {
        "queues": [(record, masked(record)) for record in depths.queues[query.after : end]],
        "next": end if end < len(depths.queues) else None,
        "depths": depths,
    }
    return HtmlPage("queues.html", "Queues", values, refresh_s=REFRESH_S)


@pages.show("/queue", query=QueueQuery)
async def show_queue(visit: Visit, query: QueueQuery) -> PageAnswer:
    """Show one queue: its depths, its workers, its running jobs, and the jobs that start next."""
    depths, detail = await read_queue(visit.services.database, query.name)
    counted = next((record for record in depths.queues if record.queue == query.name), None)
    pause = depths.paused.get(query.name)
    values = {
        "own": query.name,
        "name": mask_text(query.name),
        "queue": counted,
        "depths": depths,
        "pause": None if pause is None else masked(pause),
        "workers": list(map(masked, detail.workers)),
        "running": list(map(masked, detail.running)),
        "next": list(map(masked, detail.next)),
        "tasks": [(task.task, masked(task)) for task in detail.tasks],
    }
    return HtmlPage("queue.html", f"Queue {mask_text(query.name)}", values, refresh_s=REFRESH_S)


@pages.show("/workers")
async def show_workers(visit: Visit) -> PageAnswer:
    """Show the processes: their queues, their used slots, and which have ended."""
    processes = list(map(masked, await read_processes(visit.services.database)))
    return HtmlPage("workers.html", "Workers", {"processes": processes, "most": PROCESSES}, refresh_s=REFRESH_S)


@pages.act("/queues/pause", role=Role.OPERATE, form=QueueForm)
async def pause_queue(visit: Visit, form: QueueForm) -> PageAnswer:
    """Pause a queue."""
    await visit.jobs.pause(form.queue)
    undo = Undo("/ui/queues/resume", {"queue": form.queue, "to": own_path(form.to)})
    return Redirect(own_path(form.to), f"Paused {mask_text(form.queue)}: none of its jobs start.", undo)


@pages.act("/queues/resume", role=Role.OPERATE, form=QueueForm)
async def resume_queue(visit: Visit, form: QueueForm) -> PageAnswer:
    """End a queue's pause."""
    await visit.jobs.resume(form.queue)
    undo = Undo("/ui/queues/pause", {"queue": form.queue, "to": own_path(form.to)})
    return Redirect(own_path(form.to), f"Resumed {mask_text(form.queue)}.", undo)

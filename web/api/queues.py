"""Queues and workers over HTTP: what waits, and the processes that serve it.

A pause is kept in the database and holds for all processes; what already runs goes on.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final

from msgspec import Struct

from dataloader.jobs.listings import MAX_PAGE, QueuePage, WorkerPage
from dataloader.jobs.model import about
from dataloader.jobs.secrets.masking import mask_text
from dataloader.store.queue.name_pages import page_of_queues, page_of_workers
from dataloader.web import shown
from dataloader.web.auth import Role
from dataloader.web.paging import Limit, PageQuery, page_answer
from dataloader.web.routes import Answer, Call, Routes

routes: Final = Routes()


class QueuesQuery(PageQuery, kw_only=True):
    """A page of queues, by name."""

    limit: Limit = 200


class WorkersQuery(PageQuery, kw_only=True):
    """A page of workers, by name."""

    limit: Limit = MAX_PAGE


class QueuePaused(Struct, frozen=True):
    """A queue after it was paused or resumed, for all processes."""

    EXAMPLE: ClassVar[Any] = {"queue": "load.cbr", "paused": True}

    queue: Annotated[str, about("The queue's name.")]
    paused: Annotated[bool, about("Whether it is paused now.")]


@routes.add("GET", "/api/v1/queues", role=Role.READ, query=QueuesQuery, answers={200: QueuePage}, pages=True)
async def list_queues(call: Call, query: QueuesQuery) -> Answer:
    """List the queues that have work, are served or are paused, by name."""
    page = await page_of_queues(call.services.database, limit=query.limit, after=query.after)
    return page_answer(call, QueuePage(list(map(shown.queue, page.queues)), page.next))


@routes.add("POST", "/api/v1/queues/<path:queue>/pause", role=Role.OPERATE, answers={200: QueuePaused})
async def pause_queue(call: Call, queue: str) -> Answer:
    """Let no process start jobs of a queue until it is resumed. Running jobs go on."""
    await call.jobs.pause(queue)
    return Answer(value=QueuePaused(mask_text(queue), paused=True))


@routes.add("POST", "/api/v1/queues/<path:queue>/resume", role=Role.OPERATE, answers={200: QueuePaused})
async def resume_queue(call: Call, queue: str) -> Answer:
    """Let the jobs of a queue start again, at once."""
    await call.jobs.resume(queue)
    return Answer(value=QueuePaused(mask_text(queue), paused=False))


@routes.add("GET", "/api/v1/workers", role=Role.READ, query=WorkersQuery, answers={200: WorkerPage}, pages=True)
async def list_workers(call: Call, query: WorkersQuery) -> Answer:
    """List the processes that have beaten in the last minute, by name."""
    page = await page_of_workers(call.services.database, limit=query.limit, after=query.after)
    return page_answer(call, WorkerPage(list(map(shown.worker, page.workers)), page.next))

"""Queues and workers over HTTP: what waits, and the processes that serve it.

A pause is kept in the database and holds for all processes; what already runs goes on.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final

from msgspec import Meta, Struct

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.listings import MAX_PAGE
from dataloader.jobs.model import QueueRecord, WorkerRecord
from dataloader.jobs.secrets.masking import mask_text
from dataloader.store.connection.bridge import Database
from dataloader.store.queue import control, reads
from dataloader.web import shown
from dataloader.web.auth import Role
from dataloader.web.routes import Answer, Call, Routes

routes: Final = Routes()


class QueuesQuery(Struct, forbid_unknown_fields=True, kw_only=True):
    """A page of queues, by name."""

    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE)] = 200
    after: Annotated[str, Meta(description="`next` of the page before.", max_length=3_000)] | None = None


class QueueList(Struct, frozen=True):
    """A page of the queues that have jobs, are served or are paused. `next`: what to send as `after`, or null."""

    queues: list[QueueRecord]
    next: str | None


class QueuePaused(Struct, frozen=True):
    """A queue after it was paused or resumed, for all processes."""

    EXAMPLE: ClassVar[Any] = {"queue": "load.cbr", "paused": True}

    queue: str
    paused: bool


class WorkerList(Struct, frozen=True):
    """The processes that have beaten lately."""

    workers: list[WorkerRecord]


@routes.add("GET", "/api/v1/queues", role=Role.READ, query=QueuesQuery, answers={200: QueueList}, rows=True)
async def list_queues(call: Call, query: QueuesQuery) -> Answer:
    """List the queues that have work, are served or are paused, by name: send a page's `next` as `after` to read on."""
    return Answer(value=QueueList(*await page_of_queues(call.services.database, query.limit, query.after)))


async def page_of_queues(
    database: Database, limit: int, after: str | None = None
) -> tuple[list[QueueRecord], str | None]:
    """At most `limit` queues behind the place `after`, and the place to go on from, None after the last.

    Raises `BadRequest` when the queue at that place has gone.
    """
    if after is not None and after.startswith(shown.DIGEST):
        after = await _queue_at(database, after)
    queues = await reads.list_queues(database, limit=limit + 1, after=after)
    following = shown.place(queues[limit - 1].queue) if len(queues) > limit else None
    return list(map(shown.queue, queues[:limit])), following


async def _queue_at(database: Database, place: str) -> str:
    queue = await reads.queue_of_digest(database, place.removeprefix(shown.DIGEST))
    if queue is not None:
        return queue
    raise BadRequest("after", f"{place!r:.80} is the place of a queue that is gone; list them from the beginning")


@routes.add("POST", "/api/v1/queues/<path:queue>/pause", role=Role.OPERATE, answers={200: QueuePaused})
async def pause_queue(call: Call, queue: str) -> Answer:
    """Let no process start jobs of a queue until it is resumed. Running jobs go on."""
    await control.pause(call.services.database, queue, call.operator)
    return Answer(value=QueuePaused(mask_text(queue), paused=True))


@routes.add("POST", "/api/v1/queues/<path:queue>/resume", role=Role.OPERATE, answers={200: QueuePaused})
async def resume_queue(call: Call, queue: str) -> Answer:
    """Let the jobs of a queue start again, at once."""
    await control.resume(call.services.database, queue, call.operator)
    return Answer(value=QueuePaused(mask_text(queue), paused=False))


@routes.add("GET", "/api/v1/workers", role=Role.READ, answers={200: WorkerList})
async def list_workers(call: Call) -> Answer:
    """List the processes that have beaten in the last minute."""
    workers = await reads.list_workers(call.services.database)
    return Answer(value=WorkerList(list(map(shown.worker, workers))))

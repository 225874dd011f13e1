"""Process over HTTP: health, readiness, status and metrics.

`/health` shows that the event loop runs. It uses no other service, so that an unavailable database kills no process.
`/ready` takes this replica out of a load balancer while it drains or has no database. Both need no token.
"""

from __future__ import annotations

import contextlib
from typing import Annotated, Any, ClassVar, Final

import trio
from msgspec import Meta, Struct

from dataloader.jobs.errors import StoreError
from dataloader.jobs.message_source import MessageSourceState
from dataloader.jobs.model import QueueRecord, WorkerRecord, about
from dataloader.jobs.operations.fields import Instant
from dataloader.jobs.roles import Role
from dataloader.jobs.secrets.masking import mask_names
from dataloader.jobs.secrets.record_masks import masked
from dataloader.store.queue import reads
from dataloader.store.queue.name_pages import page_of_queues, page_of_workers
from dataloader.web.api import metrics
from dataloader.web.problems import unavailable
from dataloader.web.routes import Answer, Call, Routes
from dataloader.web.services import QueueLoad

routes: Final = Routes()

MOST_QUEUES: Final = 100
"""Number of queues in `/status`, the first by name; the list of queues has all."""


class Health(Struct, frozen=True):
    """The process is alive and its event loop runs."""

    EXAMPLE: ClassVar[Any] = {"status": "ok"}

    status: Annotated[str, about("`ok` or `ready`.")]


class ProcessStatus(Struct, frozen=True, kw_only=True):
    """Status of this process and of all that share its database.

    Null for values that the database does not give.
    """

    version: Annotated[str, about("Version of dataloader.")]
    worker: Annotated[str, about("Name of this process: `claimed_by` of its jobs.")]
    started_at: Annotated[Instant, about("Start time.")]
    uptime_s: Annotated[float, about("Seconds since the start.")]
    draining: Annotated[bool, about("True while it is shutting down.")]
    database: Annotated[str, about("`reachable` or `unreachable`.")]
    listener: Annotated[str, about("`connected` while notifications are received, otherwise `polling`.")]
    serving: Annotated[dict[str, QueueLoad], about("Queues that this process serves.")]
    messages: Annotated[list[MessageSourceState], about("Message sources that this process reads.")]
    queues: Annotated[
        list[QueueRecord] | None,
        about("First queues by name, of all processes; null if the database is not available."),
    ]
    queues_next: Annotated[
        str | None, Meta(description="`after` for the queues that are not shown; null if all are shown.")
    ]
    workers: Annotated[list[WorkerRecord] | None, about("All processes; null if the database is not available.")]


@routes.add("GET", "/health", role=None, answers={200: Health})
async def show_health(_call: Call) -> Answer:
    """Show that the process is alive. Uses no other service, answers within 20 ms."""
    return Answer(value=Health("ok"))


@routes.add("GET", "/ready", role=None, answers={200: Health})
async def show_readiness(call: Call) -> Answer:
    """Show whether this replica should get requests: 503 while it drains or has no database."""
    state = call.services.state()
    if state.draining:
        raise unavailable("This process is shutting down.", "draining")
    if not state.store_ready:
        raise unavailable("The database cannot be reached.", "store-unavailable")
    await reads.ping(call.services.database.pool, call.services.http_limits.ping_s)
    return Answer(value=Health("ready"))


@routes.add("GET", "/status", role=Role.READ, answers={200: ProcessStatus}, rows=True)
async def show_process(call: Call) -> Answer:
    """Show this process, and the queues and workers of all, which are null if the database is unavailable or slow."""
    state = call.services.state()
    queues, queues_next, workers = None, None, None
    reachable = await reads.answers(call.services.database.pool, call.services.http_limits.ping_s)
    if reachable:
        with contextlib.suppress(StoreError), trio.move_on_after(call.services.http_limits.ping_s):
            found = await page_of_workers(call.services.database)
            workers = list(map(masked, found.workers))
            page = await page_of_queues(call.services.database, limit=MOST_QUEUES)
            queues, queues_next = list(map(masked, page.queues)), page.next
    return Answer(
        value=ProcessStatus(
            version=state.version,
            worker=state.worker,
            started_at=state.started_at,
            uptime_s=round(state.uptime_s, 3),
            draining=state.draining,
            database="reachable" if reachable else "unreachable",
            listener="connected" if state.listener_connected else "polling",
            serving=mask_names(dict(state.queues)),
            messages=list(state.messages),
            queues=queues,
            queues_next=queues_next,
            workers=workers,
        )
    )


@routes.add("GET", "/metrics", role=Role.READ, answers={200: str})
async def show_metrics(call: Call) -> Answer:
    """Show the metrics in Prometheus' text format."""
    return Answer(value=await metrics.render_metrics(call.services), media_type=metrics.MEDIA_TYPE)

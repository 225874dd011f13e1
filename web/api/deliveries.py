"""Deliveries of durable processes over HTTP: their state, and the release of held ones."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final

from msgspec import Struct

from dataloader.jobs.model import about
from dataloader.jobs.operations.fields import described
from dataloader.jobs.process_outbox import HeldDeliveryPage, HeldFilter, Released, SinkRecord
from dataloader.jobs.roles import Role
from dataloader.web import shown
from dataloader.web.api.processes import ProcessId, ProcessType
from dataloader.web.paging import PageQuery, page_answer
from dataloader.web.routes import Answer, Call, Routes

routes: Final = Routes()

_Sink = Annotated[
    str, described("The sink's name; `messages`: those to other processes.", "books", minLength=1, maxLength=100)
]
_Held = Annotated[bool, about("Only those that wait for an operator.")]


class DeliveriesQuery(PageQuery, kw_only=True):
    """Page of processes whose deliveries are held up."""

    sink: _Sink | None = None
    type: ProcessType | None = None
    process_id: ProcessId | None = None
    held: _Held = False


class ReleaseRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Filter of held-up deliveries, with at least one criterion."""

    EXAMPLE: ClassVar[Any] = {"sink": "books"}

    sink: _Sink | None = None
    type: ProcessType | None = None
    process_id: ProcessId | None = None
    held: _Held = False


class SinkList(Struct, frozen=True):
    """All sinks."""

    sinks: Annotated[list[SinkRecord], about("The sinks, by name.")]


def _wanted(given: DeliveriesQuery | ReleaseRequest) -> HeldFilter:
    return HeldFilter(sink=given.sink, type=given.type, process_id=given.process_id, held=given.held)


@routes.add("GET", "/api/v1/processes/sinks", role=Role.READ, answers={200: SinkList})
async def list_sinks(call: Call) -> Answer:
    """List the sinks of process events, and messages to processes, with the number and age of waiting deliveries."""
    return Answer(value=SinkList(await call.processes.sinks()))


@routes.add(
    "GET",
    "/api/v1/processes/deliveries",
    role=Role.READ,
    query=DeliveriesQuery,
    answers={200: HeldDeliveryPage},
    pages=True,
)
async def list_deliveries(call: Call, query: DeliveriesQuery) -> Answer:
    """List the processes whose deliveries have failed, by sink: they are retried, or held."""
    page = await call.processes.deliveries(_wanted(query), limit=query.limit, after=query.after)
    return page_answer(call, HeldDeliveryPage(list(map(shown.held_delivery, page.deliveries)), page.next))


@routes.add(
    "POST",
    "/api/v1/processes/deliveries/release",
    role=Role.OPERATE,
    body=ReleaseRequest,
    answers={200: Released},
)
async def release_deliveries(call: Call, body: ReleaseRequest) -> Answer:
    """Retry the matching held-up deliveries now, as if they had not failed; at most 10,000 processes."""
    return Answer(value=Released(await call.processes.release(_wanted(body))))

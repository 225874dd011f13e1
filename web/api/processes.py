"""Durable processes over HTTP: the routes of their operations, and the requests to them.

Written by hand are starts, calls, repairs and imports, whose answers may be waited for in the same request or later;
and the operations that wait, or search for metadata.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar

from msgspec import UNSET, Meta, Struct, UnsetType

from dataloader.jobs.model import MAX_KEY, MAX_NAME, Instant, about
from dataloader.jobs.operations.fields import HELD_REQUEST_S, field_meta
from dataloader.jobs.operations.processes import (
    ListProcesses,
    ProcessId,
    RepairProcesses,
    ResumeProcesses,
    ShowProcess,
    ShowProcessTask,
    StepArgs,
    Wait,
    processes,
)
from dataloader.jobs.process_listings import ProcessAnswer, ProcessRecord
from dataloader.jobs.process_requests import (
    MAX_IMPORTED_EVENTS,
    MAX_STARTS,
    ProcessImport,
    ProcessRequest,
    StartedMany,
)
from dataloader.jobs.processes import MAX_TIMER_S, Remove, Timer
from dataloader.jobs.roles import Role
from dataloader.jobs.secrets.record_masks import masked
from dataloader.web.api.trigger import IDEMPOTENCY_KEY, key_of
from dataloader.web.operation_routes import OperationRoutes, usual_view
from dataloader.web.routes import Answer, Call
from dataloader.web.searchable import searchable

K = TypeVar("K", ListProcesses, RepairProcesses, ResumeProcesses)

routes: Final = OperationRoutes()

ADDRESS: Final = "/api/v1/processes/<process_type>/<path:process_id>"
Metadata = Annotated[dict[str, Any], field_meta("Flat JSON object for searches.", {"tenant": "a"})]
_Key = Annotated[
    str,
    field_meta(
        "A repeated request with the same key returns the first answer.", "pay-77", minLength=1, maxLength=MAX_KEY
    ),
]
_LOCATION: Final[Mapping[str, Any]] = {
    "Location": {"description": "Address of the task.", "required": True, "schema": {"type": "string"}}
}


class WaitQuery(Struct, forbid_unknown_fields=True, kw_only=True):
    """Time to wait for an answer."""

    wait: Wait = 0.0


class StartRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Process to be started."""

    EXAMPLE: ClassVar[Any] = {"process_id": "order-77", "args": 5, "metadata": {"tenant": "a"}}

    process_id: ProcessId
    args: StepArgs = None
    context: Annotated[Any, about("Arguments of the step.")] = None
    idempotency_key: _Key | None = None
    metadata: Metadata | None = None

    def request(self, process_type: str, key: str | None) -> ProcessRequest:
        """Return the domain's request. Raises `BadRequest`."""
        return ProcessRequest(
            type=process_type,
            process_id=self.process_id,
            kind="init",
            args=self.args,
            context=self.context,
            key=key,
            metadata=self.metadata,
        )


class StartManyRequest(Struct, forbid_unknown_fields=True):
    """Up to 1,000 processes of one type."""

    EXAMPLE: ClassVar[Any] = {"processes": [StartRequest.EXAMPLE]}

    processes: Annotated[list[StartRequest], Meta(min_length=1, max_length=MAX_STARTS, description="The processes.")]


class CallRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Call of a method of a process."""

    EXAMPLE: ClassVar[Any] = {"method": "pay", "args": 5, "idempotency_key": "pay-77"}

    method: Annotated[str, field_meta("Name of the method.", "pay", minLength=1, maxLength=MAX_NAME)]
    args: StepArgs = None
    context: Annotated[Any, about("Arguments of the step.")] = None
    idempotency_key: _Key | None = None
    expires_at: Annotated[Instant, about("Latest start. After it, the call never runs.")] | None = None
    start: Annotated[
        Any | UnsetType, about("Start the process if it does not exist, with these args of its first step.")
    ] = UNSET
    metadata: Annotated[dict[str, Any], about("Metadata of the process that is started.")] | None = None


class RepairRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Repair of a process in error."""

    EXAMPLE: ClassVar[Any] = {"args": 5}

    args: StepArgs = None
    idempotency_key: _Key | None = None


class TimerFields(Struct, forbid_unknown_fields=True, kw_only=True):
    """Timer: in `after_s` seconds, or at the time `at`."""

    kind: Annotated[Literal["timeout", "remove"], about("Kind of the timer.")] = "timeout"
    after_s: Annotated[float, Meta(ge=0, le=MAX_TIMER_S, description="Seconds from now.")] | None = None
    at: Annotated[Instant, about("Timestamp, instead of seconds.")] | None = None
    context: Annotated[Any, about("Context that a timeout receives.")] = None

    def timer(self) -> Timer | Remove:
        """Return the domain's timer. Raises `BadRequest`."""
        if self.kind == "remove":
            return Remove(after_s=self.after_s, at=self.at)
        return Timer(after_s=self.after_s, at=self.at, context=self.context)


class ImportRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Process to import from another system."""

    EXAMPLE: ClassVar[Any] = {"state": {"amount": 5, "paid": False}, "events": ["reserved"], "timer": {"after_s": 900}}

    state: Annotated[Any, about("State, as defined by its type.")] = None
    metadata: Metadata = {}
    events: Annotated[list[Any], Meta(max_length=MAX_IMPORTED_EVENTS, description="Events, oldest first.")] = []
    timer: Annotated[TimerFields | None, about("Timer. Without a timer, the process waits for calls.")] = None


_ASKS: Final[Mapping[str, Any]] = {
    "role": Role.OPERATE,
    "query": WaitQuery,
    "headers": [IDEMPOTENCY_KEY],
    "answers": {200: ProcessAnswer, 202: ProcessAnswer},
    "answer_headers": _LOCATION,
    "conflicts": True,
    "deadline_s": HELD_REQUEST_S,
}


async def _ask(call: Call, request: ProcessRequest, wait_s: float) -> Answer:
    answer = await call.processes.ask(request, wait_s=wait_s)
    return Answer(
        value=masked(answer),
        status=HTTPStatus.OK if answer.is_answered else HTTPStatus.ACCEPTED,
        headers={"Location": _address_of(answer)},
    )


def _address_of(answer: ProcessAnswer) -> str:
    address = f"/api/v1/processes/tasks/{answer.task_id}"
    return address if answer.ident is None else f"{address}?ident={answer.ident}"


@routes.add("POST", "/api/v1/processes/<process_type>", body=StartRequest, **_ASKS)
async def start_process(call: Call, process_type: str, body: StartRequest, query: WaitQuery) -> Answer:
    """Start a process.

    200 with its first step's answer, if it comes within `wait` seconds, else 202. 409 if a process with this ID exists,
    or the idempotency key belongs to another request.
    """
    return await _ask(call, body.request(process_type, key_of(call.headers, body.idempotency_key)), query.wait)


@routes.add(
    "POST",
    "/api/v1/processes/<process_type>/batch",
    role=Role.OPERATE,
    body=StartManyRequest,
    answers={200: StartedMany},
    conflicts=True,
    large=True,
)
async def start_processes(call: Call, process_type: str, body: StartManyRequest) -> Answer:
    """Start up to 1,000 processes in one transaction, without waiting. Existing ones are skipped."""
    requests = [one.request(process_type, one.idempotency_key) for one in body.processes]
    return Answer(value=StartedMany(await call.processes.start_many(requests)))


@routes.add("POST", f"{ADDRESS}/call", body=CallRequest, **_ASKS)
async def call_process(call: Call, process_type: str, process_id: str, body: CallRequest, query: WaitQuery) -> Answer:
    """Call a method of a process.

    200 with the answer, if it comes within `wait` seconds, else 202: the call continues, and its task can be waited
    for. `finished` with an `error` means that the step has refused it. 409 if the process is in error or its first step
    has not finished.
    """
    may_start = body.start is not UNSET
    request = ProcessRequest(
        type=process_type,
        process_id=process_id,
        kind="call",
        method=body.method,
        args=body.args,
        context=body.context,
        key=key_of(call.headers, body.idempotency_key),
        expires_at=body.expires_at,
        may_start=may_start,
        start=body.start if may_start else None,
        metadata=body.metadata,
    )
    return await _ask(call, request, query.wait)


@routes.add("POST", f"{ADDRESS}/repair", body=RepairRequest, **_ASKS)
async def repair_process(
    call: Call, process_type: str, process_id: str, body: RepairRequest, query: WaitQuery
) -> Answer:
    """Repair a process in error with its type's repair step. Answers like a call. 409 if it is not in error."""
    key = key_of(call.headers, body.idempotency_key)
    request = ProcessRequest(type=process_type, process_id=process_id, kind="repair", args=body.args, key=key)
    return await _ask(call, request, query.wait)


@routes.add(
    "PUT", ADDRESS, role=Role.ADMIN, body=ImportRequest, answers={200: ProcessRecord}, conflicts=True, large=True
)
async def put_process(call: Call, process_type: str, process_id: str, body: ImportRequest) -> Answer:
    """Import a process of another system. No step runs. 409 if a process with this ID exists."""
    process = ProcessImport(
        type=process_type,
        process_id=process_id,
        state=body.state,
        metadata=body.metadata,
        events=body.events,
        next=None if body.timer is None else body.timer.timer(),
    )
    return Answer(value=masked(await call.processes.put(process)))


def _searches(kind: type[K]) -> Callable[[Call, K], Awaitable[Answer]]:
    """Return the usual view of an operation, which refuses to search for metadata that are secret."""
    view = usual_view(kind)

    async def searches(call: Call, operation: K) -> Answer:
        metadata = operation.wanted().metadata
        if metadata is not None:
            searchable(metadata)
        return await view(call, operation)

    return searches


routes.operation(ListProcesses)(_searches(ListProcesses))
routes.operation(RepairProcesses)(_searches(RepairProcesses))
routes.operation(ResumeProcesses)(_searches(ResumeProcesses))


@routes.operation(ShowProcess)
async def wait_for_process(call: Call, operation: ShowProcess) -> Answer:
    """Answer with the process when its first step has finished, or after `wait` seconds."""
    _check_room(call, operation.wait)
    [record] = await call.masked([await call.perform(operation)])
    return Answer(value=record)


@routes.operation(ShowProcessTask)
async def wait_for_process_task(call: Call, operation: ShowProcessTask) -> Answer:
    """Answer with the task when it has its answer, or after `wait` seconds."""
    _check_room(call, operation.wait)
    [task] = await call.masked([await call.perform(operation)])
    return Answer(value=task)


def _check_room(call: Call, wait_s: float) -> None:
    if wait_s > 0:
        call.services.waiting.check_room(call.operator.name)


routes.operations(processes)

"""Durable processes over HTTP: starts, calls, repairs, stops, removals and imports."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Annotated, Any, ClassVar, Final, Literal
from uuid import UUID

from msgspec import UNSET, Meta, Struct, UnsetType

from dataloader.jobs.model import MAX_KEY, MAX_NAME, Instant, about
from dataloader.jobs.operations.fields import AfterPage, described
from dataloader.jobs.process_contract import BATCH, ProcessChange
from dataloader.jobs.process_listings import (
    ProcessAnswer,
    ProcessesChanged,
    ProcessFilter,
    ProcessRecord,
    ProcessStatus,
)
from dataloader.jobs.process_requests import (
    MAX_IMPORTED_EVENTS,
    MAX_STARTS,
    ProcessImport,
    ProcessRequest,
    ProcessStarted,
)
from dataloader.jobs.processes import MAX_PROCESS_ID, MAX_TIMER_S, MAX_TYPE, Remove, Timer
from dataloader.jobs.roles import Role
from dataloader.web import shown
from dataloader.web.api.jobs import MAX_WAIT_S
from dataloader.web.api.trigger import IDEMPOTENCY_KEY, key_of
from dataloader.web.routes import DEADLINE_S, Answer, Call, Routes

routes: Final = Routes()

ADDRESS: Final = "/api/v1/processes/<process_type>/<path:process_id>"
ProcessId = Annotated[
    str, described("The process's id, unique in its type.", "order-77", minLength=1, maxLength=MAX_PROCESS_ID)
]
ProcessType = Annotated[str, described("The name of its type.", "payment", minLength=1, maxLength=MAX_TYPE)]
Metadata = Annotated[dict[str, Any], described("A flat JSON object, by which processes are found.", {"tenant": "a"})]
_Key = Annotated[
    str,
    described(
        "A repeated request with the same key has the first one's answer.", "pay-77", minLength=1, maxLength=MAX_KEY
    ),
]
_Args = Annotated[Any, described("What the step is given: any JSON value.", 5)]
_LOCATION: Final[Mapping[str, Any]] = {
    "Location": {"description": "The task's address.", "required": True, "schema": {"type": "string"}}
}


class WaitQuery(Struct, forbid_unknown_fields=True, kw_only=True):
    """Time to wait for an answer."""

    wait: Annotated[
        float, Meta(ge=0, le=MAX_WAIT_S, description="Seconds; the answer comes as soon as there is one.")
    ] = 0.0


class TaskQuery(WaitQuery, kw_only=True):
    """Query with a task's ident, and the time to wait for its answer."""

    ident: Annotated[UUID | None, Meta(description="The task's `ident`; a 404 if the number is another task's.")] = None


class IdentQuery(Struct, forbid_unknown_fields=True, kw_only=True):
    """Query with a task's ident."""

    ident: Annotated[UUID | None, Meta(description="The task's `ident`; a 404 if the number is another task's.")] = None


class StartRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Process to be started."""

    EXAMPLE: ClassVar[Any] = {"process_id": "order-77", "args": 5, "metadata": {"tenant": "a"}}

    process_id: ProcessId
    args: _Args = None
    context: Annotated[Any, about("What the step is given beside.")] = None
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


class StartedMany(Struct, frozen=True):
    """Result for each process, in their order."""

    processes: Annotated[list[ProcessStarted], about("The processes, in the order of the request.")]


class CallRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Call of a method of a process."""

    EXAMPLE: ClassVar[Any] = {"method": "pay", "args": 5, "idempotency_key": "pay-77"}

    method: Annotated[str, described("The method's name.", "pay", minLength=1, maxLength=MAX_NAME)]
    args: _Args = None
    context: Annotated[Any, about("What the step is given beside.")] = None
    idempotency_key: _Key | None = None
    expires_at: Annotated[Instant, about("If it has not begun by then, it never runs.")] | None = None
    start: Annotated[Any | UnsetType, about("Starts the process if it is missing: the args of its first step.")] = UNSET
    metadata: Annotated[dict[str, Any], about("Of the process that it starts.")] | None = None


class RepairRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Repair of a process in error."""

    EXAMPLE: ClassVar[Any] = {"args": 5}

    args: _Args = None
    idempotency_key: _Key | None = None


class TimerFields(Struct, forbid_unknown_fields=True, kw_only=True):
    """Timer: in `after_s` seconds, or at the time `at`."""

    kind: Annotated[Literal["timeout", "remove"], about("What it does.")] = "timeout"
    after_s: Annotated[float, Meta(ge=0, le=MAX_TIMER_S, description="In so many seconds.")] | None = None
    at: Annotated[Instant, about("Or when.")] | None = None
    context: Annotated[Any, about("What a timeout is given.")] = None

    def timer(self) -> Timer | Remove:
        """Return the domain's timer. Raises `BadRequest`."""
        if self.kind == "remove":
            return Remove(after_s=self.after_s, at=self.at)
        return Timer(after_s=self.after_s, at=self.at, context=self.context)


class ImportRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Process to import from another system."""

    EXAMPLE: ClassVar[Any] = {"state": {"amount": 5, "paid": False}, "events": ["reserved"], "timer": {"after_s": 900}}

    state: Annotated[Any, about("Its state, as its type has it.")] = None
    metadata: Metadata = {}
    events: Annotated[
        list[Any], Meta(max_length=MAX_IMPORTED_EVENTS, description="What has happened in it, oldest first.")
    ] = []
    timer: Annotated[TimerFields | None, about("Its timer; without one it waits for calls.")] = None


class ChangeManyRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Filter of processes in error, with at least one criterion, and the number of processes per request."""

    EXAMPLE: ClassVar[Any] = {"error_group": "00c8f1de4a91b37e", "limit": 1000}

    type: ProcessType | None = None
    process_id: ProcessId | None = None
    status: Annotated[ProcessStatus, about("`error`, or left out.")] | None = None
    metadata: Annotated[dict[str, Any], about("What their metadata have at least.")] | None = None
    error_group: Annotated[str, about("The id of a group of errors.")] | None = None
    limit: Annotated[int, Meta(ge=1, le=BATCH, description="The most processes that one request looks at.")] = BATCH
    after: AfterPage | None = None

    def wanted(self) -> ProcessFilter:
        """Return the domain's filter. Raises `BadRequest`."""
        return ProcessFilter(
            type=self.type,
            process_id=self.process_id,
            status=self.status,
            metadata=None if self.metadata is None else shown.searchable(self.metadata),
            error_group=self.error_group,
        )


class RepairManyRequest(ChangeManyRequest, kw_only=True):
    """Filter of processes in error, and the args of their repairs."""

    args: _Args = None


_ASKS: Final[Mapping[str, Any]] = {
    "role": Role.OPERATE,
    "query": WaitQuery,
    "headers": [IDEMPOTENCY_KEY],
    "answers": {200: ProcessAnswer, 202: ProcessAnswer},
    "answer_headers": _LOCATION,
    "conflicts": True,
    "deadline_s": DEADLINE_S + MAX_WAIT_S,
}


async def _ask(call: Call, request: ProcessRequest, wait_s: float) -> Answer:
    answer = await call.processes.ask(request, wait_s=wait_s)
    return Answer(
        value=shown.process_answer(answer),
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
    """Repair a process in error with its type's repair step. Answers as a call does. 409 if it is not in error."""
    key = key_of(call.headers, body.idempotency_key)
    request = ProcessRequest(type=process_type, process_id=process_id, kind="repair", args=body.args, key=key)
    return await _ask(call, request, query.wait)


@routes.add("POST", f"{ADDRESS}/resume", role=Role.OPERATE, answers={200: ProcessRecord}, conflicts=True)
async def resume_process(call: Call, process_type: str, process_id: str) -> Answer:
    """Let a process in error continue without changes: the failed timeout is tried again."""
    return Answer(value=shown.process(await call.processes.resume(process_type, process_id)))


@routes.add("POST", f"{ADDRESS}/stop", role=Role.OPERATE, answers={200: ProcessRecord}, conflicts=True)
async def stop_process(call: Call, process_type: str, process_id: str) -> Answer:
    """Stop the running step, which then is an error of its process. 409 if no step runs."""
    return Answer(value=shown.process(await call.processes.stop(process_type, process_id)))


@routes.add("POST", f"{ADDRESS}/remove", role=Role.OPERATE, answers={200: ProcessRecord})
async def remove_process(call: Call, process_type: str, process_id: str) -> Answer:
    """Remove a process, and show it as it was. A running step is stopped, waiting calls are cancelled."""
    return Answer(value=shown.process(await call.processes.remove(process_type, process_id)))


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
    return Answer(value=shown.process(await call.processes.put(process)))


@routes.add(
    "POST", "/api/v1/processes/repair", role=Role.ADMIN, body=RepairManyRequest, answers={200: ProcessesChanged}
)
async def repair_processes(call: Call, body: RepairManyRequest) -> Answer:
    """Repair the processes in error that match a filter, up to its limit; repeat with `next` as `after` until null."""
    change = ProcessChange(action="repair", args=body.args)
    return Answer(value=await call.processes.change_some(change, body.wanted(), limit=body.limit, after=body.after))


@routes.add(
    "POST", "/api/v1/processes/resume", role=Role.ADMIN, body=ChangeManyRequest, answers={200: ProcessesChanged}
)
async def resume_processes(call: Call, body: ChangeManyRequest) -> Answer:
    """Resume the processes in error that match a filter, up to its limit; repeat with `next` as `after` until null."""
    change = ProcessChange(action="resume")
    return Answer(value=await call.processes.change_some(change, body.wanted(), limit=body.limit, after=body.after))


@routes.add(
    "POST",
    "/api/v1/processes/tasks/<int:task_id>/withdraw",
    role=Role.OPERATE,
    query=IdentQuery,
    answers={200: ProcessAnswer},
)
async def withdraw_call(call: Call, task_id: int, query: IdentQuery) -> Answer:
    """Withdraw a call if it has not begun: it is `cancelled` then. Otherwise it continues unchanged."""
    return Answer(value=shown.process_answer(await call.processes.withdraw(task_id, ident=query.ident)))

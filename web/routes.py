"""Declarations of routes, and the common steps in which every request is served.

The files of api/ declare plain async functions with typed requests and answers. They use neither Quart nor status codes
for errors: they raise. The same declarations make /openapi.json. `serve_route` takes each request through these steps:
authorize → decode → run within a deadline → encode. It opens no nursery, since Quart would see only one member of an
exception group.

Rejected: quart-schema. It reports only the first bad field, wraps each view once for each of its decorators, and does
not support our problems and roles. This file and openapi.py do what we would need of it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from http import HTTPStatus
from typing import Any, Final, TypeVar, TypeVarTuple

import attrs
import msgspec
import trio
from msgspec import Struct
from quart import Response
from werkzeug.datastructures import Headers

from dataloader.jobs.client.bulk import Bulk
from dataloader.jobs.client.jobs import Jobs
from dataloader.jobs.client.limits import Limits
from dataloader.jobs.client.loads import Loads
from dataloader.jobs.client.processes import ProcessClient
from dataloader.jobs.client.schedules import Schedules
from dataloader.jobs.contract import Operator
from dataloader.jobs.logger import get_logger
from dataloader.jobs.operations.operation import Operation
from dataloader.jobs.roles import Role
from dataloader.jobs.secrets.masking import mask_text
from dataloader.jobs.secrets.record_masks import masked
from dataloader.store.connection.read_share import read_for
from dataloader.store.performer import DatabasePerformer
from dataloader.web.auth import authorize
from dataloader.web.client_address import FORWARDED
from dataloader.web.decoding import decode_body, decode_query
from dataloader.web.problems import MEDIA_TYPE, ProblemError, problem_of, too_busy
from dataloader.web.server.asgi import HttpRequest
from dataloader.web.server.bodies import NOT_COUNTED
from dataloader.web.server.refusals import Refusal
from dataloader.web.services import Services

log = get_logger(__name__)

R = TypeVar("R")
Ts = TypeVarTuple("Ts")

DEADLINE_S: Final = 15.0
"""Seconds that a request may take, without a requested wait (`?wait=`); then it is answered with 503."""
JSON: Final = "application/json"
IDENTITY: Final = "identity"
"""Name of the encoding that changes nothing."""
_encode: Final = msgspec.json.Encoder().encode
_LONGEST: Final = 1 << 20


@attrs.frozen(kw_only=True)
class Answer:
    """Result of a view: a value to be encoded as JSON, or bytes that are sent as `media_type`."""

    value: Any
    status: int = 200
    headers: dict[str, str] = attrs.field(factory=dict)
    media_type: str = JSON


@attrs.frozen
class Call:
    """Argument of a view: the services, the caller (`operator`), and the query and headers as sent."""

    services: Services
    operator: Operator
    arguments: Mapping[str, list[str]]
    headers: Headers

    @property
    def jobs(self) -> Jobs:
        """Jobs and queues; the audit log names the caller as the operator."""
        return Jobs(self.performer)

    @property
    def performer(self) -> DatabasePerformer:
        """Performer of the caller: the audit log names the caller as the operator, and its waits are the caller's."""
        services = self.services
        answers = services.waiting.of(self.operator.name)
        return attrs.evolve(services.performer, operator=self.operator, answers=answers)

    async def perform(self, operation: Operation[R]) -> R:
        """Perform an operation; the audit log names the caller as the operator."""
        return await self.performer.perform(operation)

    @property
    def schedules(self) -> Schedules:
        """Schedules; the audit log names the caller as the operator."""
        return Schedules(self.performer)

    @property
    def limits(self) -> Limits:
        """Limits of tasks and suppliers; the audit log names the caller as the operator."""
        return Limits(self.performer)

    @property
    def loads(self) -> Loads:
        """Loads, their runs and their failures."""
        return Loads(self.performer)

    @property
    def processes(self) -> ProcessClient:
        """Durable processes; the audit log names the caller as the operator."""
        return ProcessClient(self.performer)

    @property
    def bulk(self) -> Bulk:
        """Bulk operations; the audit log names the caller as the operator."""
        return Bulk(self.performer)

    async def masked(self, records: Sequence[R]) -> list[R]:
        """Return the records without secrets, masked in a thread."""
        return await self.in_thread(lambda: list(map(masked, records)))

    async def in_thread(self, work: Callable[[*Ts], R], *args: *Ts) -> R:
        """Run `work(*args)` in one of the threads for masking and return its result. Masking a megabyte takes 100 ms.

        The callers share these threads, so that one caller's work does not delay the others.
        """
        return await self.services.turns.masking.run(self.operator.name, work, *args)

    def long_answer(self) -> AbstractAsyncContextManager[None]:
        """Return a block for an answer that may have megabytes. It waits for one of the places that callers share."""
        return self.services.turns.long_answers.place_of(self.operator.name)


@attrs.frozen(kw_only=True)
class Route:
    """Method of an address, and its view.

    role: the role that a caller needs; None: open to all, without a token.
    answers: the type of the answer by status, for OpenAPI; errors are not listed.
    headers, answer_headers: those that the view reads and sends, as in OpenAPI.
    conflicts: the view may answer 409.
    names: its body has names that may not exist: the view may answer 404.
    large: its body may be as long as `DL_MAX_BATCH_BODY_BYTES`.
    rows: its answer may have megabytes.
    pages: the same, and it is a page of a list.
    deadline_s: the seconds in which it must answer.
    """

    method: str
    path: str
    view: Callable[..., Awaitable[Answer]]
    role: Role | None
    body: type[Struct | dict[str, Any]] | None = None
    query: type[Struct] | None = None
    answers: Mapping[int, Any]
    headers: Sequence[Mapping[str, Any]] = ()
    answer_headers: Mapping[str, Any] = attrs.field(factory=dict)
    conflicts: bool = False
    names: bool = False
    large: bool = False
    rows: bool = False
    pages: bool = False
    deadline_s: float = DEADLINE_S


class Routes(list[Route]):
    """Routes of one file of api/, in the order of their declaration."""

    def add(
        self, method: str, path: str, *, role: Role | None, answers: Mapping[int, Any], **more: Any
    ) -> Callable[[Callable[..., Awaitable[Answer]]], Callable[..., Awaitable[Answer]]]:
        """Declare the decorated function as the view of an address; `more` are the other fields of `Route`.

        The view is called with a `Call` and, by name, with `body`, `query` and the parts of the path.
        """

        def declare(view: Callable[..., Awaitable[Answer]]) -> Callable[..., Awaitable[Answer]]:
            self.append(Route(method=method, path=path, view=view, role=role, answers=answers, **more))
            return view

        return declare


async def serve_route(
    route: Route, services: Services, request: HttpRequest, request_id: str, parts: dict[str, Any]
) -> Response:
    """Answer a request in all cases. Only `Cancelled` is raised."""
    try:
        response = _response(await _run_route(route, services, request, request_id, dict(parts)))
        _count_bytes(response, services, request)
    except Exception as error:  # noqa: BLE001 - the edge: an unexpected error is logged and becomes a 500
        return problem_response(error, request_id, request.path, starting=services.state().starting)
    return response


async def _run_route(
    route: Route, services: Services, request: HttpRequest, request_id: str, parts: dict[str, Any]
) -> Answer:
    name = ""
    if route.role is not None:
        find = partial(services.token_check.find, address=request.address, forwarded=FORWARDED in request.headers)
        name = authorize(find if services.settings.tokens else None, request.method, request.headers, route.role)
    read_for(name)
    arguments = dict(request.args.lists())
    if route.query is not None:
        parts["query"] = decode_query(arguments, route.query)
    data = await _body(route, services, request)
    call = Call(services, Operator(name, request_id), arguments, request.headers)
    if route.role is None:
        return await _view_in_time(route, call, parts)
    # Requests of probes are open to all, so there is always a connection that can be closed in favor of one.
    if not services.at_work.take(1):
        services.refusals.count(Refusal.BUSY)
        raise too_busy("The server is handling too many requests; send the request again.")
    try:
        if len(data) <= NOT_COUNTED:
            return await _decode_and_view(route, call, parts, data)
        with trio.fail_after(route.deadline_s):
            turns = services.turns
            async with turns.long_bodies if len(data) <= _LONGEST else turns.longest_bodies:
                return await _decode_and_view(route, call, parts, data)
    finally:
        services.at_work.give(1)


async def _decode_and_view(route: Route, call: Call, parts: dict[str, Any], data: bytearray) -> Answer:
    if route.body is not None:
        parts["body"] = await decode_body(data, route.body, call.services.refusals, call.services.turns.decoding)
        data.clear()  # it may have megabytes, and the decoded body is another copy
    if not (route.rows or route.pages):
        return await _view_in_time(route, call, parts)
    with trio.fail_after(route.deadline_s):
        async with call.long_answer():
            return await _view_in_time(route, call, parts)


async def _view_in_time(route: Route, call: Call, parts: dict[str, Any]) -> Answer:
    with trio.fail_after(route.deadline_s):
        return await route.view(call, **parts)


async def _body(route: Route, services: Services, request: HttpRequest) -> bytearray:
    if route.body is None:
        if request.content_length or "Transfer-Encoding" in request.headers:
            return await request.received.read(0)
        return bytearray()
    if request.mimetype != JSON:
        raise ProblemError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"Send a body with `Content-Type: {JSON}`.")
    if request.headers.get("Content-Encoding", IDENTITY).lower() != IDENTITY:
        raise ProblemError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            "Send the body without a `Content-Encoding`.",
            headers={"Accept-Encoding": IDENTITY},
        )
    limit = services.settings.max_batch_body_bytes if route.large else services.settings.max_body_bytes
    return await request.received.read(limit)


def _count_bytes(response: Response, services: Services, request: HttpRequest) -> None:
    """Count the bytes of a long answer until it is sent. Raises `ProblemError` if too many are being sent."""
    length = response.content_length or 0
    if length <= NOT_COUNTED:
        return
    if not services.sending.take(request, length):
        services.refusals.count(Refusal.ANSWERS)
        raise too_busy("Too many long answers are being sent; send the request again.")


def problem_response(error: Exception, request_id: str, path: str, *, starting: bool = False) -> Response:
    """Return the answer to an error.

    An unexpected one is logged with its traceback; its answer has the request's ID.
    """
    problem = problem_of(error, starting=starting)
    if problem is None:
        log.error("a request failed", path=mask_text(path), exc_info=error)
        problem = ProblemError(
            HTTPStatus.INTERNAL_SERVER_ERROR, f"This is a bug. The log has the details under {request_id}."
        )
    answer = Answer(
        value=problem.problem(request_id, path),
        status=problem.status,
        headers=dict(problem.headers),
        media_type=MEDIA_TYPE,
    )
    return _response(answer)


def _response(answer: Answer) -> Response:
    data = answer.value if isinstance(answer.value, bytes) else _encode(answer.value)
    return Response(data, answer.status, answer.headers, content_type=answer.media_type)

"""Declares routes, and serves every request to one of them in the same steps.

The files of api/ declare plain async functions with typed requests and answers. They use neither Quart nor status codes
for errors: they raise. The same declarations make /openapi.json. `serve` takes each request through these steps:
authorize → decode → run within a deadline → encode. It opens no nursery: of an exception group Quart would see only one
member.

Rejected: quart-schema. It reports only the first bad field, wraps each view once for each of its decorators, and knows
nothing of our problems and roles. This file and openapi.py do what we would need of it.
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

from dataloader.jobs.bulk_contract import BulkActs
from dataloader.jobs.client.jobs import Jobs
from dataloader.jobs.contract import Operator
from dataloader.jobs.limit_contract import Limits
from dataloader.jobs.logger import get_logger
from dataloader.jobs.operations.operation import Operation
from dataloader.jobs.process_contract import ProcessClient
from dataloader.jobs.roles import Role
from dataloader.jobs.schedule_contract import Schedules
from dataloader.jobs.secrets.masking import mask_text
from dataloader.web.auth import authorize
from dataloader.web.client_address import FORWARDED
from dataloader.web.decoding import decode_body, decode_query
from dataloader.web.problems import MEDIA_TYPE, ProblemError, problem_of, too_busy
from dataloader.web.server.asgi import Request
from dataloader.web.server.bodies import NOT_COUNTED
from dataloader.web.server.refusals import Refusal
from dataloader.web.services import Services

log = get_logger(__name__)

R = TypeVar("R")
S = TypeVar("S")
Ts = TypeVarTuple("Ts")

DEADLINE_S: Final = 15.0
"""The seconds that a request may take, not counting a wait that it asks for (`?wait=`); then it is answered 503."""
JSON: Final = "application/json"
IDENTITY: Final = "identity"
"""The name of no encoding."""
_encode: Final = msgspec.json.Encoder().encode
_LONGEST: Final = 1 << 20


@attrs.frozen(kw_only=True)
class Answer:
    """What a view gives back: a value to be encoded as JSON, or bytes that go out as `media_type`."""

    value: Any
    status: int = 200
    headers: dict[str, str] = attrs.field(factory=dict)
    media_type: str = JSON


@attrs.frozen
class Call:
    """What a view is called with: the services, the caller (`operator`), and the query and headers as sent."""

    services: Services
    operator: Operator
    arguments: Mapping[str, list[str]]
    headers: Headers

    @property
    def jobs(self) -> Jobs:
        """The queue; the audit names the caller for what is done with it."""
        return Jobs(self.services.performer.signed(self.operator))

    async def perform(self, operation: Operation[R]) -> R:
        """Perform an operation; the audit names the caller for it."""
        return await self.services.performer.signed(self.operator).perform(operation)

    @property
    def schedules(self) -> Schedules:
        """The schedules; the audit names the caller for what is done with them."""
        return self.services.schedules.signed(self.operator)

    @property
    def limits(self) -> Limits:
        """The limits of tasks and suppliers; the audit names the caller for what is done with them."""
        return self.services.limits.signed(self.operator)

    @property
    def processes(self) -> ProcessClient:
        """The durable processes; the audit names the caller for what is done with them."""
        services = self.services
        return attrs.evolve(services.processes, operator=self.operator, answers=services.waiting.of(self.operator.name))

    @property
    def bulk(self) -> BulkActs:
        """The acts on many jobs; the audit names the caller for what is done with them."""
        return self.services.bulk.signed(self.operator)

    async def masked(self, mask: Callable[[R], S], records: Sequence[R]) -> list[S]:
        """Return the records without secrets, masked in a thread."""
        return await self.in_thread(lambda: list(map(mask, records)))

    async def in_thread(self, work: Callable[[*Ts], R], *args: *Ts) -> R:
        """Return what `work(*args)` returns in one of the threads for masking: a megabyte takes a tenth of a second.

        The callers share these threads, so that those of one caller do not delay the others.
        """
        return await self.services.turns.masking.run(self.operator.name, work, *args)

    def long_answer(self) -> AbstractAsyncContextManager[None]:
        """Return a block whose answer may have megabytes. It waits for one of the places that the callers share."""
        return self.services.turns.long_answers.place_of(self.operator.name)


@attrs.frozen(kw_only=True)
class Route:
    """One method of one address, and its view.

    role: the role that a caller needs; None: open to all, without a token.
    answers: the type of the answer by status, for OpenAPI; errors are not listed.
    headers, answer_headers: those that the view reads and sends, as in OpenAPI.
    conflicts: the view may answer 409.
    names: its body names what may not be there: the view may answer 404.
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
    """The routes of one file of api/, in the order of their declaration."""

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


async def serve(route: Route, services: Services, request: Request, request_id: str, parts: dict[str, Any]) -> Response:
    """Answer a request, whatever happens. Only `Cancelled` leaves here."""
    try:
        response = _response(await _run(route, services, request, request_id, dict(parts)))
        _count(response, services, request)
    except Exception as error:  # noqa: BLE001 - the edge: what nobody expected is logged and becomes a 500
        return problem_response(error, request_id, request.path, starting=services.state().starting)
    return response


async def _run(route: Route, services: Services, request: Request, request_id: str, parts: dict[str, Any]) -> Answer:
    name = ""
    if route.role is not None:
        find = partial(services.token_check.find, address=request.address, forwarded=FORWARDED in request.headers)
        name = authorize(find if services.settings.tokens else None, request.method, request.headers, route.role)
    arguments = dict(request.args.lists())
    if route.query is not None:
        parts["query"] = decode_query(arguments, route.query)
    data = await _body(route, services, request)
    call = Call(services, Operator(name, request_id), arguments, request.headers)
    if route.role is None:
        return await _view(route, call, parts)
    # Probes ask what is open to all, so there is always a connection that can give way to one.
    if not services.at_work.take(1):
        services.refusals.count(Refusal.BUSY)
        raise too_busy("The server handles too many requests now; send the request again.")
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
        data.clear()  # it may be megabytes, and the decoded body is another copy
    if not (route.rows or route.pages):
        return await _view(route, call, parts)
    with trio.fail_after(route.deadline_s):
        async with call.long_answer():
            return await _view(route, call, parts)


async def _view(route: Route, call: Call, parts: dict[str, Any]) -> Answer:
    with trio.fail_after(route.deadline_s):
        return await route.view(call, **parts)


async def _body(route: Route, services: Services, request: Request) -> bytearray:
    if route.body is None:
        if request.content_length or "Transfer-Encoding" in request.headers:
            return await request.received.read(0)
        return bytearray()
    if request.mimetype != JSON:
        raise ProblemError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"Send a body with `Content-Type: {JSON}`.")
    if request.headers.get("Content-Encoding", IDENTITY).lower() != IDENTITY:
        raise ProblemError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            "Send the body as it is, without a `Content-Encoding`.",
            headers={"Accept-Encoding": IDENTITY},
        )
    limit = services.settings.max_batch_body_bytes if route.large else services.settings.max_body_bytes
    return await request.received.read(limit)


def _count(response: Response, services: Services, request: Request) -> None:
    """Count the bytes of a long answer until it is sent. Raises `ProblemError` when too many are being sent."""
    length = response.content_length or 0
    if length <= NOT_COUNTED:
        return
    if not services.sending.take(request, length):
        services.refusals.count(Refusal.ANSWERS)
        raise too_busy("Too many long answers are being sent; send the request again.")


def problem_response(error: Exception, request_id: str, path: str, *, starting: bool = False) -> Response:
    """The answer to an error. An unexpected one is logged with its traceback; its answer gives the request's id."""
    problem = problem_of(error, starting=starting)
    if problem is None:
        log.error("a request failed", path=mask_text(path), exc_info=error)
        problem = ProblemError(
            HTTPStatus.INTERNAL_SERVER_ERROR, f"This should not happen. The log has it under {request_id}."
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

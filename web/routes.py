"""What a route is, and the one way in which each request is served: who, what, by when, and how the answer goes out.

Rooms of routes (jobs.py, etl.py, queues.py, system.py) declare plain async functions with typed requests and answers;
they know neither Quart nor status codes for errors, they raise. The same declarations make /openapi.json. `serve` is
the pipe every request goes through: authorize → decode → run under a deadline → encode. It opens no nursery: Quart
would see only one member of an exception group.

Rejected: quart-schema. It reports the first bad field only, wraps each view once for each of its decorators, and
knows nothing of our problems and roles; what we need of it is this file and openapi.py.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any, Final
from uuid import UUID

import attrs
import msgspec
import structlog
import trio
from msgspec import Struct
from quart import Request, Response

from dataloader.jobs.errors import JobNotFound
from dataloader.jobs.masking import mask_text
from dataloader.store.control import Actor
from dataloader.web.auth import Role, authorize
from dataloader.web.decoding import decode_body, decode_query
from dataloader.web.problems import MEDIA_TYPE, ProblemError, problem_of
from dataloader.web.services import Services

log = structlog.get_logger(__name__)

DEADLINE_S: Final = 15.0
"""How long a request may take, what it waits for on purpose not counted; then it is a 503."""
JSON: Final = "application/json"
_encode: Final = msgspec.json.Encoder().encode


@attrs.frozen(kw_only=True)
class Answer:
    """What a view gives back: a value to be encoded as JSON, or bytes that go out as `media_type`."""

    value: Any
    status: int = 200
    headers: dict[str, str] = attrs.field(factory=dict)
    media_type: str = JSON


@attrs.frozen
class Call:
    """Who calls, and what the view may use."""

    services: Services
    actor: Actor


@attrs.frozen(kw_only=True)
class Route:
    """An address and what is there. `role` None: open to all. `answers`: the type of each good status, for OpenAPI."""

    method: str
    path: str
    view: Callable[..., Awaitable[Answer]]
    role: Role | None
    body: type[Struct] | None = None
    query: type[Struct] | None = None
    answers: Mapping[int, Any]
    conflicts: bool = False
    large: bool = False
    deadline_s: float = DEADLINE_S


class Routes(list[Route]):
    """The routes of a room, in the order of their declaration."""

    def add(
        self, method: str, path: str, *, role: Role | None, answers: Mapping[int, Any], **more: Any
    ) -> Callable[[Callable[..., Awaitable[Answer]]], Callable[..., Awaitable[Answer]]]:
        """Declare the decorated function as the view of an address. `more`: the other fields of `Route`.

        The view is called with a `Call` and, by name, with `body`, `query` and the parts of the path.
        """

        def declare(view: Callable[..., Awaitable[Answer]]) -> Callable[..., Awaitable[Answer]]:
            self.append(Route(method=method, path=path, view=view, role=role, answers=answers, **more))
            return view

        return declare


async def serve(route: Route, services: Services, request: Request, request_id: str, parts: dict[str, str]) -> Response:
    """Answer a request, whatever happens. Only `Cancelled` leaves here."""
    try:
        answer = await _run(route, services, request, request_id, dict(parts))
    except Exception as error:  # noqa: BLE001 - the edge: what nobody expected is logged and becomes a 500
        return problem_response(error, request_id, request.path)
    return _response(answer)


async def _run(route: Route, services: Services, request: Request, request_id: str, parts: dict[str, Any]) -> Answer:
    name = ""
    if route.role is not None:
        name = authorize(services.settings.tokens, request.method, request.headers, route.role)
    for part in parts.keys() & {"job_id", "run_id"}:
        parts[part] = _job_id(parts[part])
    if route.query is not None:
        parts["query"] = decode_query(dict(request.args.lists()), route.query)
    if route.body is not None:
        parts["body"] = decode_body(await _body(route, services, request), route.body)
    with trio.fail_after(route.deadline_s):
        return await route.view(Call(services, Actor(name, request_id)), **parts)


def _job_id(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise JobNotFound(f"{text!r:.80} is no job's id") from None


async def _body(route: Route, services: Services, request: Request) -> bytes:
    if request.mimetype != JSON:
        raise ProblemError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"Send a body with `Content-Type: {JSON}`.")
    limit = services.settings.max_batch_body_bytes if route.large else services.settings.max_body_bytes
    if request.content_length is None or request.content_length <= limit:
        data = await request.get_data(cache=False, as_text=False, parse_form_data=False)
        if len(data) <= limit:
            return data
    # What was not read stands before the next request.
    close = {"Connection": "close"}
    raise ProblemError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"The body may have {limit:,} bytes here.", headers=close)


def problem_response(error: Exception, request_id: str, path: str) -> Response:
    """The answer to an error; one that nobody expected is logged with its traceback and answered with its number."""
    problem = problem_of(error)
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

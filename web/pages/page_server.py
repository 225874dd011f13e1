"""Serves every request for a page in the same steps.

The steps: identify the visitor by the cookie → check the origin → decode query or form → call the view within a
deadline → render. Errors also become pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import parse_qsl

import attrs
import trio
from quart import Response

from dataloader.jobs.contract import Operator
from dataloader.jobs.errors import StoreError
from dataloader.jobs.roles import Role
from dataloader.web.decoding import decode_query
from dataloader.web.pages.addresses import HOME
from dataloader.web.pages.page_routes import PageRoute
from dataloader.web.pages.rendering import HEADERS, error_page, response_of
from dataloader.web.pages.sessions import Visitor, check_origin
from dataloader.web.pages.visit import Visit, visit_of
from dataloader.web.problems import ProblemError, problem_of, too_busy
from dataloader.web.server.asgi import Request
from dataloader.web.server.refusals import Refusal
from dataloader.web.services import Services

FORM: Final = "application/x-www-form-urlencoded"
MOST_FORM: Final = 64 << 10
"""Maximum size of a form, in bytes."""
MOST_FIELDS: Final = 2_000
SIGN_IN: Final = f"{HOME}/sign-in"


class SignInNeededError(ProblemError):
    """The request has no valid sign-in."""

    def __init__(self) -> None:
        super().__init__(HTTPStatus.UNAUTHORIZED, "Sign in to see this page.")


async def serve_page(
    route: PageRoute, services: Services, request: Request, request_id: str, parts: Mapping[str, Any]
) -> Response:
    """Answer a request for a page in all cases. Only `Cancelled` is raised."""
    visit = visit_of(services, request, request_id)
    try:
        check_origin(request.method, request.headers, visit.public, tokens=bool(services.settings.tokens))
        visitor = await _visitor(visit, needed=route.role is not None)
        if visitor is not None:
            visit = attrs.evolve(visit, visitor=visitor, operator=Operator(visitor.name, request_id))
        if route.role is not None:
            if visitor is None:
                raise SignInNeededError  # noqa: TRY301 - as the errors of the view
            _check_role(visitor, route.role)
        return await _in_turn(route, visit, request, dict(parts))
    except SignInNeededError as error:
        if request.method == "GET" and visit.part is None:
            to = visit.public.url(SIGN_IN, {"to": visit.here})
            return Response(b"", HTTPStatus.SEE_OTHER, {"Location": to, **HEADERS})
        return await error_page(error, visit)
    except Exception as error:  # noqa: BLE001 - the edge: an unexpected error is logged and becomes a 500
        return await error_page(error, visit)


async def refuse_page(error: Exception, services: Services, request: Request, request_id: str) -> Response:
    """Return the page for a request that matches no page."""
    visit = visit_of(services, request, request_id)
    visitor = await _visitor(visit, needed=False)
    problem = problem_of(error)
    if problem is not None and problem.status is HTTPStatus.NOT_FOUND:
        error = ProblemError(HTTPStatus.NOT_FOUND, "No page has this address.")
    return await error_page(error, visit if visitor is None else attrs.evolve(visit, visitor=visitor))


async def _visitor(visit: Visit, *, needed: bool) -> Visitor | None:
    """Return the visitor, or None. If none is `needed`, also return None if the database does not answer."""
    try:
        return await visit.services.sessions.visitor(visit.session)
    except StoreError:
        if needed:
            raise
        return None


def _check_role(visitor: Visitor, needed: Role) -> None:
    if not visitor.may(needed):
        has, needs = visitor.role.name.lower(), needed.name.lower()
        raise ProblemError(HTTPStatus.FORBIDDEN, f"The token {visitor.name!r} has the role {has}; this needs {needs}.")


async def _in_turn(route: PageRoute, visit: Visit, request: Request, parts: dict[str, Any]) -> Response:
    services = visit.services
    if route.query is not None:
        asked = {name: values for name, values in visit.arguments.items() if name != "part" and values != [""]}
        parts["query"] = decode_query(asked, route.query)
    if route.method == "POST":
        fields = await _fields(request)
        if route.form is not None:
            parts["form"] = decode_query(fields, route.form)
    if not services.at_work.take(1):
        services.refusals.count(Refusal.BUSY)
        raise too_busy("The server handles too many requests now; try again.")
    try:
        with trio.fail_after(route.deadline_s):
            if visit.part is None:
                return await response_of(await route.view(visit, **parts), visit, request)
            async with services.pace.turn.place_of(visit.operator.name):
                return await response_of(await route.view(visit, **parts), visit, request)
    finally:
        services.at_work.give(1)


async def _fields(request: Request) -> dict[str, list[str]]:
    if not (request.content_length or "Transfer-Encoding" in request.headers):
        return {}
    if request.mimetype != FORM:
        raise ProblemError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"A form is sent as `{FORM}`.")
    data = await request.received.read(MOST_FORM)
    try:
        pairs = parse_qsl(data.decode(), keep_blank_values=True, max_num_fields=MOST_FIELDS, errors="strict")
    except ValueError as error:
        raise ProblemError(HTTPStatus.BAD_REQUEST, f"The form can't be read: {error}.") from error
    fields: dict[str, list[str]] = {}
    for name, value in pairs:
        if value:  # an empty field means not given
            fields.setdefault(name, []).append(value)
    return fields

"""Serves every request for a page in the same steps.

The steps: check the origin → wait for one of the visitor's places → identify the visitor by the cookie → decode the
query → call the view → render, all within a deadline. A form is received before the request waits for a place. Errors
also become pages.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import parse_qsl

import attrs
import trio
from quart import Response

from dataloader.jobs.errors import StoreError
from dataloader.jobs.roles import Role
from dataloader.store.connection.read_share import read_for
from dataloader.web.decoding import decode_query
from dataloader.web.pages.addresses import HOME
from dataloader.web.pages.page_routes import PageRoute
from dataloader.web.pages.rendering import HEADERS, error_page, response_of
from dataloader.web.pages.sessions import Visitor, check_origin
from dataloader.web.pages.visit import Visit, visit_of
from dataloader.web.problems import ProblemError, problem_of, too_busy
from dataloader.web.server.asgi import HttpRequest
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
    route: PageRoute, services: Services, request: HttpRequest, request_id: str, parts: Mapping[str, Any]
) -> Response:
    """Answer a request for a page in all cases. Only `Cancelled` is raised."""
    visit = visit_of(services, request, request_id)
    try:
        check_origin(request.method, request.headers, visit.public, tokens=bool(services.settings.tokens))
        if route.method == "GET":
            async with _at_work(route, visit):
                visit = await _allowed(route, visit)
                return await _answer_of_view(route, visit, request, dict(parts))
        visit = await _allowed(route, visit)
        form = await _form(route, request)
        async with _at_work(route, visit):
            return await _answer_of_view(route, visit, request, dict(parts) | form)
    except SignInNeededError as error:
        if request.method == "GET" and visit.part is None:
            to = visit.public.url(SIGN_IN, {"to": visit.here})
            return Response(b"", HTTPStatus.SEE_OTHER, {"Location": to, **HEADERS})
        return await error_page(error, visit)
    except Exception as error:  # noqa: BLE001 - the edge: an unexpected error is logged and becomes a 500
        return await error_page(error, visit)


async def refuse_page(error: Exception, services: Services, request: HttpRequest, request_id: str) -> Response:
    """Return the page for a request that matches no page."""
    visit = visit_of(services, request, request_id)
    visitor = await _visitor(visit, needed=False)
    problem = problem_of(error)
    if problem is not None and problem.status is HTTPStatus.NOT_FOUND:
        error = ProblemError(HTTPStatus.NOT_FOUND, "There is no page at this address.")
    return await error_page(error, visit if visitor is None else attrs.evolve(visit, visitor=visitor))


async def _allowed(route: PageRoute, visit: Visit) -> Visit:
    """Return the visit with its visitor. Raises `SignInNeededError`, and `ProblemError` if the role is not enough."""
    visitor = await _visitor(visit, needed=route.role is not None)
    if route.role is not None:
        if visitor is None:
            raise SignInNeededError
        _check_role(visitor, route.role)
    if visitor is None:
        return visit
    return attrs.evolve(visit, visitor=visitor, operator=attrs.evolve(visit.operator, name=visitor.name))


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
        raise ProblemError(
            HTTPStatus.FORBIDDEN, f"The token {visitor.name!r} has the role {has}; this page needs {needs}."
        )


@asynccontextmanager
async def _at_work(route: PageRoute, visit: Visit) -> AsyncIterator[None]:
    """Hold a place while a request is handled, within its deadline. Raises `ProblemError` if too many are."""
    services = visit.services
    if not services.at_work.take(1):
        services.refusals.count(Refusal.BUSY)
        raise too_busy("The server is handling too many requests; try again.")
    try:
        with trio.fail_after(route.deadline_s):
            name = await services.sessions.name_of(visit.session)
            read_for(name)
            async with _place_to_render(route, visit, name):
                yield
    finally:
        services.at_work.give(1)


def _place_to_render(route: PageRoute, visit: Visit, name: str) -> AbstractAsyncContextManager[None]:
    """Return the block in which a page is made: it waits for one of the places that the visitors share."""
    # An act may take seconds, a page that is open to all is a file or a form, and who is not signed in is refused.
    if route.method != "GET" or route.role is None or not name:
        return nullcontext()
    if visit.part is not None:
        return visit.services.pace.turn.place_of(name)
    return visit.services.turns.long_answers.place_of(name)


async def _answer_of_view(route: PageRoute, visit: Visit, request: HttpRequest, parts: dict[str, Any]) -> Response:
    if route.query is not None:
        asked = {name: values for name, values in visit.arguments.items() if name != "part" and values != [""]}
        parts["query"] = decode_query(asked, route.query)
    return await response_of(await route.view(visit, **parts), visit, request)


async def _form(route: PageRoute, request: HttpRequest) -> dict[str, Any]:
    fields = await _form_fields(request)
    return {} if route.form is None else {"form": decode_query(fields, route.form)}


async def _form_fields(request: HttpRequest) -> dict[str, list[str]]:
    if not (request.content_length or "Transfer-Encoding" in request.headers):
        return {}
    if request.mimetype != FORM:
        raise ProblemError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"A form must be sent as `{FORM}`.")
    data = await request.received.read(MOST_FORM)
    try:
        pairs = parse_qsl(data.decode(), keep_blank_values=True, max_num_fields=MOST_FIELDS, errors="strict")
    except ValueError as error:
        raise ProblemError(HTTPStatus.BAD_REQUEST, f"The form is invalid: {error}.") from error
    fields: dict[str, list[str]] = {}
    for name, value in pairs:
        if value:  # an empty field means not given
            fields.setdefault(name, []).append(value)
    return fields

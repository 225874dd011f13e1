"""Quart app: all routes over one `Services`, and the common headers of all responses.

It is created by the supervisor, or by a test, and served by server/listen.py. Each request has an ID (the client's
`X-Request-ID` if that is valid), which is in its answer and in all its log lines, and one log line about the request.
Nothing essential happens in `before_serving`: if that fails, Hypercorn continues without it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from time import perf_counter
from typing import Any, Final, cast

import structlog
from quart import Request as QuartRequest
from quart import Response
from quart.globals import current_app, request_ctx
from quart_trio import QuartTrio
from werkzeug.exceptions import HTTPException
from werkzeug.wrappers import Response as WerkzeugResponse

from dataloader.jobs.ids import uuid7
from dataloader.jobs.logger import get_logger
from dataloader.jobs.secrets.masking import mask_text
from dataloader.web.api import (
    bulk,
    jobs,
    loads,
    problem_kinds,
    processes,
    schedules,
    system,
    tasks,
    trigger,
)
from dataloader.web.decoding import prepare
from dataloader.web.openapi import description_routes
from dataloader.web.pages.addresses import HOME
from dataloader.web.pages.page_routes import PageRoute
from dataloader.web.pages.page_server import refuse_page, serve_page
from dataloader.web.pages.site import PAGES
from dataloader.web.problems import ProblemError
from dataloader.web.route_map import RouteMap
from dataloader.web.routes import Route, problem_response, serve_route
from dataloader.web.server.asgi import HttpRequest, QuartConnection
from dataloader.web.server.headers import HEADERS, NO_PAGE, REQUEST_ID
from dataloader.web.services import Services

log = get_logger(__name__)

_WORK: Final = [
    *trigger.routes,
    *tasks.routes,
    *jobs.routes,
    *bulk.routes,
    *loads.routes,
    *schedules.routes,
    *processes.routes,
    *system.routes,
    *problem_kinds.routes,
]
"""All routes of the API; a new feature is added to this list only."""
ROUTES: Final = (*_WORK, *description_routes(_WORK))

_REQUEST_ID: Final = re.compile(r"[!-~](?:[ -~]{0,126}[!-~])?")


class App(QuartTrio):
    """Quart with our ID, headers and log line around each request."""

    asgi_http_class = cast("Any", QuartConnection)
    request_class = HttpRequest
    url_map_class = RouteMap
    services: Services

    async def handle_request(self, request: QuartRequest) -> Response | WerkzeugResponse:
        """Serve a request. Quart calls this for each one, even if no route matches it."""
        started_at = perf_counter()
        here = cast("HttpRequest", request)
        given = request.headers.get(REQUEST_ID, "")
        request_id = given if _REQUEST_ID.fullmatch(given) else str(uuid7())
        structlog.contextvars.bind_contextvars(request_id=request_id)
        here.request_id = request_id
        response: Response | WerkzeugResponse
        if given not in {"", request_id}:
            response = _bad_request("X-Request-ID: must have at most 128 printable ASCII characters.", here)
        elif not here.is_text:
            response = _bad_request("The address contains percent-encoded bytes that are not UTF-8.", here)
        else:
            response = await super().handle_request(request)
        here.received.drop()
        for header in (*HEADERS, (REQUEST_ID, request_id), NO_PAGE):
            response.headers.setdefault(*header)
        status = response.status_code
        # The refusals' log line counts 429s; one line for each would be too many.
        (log.debug if status < 400 or status == HTTPStatus.TOO_MANY_REQUESTS else log.info)(
            "request",
            method=request.method,
            path=request.path if status < 400 else mask_text(request.full_path.rstrip("?")),
            status=status,
            ms=round((perf_counter() - started_at) * 1000, 1),
        )
        return response


def create_app(services: Services) -> App:
    """Return the app for these services. Serve it with `serve_web`."""
    app = App(__name__, static_folder=None)
    app.services = services
    # Bodies and answers have their own limits (bodies.py, http1.py); Quart's timeout would cut off a long answer.
    app.config["RESPONSE_TIMEOUT"] = None
    app.config["PROPAGATE_EXCEPTIONS"] = False
    app.url_map.strict_slashes = False
    app.url_map.merge_slashes = False
    # Includes the arguments of this process's own tasks.
    described = (*_WORK, *description_routes(_WORK, services.tasks)) if services.tasks else ROUTES
    for route in described:
        if route.body is not None:
            prepare(route.body)
        name = f"{route.view.__module__}.{route.view.__name__}".replace(".", "_")
        app.add_url_rule(route.path, name, _view_of_route(route, services), methods=[route.method])

    for page in PAGES:
        name = f"{page.view.__module__}.{page.view.__name__}".replace(".", "_")
        app.add_url_rule(page.path, name, _view_of_page(page, services), methods=[page.method])

    app.register_error_handler(HTTPException, _refuse)
    return app


def _view_of_route(route: Route, services: Services) -> Callable[..., Coroutine[Any, Any, Response]]:
    async def view(**parts: str) -> Response:
        here = _this_request()
        return await serve_route(route, services, here, here.request_id, parts)

    return view


def _view_of_page(route: PageRoute, services: Services) -> Callable[..., Coroutine[Any, Any, Response]]:
    async def view(**parts: str) -> Response:
        here = _this_request()
        return await serve_page(route, services, here, here.request_id, parts)

    return view


async def _refuse(error: HTTPException) -> Response:
    """Answer a request that matches no route, or that Quart itself refused."""
    here = _this_request()
    if here.path == "/" and "text/html" in here.headers.get("Accept", ""):
        # A browser at the bare address is sent to the pages.
        to = cast("App", current_app).services.settings.public.url(f"{HOME}/")
        return Response(b"", HTTPStatus.SEE_OTHER, {"Location": to})
    if here.path == HOME or here.path.startswith(f"{HOME}/"):
        return await refuse_page(error, cast("App", current_app).services, here, here.request_id)
    return problem_response(error, here.request_id, here.path)


def _bad_request(detail: str, here: HttpRequest) -> Response:
    return problem_response(ProblemError(HTTPStatus.BAD_REQUEST, detail), here.request_id, here.path)


def _this_request() -> HttpRequest:
    return cast("HttpRequest", request_ctx.request)

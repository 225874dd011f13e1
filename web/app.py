"""The Quart app: all routes over one `Services`, and what every response carries (Q5, Q16).

Made by the supervisor, served by server.py; tests make one for themselves. Each request gets an id (the client's
`X-Request-ID` if it is a decent one), which is bound to all log lines of the request and goes out again, and one line
in the log. Essential things happen in no `before_serving`: Hypercorn goes on without it if it fails.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine
from time import perf_counter
from typing import Any, Final, cast
from urllib.parse import urlsplit

import structlog
import trio
from hypercorn.typing import ASGISendCallable, ASGISendEvent
from quart import Request, Response, Websocket, request
from quart_trio import QuartTrio
from quart_trio.asgi import TrioASGIHTTPConnection
from quart_trio.wrappers import TrioRequest
from werkzeug.exceptions import HTTPException, NotFound
from werkzeug.wrappers import Response as WerkzeugResponse

from dataloader.jobs.ids import uuid7
from dataloader.jobs.masking import mask_text
from dataloader.web import etl, jobs, queues, system
from dataloader.web.openapi import description_routes
from dataloader.web.routes import Route, problem_response, serve
from dataloader.web.services import Services

log = structlog.get_logger(__name__)

_WORK: Final = (*jobs.routes, *etl.routes, *queues.routes, *system.routes)
ROUTES: Final = (*_WORK, *description_routes(_WORK))
"""All there is."""

END_S: Final = 10.0
"""How long the end of a response may take, whatever is cancelled."""
_REQUEST_ID: Final = re.compile(r"[!-~](?:[ -~]{0,126}[!-~])?")
_HEADERS: Final = (
    ("X-Content-Type-Options", "nosniff"),
    ("Cache-Control", "no-store"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Referrer-Policy", "no-referrer"),
)


class IdentifiedRequest(TrioRequest):
    """A request with the id under which it is logged and answered."""

    request_id = ""


class Connection(TrioASGIHTTPConnection):
    """One request on its way through Quart, with an end that can't be cut off."""

    def _create_request_from_scope(self, send: ASGISendCallable) -> Any:
        """A target that is no path, as `GET ?x`, is nowhere: Quart would fail on it."""
        path = self.scope["path"]
        if not path.startswith("/"):
            try:
                path = urlsplit(path).path
            except ValueError:
                path = ""
            self.scope["path"] = path if path.startswith("/") else f"/{path}"
        return super()._create_request_from_scope(send)

    async def _send_response(self, send: ASGISendCallable, response: Response | WerkzeugResponse) -> None:
        # With the last message Hypercorn ends the stream and says "disconnect", at which quart-trio cancels the sender,
        # and that is still at work: it has to close the connection, or to set the timer that closes an idle one.
        async def send_to_the_end(message: ASGISendEvent) -> None:
            if message["type"] != "http.response.body" or message.get("more_body"):
                await send(message)
                return
            with trio.move_on_after(END_S, shield=True):
                await send(message)

        await super()._send_response(send_to_the_end, response)


class App(QuartTrio):
    """Quart, with our id, headers and log line around each request."""

    asgi_http_class = Connection
    request_class = IdentifiedRequest

    async def handle_request(self, request: Request) -> Response | WerkzeugResponse:
        """Serve a request; Quart calls this for each, also for those that no route fits."""
        started_at = perf_counter()
        given = request.headers.get("X-Request-ID", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else str(uuid7())
        structlog.contextvars.bind_contextvars(request_id=request_id)
        cast("IdentifiedRequest", request).request_id = request_id
        response = await super().handle_request(request)
        response.headers.extend((*_HEADERS, ("X-Request-ID", request_id)))
        response.headers.setdefault("Content-Security-Policy", "default-src 'none'; frame-ancestors 'none'")
        status = response.status_code
        (log.debug if status < 400 else log.info)(
            "request",
            method=request.method,
            path=request.path if status < 400 else mask_text(request.full_path.rstrip("?")),
            status=status,
            ms=round((perf_counter() - started_at) * 1000, 1),
        )
        return response

    async def handle_websocket(self, websocket: Websocket) -> Response:
        """Refuse a WebSocket: there is none at any address, and Quart's own refusal is made for requests."""
        return problem_response(NotFound(), str(uuid7()), websocket.path)


def create_app(services: Services) -> App:
    """The app for these services. Serve it with `serve_web`."""
    app = App(__name__, static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = services.settings.max_batch_body_bytes
    app.config["BODY_TIMEOUT"] = 30
    # Sends are bounded by the socket's own timeout; Quart's would cut a slow reader of a long answer.
    app.config["RESPONSE_TIMEOUT"] = None
    app.config["PROPAGATE_EXCEPTIONS"] = False
    app.url_map.strict_slashes = False
    app.url_map.merge_slashes = False
    for route in ROUTES:
        name = f"{route.view.__module__}.{route.view.__name__}".replace(".", "_")
        app.add_url_rule(route.path, name, _view(route, services), methods=[route.method])

    app.register_error_handler(HTTPException, _refuse)
    return app


def _view(route: Route, services: Services) -> Callable[..., Coroutine[Any, Any, Response]]:
    async def view(**parts: str) -> Response:
        here = _this_request()
        return await serve(route, services, here, here.request_id, parts)

    return view


async def _refuse(error: HTTPException) -> Response:
    """Answer where no route is, or where Quart itself gave up."""
    here = _this_request()
    return problem_response(error, here.request_id, here.path)


def _this_request() -> IdentifiedRequest:
    return cast("IdentifiedRequest", request._get_current_object())  # type: ignore[attr-defined]  # noqa: SLF001 - Werkzeug named it

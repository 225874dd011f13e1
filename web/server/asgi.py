"""One request on its way between Hypercorn and Quart.

Quart makes a `Connection` of each request (`asgi_http_class`). What differs from Quart's own: the body is received
within bounds (bodies.py), a long answer goes out in pieces, of which each has its deadline, and the end of an answer
can't be cut off. Only public names of Quart are used; test_borrowed_names.py has them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import unquote_to_bytes, urlsplit

import trio
from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable, ASGISendEvent, HTTPScope
from quart import Quart, Response
from quart.utils import encode_headers
from quart_trio.wrappers import TrioRequest
from werkzeug.datastructures import Headers
from werkzeug.wrappers import Response as WerkzeugResponse

from dataloader.web.server.bodies import Body
from dataloader.web.server.connections import Client

if TYPE_CHECKING:
    from dataloader.web.app import App

END_S: Final = 10.0
"""How long the end of a response may take, whatever is cancelled."""
PIECE: Final = 1 << 16


class Request(TrioRequest):
    """A request with the id under which it is logged and answered, and what it holds in memory."""

    request_id = ""
    client: Client
    """The connection on which it came."""
    received: Body
    is_text = True
    """Whether its address is text: UTF-8, whatever is escaped in it."""


class Connection:
    """One request on its way through Quart."""

    def __init__(self, app: Quart, scope: HTTPScope) -> None:
        self._app = cast("App", app)
        self._scope = scope

    async def __call__(self, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        """Receive it, serve it, send its answer."""
        request = self._request()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_receive, request.received, receive, nursery.cancel_scope)
                await _send(send, await self._app.handle_request(request))
                nursery.cancel_scope.cancel()
        finally:
            request.received.drop()
            self._app.services.sending.give(request)

    def _request(self) -> Request:
        scope, services = self._scope, self._app.services
        headers = Headers([(name.decode("latin1"), value.decode("latin1")) for name, value in scope["headers"]])
        headers.setdefault("Host", "")
        request = Request(
            *(scope["method"], scope["scheme"], _path(scope["path"]), scope["query_string"], headers),
            *("", scope["http_version"], scope),
            send_push_promise=_push_nothing,
        )
        client = cast("Any", scope)["state"]["client"]
        request.client = client
        request.received = Body(request.content_length, services.receiving, services.refusals, client.ask_for_body)
        request.body = cast("Any", request.received)
        request.is_text = _is_text(scope["raw_path"]) and _is_text(scope["query_string"])
        return request


async def _receive(body: Body, receive: ASGIReceiveCallable, request: trio.CancelScope) -> None:
    """Take the body as it comes; the request ends when its client has gone."""
    while True:
        message = await receive()
        if message["type"] == "http.request":
            body.append(message["body"])
            if not message["more_body"]:
                body.set_complete()
        elif message["type"] == "http.disconnect":
            request.cancel()
            return


async def _send(send: ASGISendCallable, response: Response | WerkzeugResponse) -> None:
    headers = encode_headers(response.headers)
    await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
    data = memoryview(await cast("Response", response).get_data(as_text=False))
    while len(data) > PIECE:
        await send({"type": "http.response.body", "body": bytes(data[:PIECE]), "more_body": True})
        data = data[PIECE:]
    # With the last message Hypercorn ends the stream and says "disconnect", at which the request is cancelled, and the
    # sender is still at work: it has to close the connection, or to set the timer that closes an idle one.
    end: ASGISendEvent = {"type": "http.response.body", "body": bytes(data), "more_body": False}
    with trio.move_on_after(END_S, shield=True):
        await send(end)


async def _push_nothing(_path: str, _headers: Headers) -> None:
    """Nothing is pushed by HTTP/1.1."""


def _path(target: str) -> str:
    """The path of a request. A target that is none, as in `GET ?x`, leads nowhere."""
    if target.startswith("/"):
        return target
    try:
        path = urlsplit(target).path
    except ValueError:
        path = ""
    return path if path.startswith("/") else f"/{path}"


def _is_text(escaped: bytes) -> bool:
    try:
        unquote_to_bytes(escaped).decode()
    except UnicodeDecodeError:
        return False
    return True

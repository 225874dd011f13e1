"""Passes one request from Hypercorn to Quart, and its answer back.

Quart creates a `QuartConnection` for each request (`asgi_http_class`). It differs from Quart's own class in three ways:
the body is received within limits (bodies.py), a long answer is sent in pieces, each with a deadline, and a
cancellation cannot cut off the end of an answer. It uses only public names of Quart, which test_borrowed_names.py
lists.
"""

from __future__ import annotations

from contextlib import aclosing
from typing import Any, Final, cast
from urllib.parse import unquote_to_bytes, urlsplit

import trio
from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable, ASGISendEvent, HTTPScope
from quart import Quart, Response
from quart.utils import encode_headers
from quart_trio.wrappers import TrioRequest
from werkzeug.datastructures import Headers
from werkzeug.wrappers import Response as WerkzeugResponse

from dataloader.jobs.logger import get_logger
from dataloader.jobs.secrets.masking import mask_text
from dataloader.web.client_address import client_of
from dataloader.web.server.bodies import Body
from dataloader.web.server.connections import ClientConnection
from dataloader.web.server.streamed import StreamedResponse
from dataloader.web.services import Services

log = get_logger(__name__)

PIECE: Final = 1 << 16


class HttpRequest(TrioRequest):
    """Request with its ID, for the log and the answer, and with its connection and body."""

    request_id = ""
    client: ClientConnection
    """Connection on which it arrived."""
    address: str
    """Address of the client, which may have sent it through a proxy."""
    received: Body
    is_text = True
    """True if its path and query are UTF-8 once unescaped."""


class QuartConnection:
    """One request on its way through Quart, which calls such a class a connection."""

    def __init__(self, app: Quart, scope: HTTPScope) -> None:
        self._app = app
        self._services: Services = cast("Any", app).services  # an `App`
        self._scope = scope

    async def __call__(self, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        """Receive the request, serve it, and send its answer."""
        request = self._request()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_receive, request.received, receive, nursery.cancel_scope)
                response = await self._app.handle_request(request)
                end_s = self._services.http_limits.end_s
                if isinstance(response, StreamedResponse):
                    await _send_pieces(send, response, request, end_s)
                else:
                    await _send_response(send, response, end_s)
                nursery.cancel_scope.cancel()
        finally:
            request.received.drop()
            self._services.sending.give(request)

    def _request(self) -> HttpRequest:
        scope, services = self._scope, self._services
        headers = Headers([(name.decode("latin1"), value.decode("latin1")) for name, value in scope["headers"]])
        headers.setdefault("Host", "")
        path = services.settings.public.without_base(_path_of_target(scope["path"]))
        request = HttpRequest(
            *(scope["method"], scope["scheme"], path, scope["query_string"], headers),
            *("", scope["http_version"], scope),
            send_push_promise=_push_nothing,
        )
        client = cast("Any", scope)["state"]["client"]
        request.client = client
        peer = scope["client"]
        request.address = client_of(peer[0] if peer else "", headers, services.settings.trusted_proxies)
        request.received = Body(request.content_length, services.receiving, services.refusals, client.ask_for_body)
        request.body = cast("Any", request.received)
        request.is_text = _is_text(scope["raw_path"]) and _is_text(scope["query_string"])
        return request


async def _receive(body: Body, receive: ASGIReceiveCallable, request: trio.CancelScope) -> None:
    """Receive the body, and cancel the request when its client disconnects."""
    while True:
        message = await receive()
        if message["type"] == "http.request":
            body.append(message["body"])
            if not message["more_body"]:
                body.set_complete()
        elif message["type"] == "http.disconnect":
            request.cancel()
            return


async def _send_response(send: ASGISendCallable, response: Response | WerkzeugResponse, end_s: float) -> None:
    headers = encode_headers(response.headers)
    await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
    data = memoryview(await cast("Response", response).get_data(as_text=False))
    while len(data) > PIECE:
        await send({"type": "http.response.body", "body": bytes(data[:PIECE]), "more_body": True})
        data = data[PIECE:]
    # With the last message Hypercorn ends the stream and sends "disconnect", which cancels the request while this send
    # still runs. The send must continue, to close the connection or to set the timer that closes an idle one.
    end: ASGISendEvent = {"type": "http.response.body", "body": bytes(data), "more_body": False}
    with trio.move_on_after(end_s, shield=True):
        await send(end)


async def _send_pieces(send: ASGISendCallable, response: StreamedResponse, request: HttpRequest, end_s: float) -> None:
    """Send a response while it is created. A response that is not completed has no last chunk."""
    async with aclosing(response.pieces) as pieces:
        headers = encode_headers(response.headers)
        await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
        with trio.move_on_after(response.deadline_s) as sending:
            try:
                async for piece in pieces:
                    for begin in range(0, len(piece), PIECE):
                        data = piece[begin : begin + PIECE]
                        await send({"type": "http.response.body", "body": data, "more_body": True})
            except Exception as error:  # noqa: BLE001 - too late for a problem; the client must see the error
                told = mask_text(repr(error))
                log.warning("a streamed answer was aborted", path=mask_text(request.path), error=told)
                request.client.give_way()
                return
        if sending.cancelled_caught:
            log.warning("a streamed answer took too long", path=mask_text(request.path))
            request.client.give_way()
            return
    with trio.move_on_after(end_s, shield=True):
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _push_nothing(_path: str, _headers: Headers) -> None:
    """Do nothing: HTTP/1.1 has no push."""


def _path_of_target(target: str) -> str:
    """Return the path of a request's target, which may be a whole URL. It begins with "/" in any case."""
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

"""One request on its way between Hypercorn and Quart: all that we rely on of quart-trio's inside is in this file.

What differs from quart-trio: the body is received within bounds (bodies.py), a long answer goes out in pieces, of which
each has its deadline, and the end of an answer can't be cut off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import unquote_to_bytes, urlsplit

import trio
from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable, ASGISendEvent
from quart import Response
from quart.utils import encode_headers
from quart_trio.asgi import TrioASGIHTTPConnection
from quart_trio.wrappers import TrioRequest
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


class Connection(TrioASGIHTTPConnection):
    """One request on its way through Quart."""

    app: App

    async def __call__(self, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        """Receive it, serve it, send its answer."""
        request = self._create_request_from_scope(send)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.handle_messages, nursery, request, receive)
                nursery.start_soon(self.handle_request, nursery, request, send)
        finally:
            request.received.drop()
            self.app.services.sending.give(request)

    def _create_request_from_scope(self, send: ASGISendCallable) -> Request:
        """A target that is no path, as `GET ?x`, is nowhere: Quart would fail on it."""
        path = self.scope["path"]
        if not path.startswith("/"):
            try:
                path = urlsplit(path).path
            except ValueError:
                path = ""
            self.scope["path"] = path if path.startswith("/") else f"/{path}"
        request = cast("Request", super()._create_request_from_scope(send))
        services = self.app.services
        client = self.scope["state"]["client"]
        request.client = client
        request.received = Body(request.content_length, services.receiving, services.refusals, client.ask_for_body)
        request.body = cast("Any", request.received)
        request.is_text = _is_text(self.scope["raw_path"]) and _is_text(self.scope["query_string"])
        return request

    async def _send_response(self, send: ASGISendCallable, response: Response | WerkzeugResponse) -> None:
        headers = encode_headers(response.headers)
        await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
        data = memoryview(await cast("Response", response).get_data(as_text=False))
        while len(data) > PIECE:
            await send({"type": "http.response.body", "body": bytes(data[:PIECE]), "more_body": True})
            data = data[PIECE:]
        # With the last message Hypercorn ends the stream and says "disconnect", at which quart-trio cancels the sender,
        # and that is still at work: it has to close the connection, or to set the timer that closes an idle one.
        end: ASGISendEvent = {"type": "http.response.body", "body": bytes(data), "more_body": False}
        with trio.move_on_after(END_S, shield=True):
            await send(end)


def _is_text(escaped: bytes) -> bool:
    try:
        unquote_to_bytes(escaped).decode()
    except UnicodeDecodeError:
        return False
    return True

"""A client's connection, over Hypercorn's HTTP/1.1. Only this file relies on Hypercorn's internal names.

test_borrowed_names.py lists them. Hypercorn's own connection has a timer for idle connections only, and shields its
sends without a deadline. This one has a deadline for each header and for each piece of an answer, and reports its phase
to `Connections`, so that it can give way. It supports only HTTP/1.1: over HTTP/2 any client could end the whole server
by an error that Hypercorn does not catch, or hold connections for which no timer runs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from http import HTTPStatus
from typing import Any, Final

import attrs
import h11
import msgspec
import trio
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.events import Response
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import AppWrapper, ASGIReceiveEvent, ASGISendEvent, ConnectionState, Scope
from hypercorn.utils import parse_socket_addr

from dataloader.jobs.ids import uuid7
from dataloader.jobs.logger import get_logger
from dataloader.web.problems import MEDIA_TYPE, Problem
from dataloader.web.server.connections import Connections, Phase
from dataloader.web.server.headers import HEADERS, NO_PAGE, REQUEST_ID
from dataloader.web.server.limits import HttpLimits
from dataloader.web.server.refusals import Refusal, Refusals

log = get_logger(__name__)

_BLANK_LINE: Final = re.compile(rb"\n\r?\n")
_RECEIVE: Final = 1 << 16
_HEADER_ALONE: Final = {h11.CLIENT: h11.SEND_BODY, h11.SERVER: h11.SEND_RESPONSE}
_DETAILS: Final = {
    HTTPStatus.BAD_REQUEST: "This is not a valid HTTP/1.1 request, or the end of its body is ambiguous.",
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE: "The request header may have {fields} fields and {bytes:,} bytes.",
    HTTPStatus.NOT_IMPLEMENTED: "The `Transfer-Encoding` must be `chunked`.",
}


@attrs.frozen
class Server:
    """Objects that all connections of a server share."""

    app: AppWrapper
    config: Config
    context: WorkerContext
    connections: Connections
    refusals: Refusals
    limits: HttpLimits


class Parser(h11.Connection):
    """h11 with a limit for the header, which ignores data after a connection's last request."""

    def __init__(self, limits: HttpLimits) -> None:
        """Create a parser for the server's side."""
        super().__init__(h11.SERVER, max_incomplete_event_size=limits.header_bytes)
        self._limits = limits

    def receive_data(self, data: bytes) -> None:
        """Take data that has arrived."""
        if self.their_state is not h11.MUST_CLOSE:
            super().receive_data(data)

    def next_event(self) -> h11.Event | type[h11.NEED_DATA | h11.PAUSED]:
        """Return the next event in the data that has arrived. Raises `RemoteProtocolError`."""
        if self.their_state is h11.MUST_CLOSE:
            return h11.NEED_DATA
        if self.their_state is h11.IDLE:
            received = self.trailing_data[0]
            end = _BLANK_LINE.search(received)
            header = received[: end.end()] if end else received
            # Two more lines: the request line, and the blank one at the end.
            if len(header) > self._limits.header_bytes or header.count(b"\n") > self._limits.header_fields + 2:
                raise h11.RemoteProtocolError("the header is too long", error_status_hint=431)
        return super().next_event()


class Http1(H11Protocol):
    """HTTP/1.1 without upgrades; it refuses requests whose body has an ambiguous end (request smuggling)."""

    def __init__(self, *args: Any, refusals: Refusals, limits: HttpLimits, **more: Any) -> None:
        super().__init__(*args, **more)
        self.connection: h11.Connection = Parser(limits)
        self._limits = limits
        self._refusals = refusals
        self._waits_to_be_asked = False
        self._method = b""
        self.body_follows = False
        """True if the data being sent is the head of an answer, which is held back for the first bytes of its body."""

    async def ask_for_body(self) -> None:
        """Ask for the body by "100 Continue", if the client has sent only the header and waits for that (`Expect`)."""
        if self._waits_to_be_asked and self.connection.states == _HEADER_ALONE:
            self._waits_to_be_asked = False
            await self._send_h11_event(h11.InformationalResponse(status_code=100, headers=[]))

    async def _check_protocol(self, event: Any) -> None:
        """Offer no upgrade: a request for one is answered by HTTP/1.1."""

    async def stream_send(self, event: StreamEvent) -> None:
        """Send a part of an answer."""
        self.body_follows = isinstance(event, Response)
        await super().stream_send(event)

    async def _create_stream(self, request: h11.Request) -> None:
        # RFC 9112, 6.1: if a proxy and we may see different ends of a body, nothing after it can be trusted.
        self._method = request.method
        # Hypercorn would ask for the body immediately, before the request is known to be allowed.
        self._waits_to_be_asked = self.connection.they_are_waiting_for_100_continue
        self.connection.client_is_waiting_for_100_continue = False
        names = {name for name, _ in request.headers}
        if b"transfer-encoding" in names and (b"content-length" in names or request.http_version < b"1.1"):
            self._refusals.count(Refusal.BAD_FRAMING)
            await self._send_error_response(400)
            await self.send(Closed())
            return
        if b"upgrade" in names:
            # Hypercorn would take the data that follows for a WebSocket, which no address serves.
            headers = [(name, value) for name, value in request.headers if name != b"upgrade"]
            request = h11.Request(
                method=request.method, target=request.target, headers=headers, http_version=request.http_version
            )
        await super()._create_stream(request)

    async def _send_error_response(self, status_code: int) -> None:
        """Answer a request that never reaches the app, in the form of the app's own problems."""
        status, request_id = HTTPStatus(status_code), str(uuid7())
        problem = Problem(
            type="about:blank",
            title=status.phrase,
            status=status,
            detail=_DETAILS.get(status, status.description).format(
                fields=self._limits.header_fields, bytes=self._limits.header_bytes
            ),
            request_id=request_id,
        )
        body = msgspec.json.encode(problem)
        fields = (
            ("Content-Type", MEDIA_TYPE),
            ("Content-Length", str(len(body))),
            ("Connection", "close"),
            *HEADERS,
            NO_PAGE,
            (REQUEST_ID, request_id),
        )
        headers = [(name.encode(), value.encode()) for name, value in fields]
        self.body_follows = True
        await self._send_h11_event(
            h11.Response(status_code=status, headers=[*headers, *self.config.response_headers("h11")])
        )
        self.body_follows = False
        if self.connection.their_state is h11.IDLE or self._method != b"HEAD":
            await self._send_h11_event(h11.Data(data=body))
        await self._send_h11_event(h11.EndOfMessage())
        log.info("a request was refused before it was read", status=status_code, request_id=request_id)


class ConnectionTasks:
    """Starts the app for each request of a connection. Replaces Hypercorn's `TaskGroup`.

    There a message to an app that has ended waits for ever, and the connection with it.
    """

    def __init__(self, nursery: trio.Nursery, received: Callable[[], None]) -> None:
        """Create it for a nursery; `received` is called when all of a request has arrived."""
        self._nursery = nursery
        self._received = received

    async def spawn_app(
        self, app: AppWrapper, _config: Config, scope: Scope, send: Callable[[ASGISendEvent | None], Awaitable[None]]
    ) -> Callable[[ASGIReceiveEvent], Awaitable[None]]:
        """Start the app for a request; return the function that passes messages to it."""
        putting, getting = trio.open_memory_channel[ASGIReceiveEvent](1)
        self._nursery.start_soon(self._run, app, scope, getting, send)

        async def put(message: ASGIReceiveEvent) -> None:
            if message["type"] == "http.request" and not message["more_body"]:
                self._received()
            with suppress(trio.BrokenResourceError):
                await putting.send(message)

        return put

    async def _run(
        self,
        app: AppWrapper,
        scope: Scope,
        getting: trio.MemoryReceiveChannel[ASGIReceiveEvent],
        send: Callable[[ASGISendEvent | None], Awaitable[None]],
    ) -> None:
        try:
            with getting:
                await app(scope, getting.receive, send, trio.to_thread.run_sync, trio.from_thread.run)
        except* Exception:
            log.exception("a request failed outside its view")
        await send(None)


class Connection:
    """One client's connection. Its errors do not affect other connections; it ends when its client has gone."""

    def __init__(self, server: Server, stream: trio.SocketStream) -> None:
        self._server = server
        self._connections = server.connections
        self._refusals = server.refusals
        self._limits = server.limits
        self._stream = stream
        self._sending = trio.Lock()
        self._reading = trio.CancelScope(deadline=trio.current_time() + self._limits.header_s)
        self._header_began = True
        self._head = b""
        self._ending = False

    async def run(self) -> None:
        """Serve the connection to its end. It is already in `connections`."""
        try:
            try:
                await self._serve()
            finally:
                self._connections.leave(self)
                with trio.move_on_after(self._limits.close_s, shield=True):
                    await self._stream.aclose()
        except* OSError:
            pass  # the client has gone
        except* Exception as group:  # noqa: BLE001 - an error of one connection must not end the others
            log.info("a connection was closed: its data was not HTTP", error=str(group.exceptions[0]))

    async def ask_for_body(self) -> None:
        """Ask the client for the body of its request, if it waits for that."""
        await self._protocol.ask_for_body()

    def give_way(self) -> None:
        """Close the socket immediately; pending waits for it raise `ClosedResourceError`."""
        self._stream.socket.close()

    async def _serve(self) -> None:
        connected = self._stream.socket
        peer = parse_socket_addr(connected.family, connected.getpeername())
        here = parse_socket_addr(connected.family, connected.getsockname())
        async with trio.open_nursery() as nursery:
            self._protocol = Http1(
                self._server.app,
                self._server.config,
                self._server.context,
                ConnectionTasks(nursery, self._received),
                ConnectionState({"client": self}),
                ssl=False,
                client=peer,
                server=here,
                send=self._send,
                refusals=self._refusals,
                limits=self._limits,
            )
            with self._reading:
                await self._read()
            if self._reading.cancelled_caught and self._header_began:
                self._refusals.count(Refusal.LATE_HEADER)
            await self._protocol.handle(Closed())

    async def _read(self) -> None:
        while data := await self._receive():
            if self._ending:
                continue
            phase = self._connections.phase_of(self)
            if phase is Phase.IDLE and not self._header_began:
                self._header_began = True
                self._reading.deadline = trio.current_time() + self._limits.header_s
            await self._protocol.handle(RawData(data))
        if self._connections.phase_of(self) is Phase.RECEIVING:
            self._refusals.count(Refusal.CUT_BODY)

    async def _receive(self) -> bytes:
        """Return the bytes that have arrived; none when the connection has ended, on either side."""
        try:
            return bytes(await self._stream.receive_some(_RECEIVE))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return b""

    def _received(self) -> None:
        # Here, not when all read bytes are handled: if they contain the next request, that one waits for this one's
        # answer.
        if self._connections.phase_of(self) is Phase.RECEIVING:
            self._connections.move(self, Phase.WORKING)

    async def _send(self, event: Event) -> None:
        """Handle an event of the protocol: bytes for the client, or a change of its state."""
        if isinstance(event, RawData):
            data, self._head = self._head + event.data, b""
            if self._protocol.body_follows:
                self._head = data
            else:
                await self._send_data(data)
        elif isinstance(event, Closed):
            await self._end()
        elif isinstance(event, Updated) and self._connections.phase_of(self) is not None:
            # The next header may have begun while this request was answered.
            self._header_began = event.idle and bool(self._protocol.connection.trailing_data[0])
            self._connections.move(self, Phase.IDLE if event.idle else Phase.RECEIVING)
            wait_s = self._limits.header_s if self._header_began else self._limits.idle_s
            self._reading.deadline = trio.current_time() + wait_s if event.idle else math.inf

    async def _send_data(self, data: bytes) -> None:
        if not data:
            return
        async with self._sending:
            before = self._connections.phase_of(self)
            if before is not None:
                self._connections.move(self, Phase.SENDING)
            # Half an answer is of no use, so a cancellation waits for the send, which has a deadline.
            with trio.move_on_after(self._limits.taken_s, shield=True) as sending:
                try:
                    await self._stream.send_all(data)
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    self._connections.leave(self)
            if sending.cancelled_caught:
                self._refusals.count(Refusal.SLOW_READER)
                self._connections.leave(self)
                self.give_way()
            if before is not None and self._connections.phase_of(self) is not None:
                self._connections.move(self, before)
                return
        await self._protocol.handle(Closed())
        # If the next request was already read, the reader waits for the end of this answer, which will not come.
        self._header_began = False
        self._reading.cancel()

    async def _end(self) -> None:
        """Finish the current send, then shut down the sending side; ignore data that still arrives.

        Closing a socket with unread data resets the connection, and the client might not see the answer.
        """
        self._ending, self._header_began = True, False
        unread = self._protocol.connection.their_state is not h11.DONE
        self._reading.deadline = trio.current_time() + (self._limits.close_s if unread else 0)
        if self._connections.phase_of(self) is not None:
            self._connections.move(self, Phase.IDLE)
        async with self._sending:
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await self._stream.send_eof()
        await self._protocol.handle(Closed())

"""Service to load from: the data sets over HTTP on a real socket, with faults on demand and a record of requests.

It runs in separate threads, so that a pipeline under test shares no event loop with it, and a killed process does not
end its source. All timestamps are of `time.monotonic`. The served data sets and their paths are in data_sets.py.
"""

from __future__ import annotations

import functools
import itertools
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qsl, urlencode, urlsplit

import attrs
import data_sets


@attrs.define
class Seen:
    """Request as received; `ended_at` is when the last byte of its answer was sent, None before."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes
    began_at: float
    ended_at: float | None = None
    status: int | None = None
    raw_query: str = ""

    def __str__(self) -> str:
        return f"{self.path}?{urlencode(self.query)}" if self.query else self.path


@attrs.frozen
class Answer:
    """Answer of a path."""

    body: bytes = b""
    type: str = "application/json"
    headers: dict[str, str] = attrs.field(factory=dict)
    status: int = 200


@attrs.define
class Fault:
    """Fault of matching requests, and its remaining number of times; None means always."""

    match: re.Pattern[str]
    times: int | None
    status: int | None
    body: bytes | None
    headers: dict[str, str]
    delay_s: float
    cut_at: int | None
    drip_s: float
    chunked: bool


class SourceApp:
    """Service with its `url`; `requests` are all requests, in the order of arrival."""

    def __init__(self, certificate: Path | None = None) -> None:
        self.requests: list[Seen] = []
        self.corrections: dict[tuple[str, str], str] = {}
        """Rates that differ from the data set's, by date and currency."""
        self.largest_page = 100_000
        self.way_s: Callable[[], float] = lambda: 0.0
        """Seconds that the next request needs to arrive."""
        self._lock = threading.Lock()
        self._faults: list[Fault] = []
        self._routes: dict[str, Answer | Callable[[Seen], Answer]] = {}
        self._closing = threading.Event()
        self._server = _Server(("127.0.0.1", 0), functools.partial(_Handler, self))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
            self.url = self.url.replace("http:", "https:")

    def put(self, path: str, answer: Answer | Callable[[Seen], Answer]) -> None:
        """Set the answer of a path, or a function that returns it for a request."""
        self._routes[path] = answer

    def misbehave(
        self,
        match: str = "",
        *,
        times: int | None = 1,
        status: int | None = None,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        delay_s: float = 0.0,
        cut_at: int | None = None,
        drip_s: float = 0.0,
        chunked: bool = False,
    ) -> None:
        """Add a fault to requests.

        Args:
            match: a regular expression, searched for in the path with its query; empty for all. The first match
                applies.
            times: the number of requests, None for all that follow.
            status, body, headers: answered instead of the path's.
            delay_s: seconds before the first byte.
            cut_at: number of bytes of the body after which the connection is closed.
            drip_s: seconds between two bytes of the body.
            chunked: send no length, but chunks.
        """
        fault = Fault(re.compile(match), times, status, body, headers or {}, delay_s, cut_at, drip_s, chunked)
        with self._lock:
            self._faults.append(fault)

    def behave(self) -> None:
        """End all faults."""
        with self._lock:
            self._faults.clear()

    def asked(self, match: str = "") -> list[Seen]:
        """Return the requests whose path with query matches."""
        with self._lock:
            return [seen for seen in self.requests if re.search(match, str(seen))]

    def most_at_once(self) -> int:
        """Return the maximum number of concurrent requests."""
        with self._lock:
            steps = [(seen.began_at, 1) for seen in self.requests]
            steps += [(seen.ended_at, -1) for seen in self.requests if seen.ended_at is not None]
        return max(itertools.accumulate(step for _, step in sorted(steps)), default=0)

    def pauses(self) -> list[float]:
        """Return the seconds from each answer's end to the next request.

        The client's own pause is not longer than that.
        """
        with self._lock:
            return [
                after.began_at - before.ended_at
                for before, after in itertools.pairwise(self.requests)
                if before.ended_at is not None
            ]

    @contextmanager
    def running(self) -> Iterator[SourceApp]:
        thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._closing.set()
            self._server.shutdown()
            thread.join()
            self._server.close_all()

    def take(self, seen: Seen) -> tuple[Answer, Fault | None]:
        """Record a request, and choose its answer."""
        with self._lock:
            self.requests.append(seen)
            fault = next((one for one in self._faults if one.match.search(str(seen))), None)
            if fault is not None and fault.times is not None:
                fault.times -= 1
                if fault.times == 0:
                    self._faults.remove(fault)
        if fault is not None and self._closing.wait(fault.delay_s):
            return Answer(status=503), None
        if fault is not None and (fault.status is not None or fault.body is not None):
            status = fault.status or 200
            return Answer(fault.body if fault.body is not None else b"{}", status=status, headers=fault.headers), fault
        answer = self._answer(seen)
        return (attrs.evolve(answer, headers={**answer.headers, **fault.headers}) if fault else answer), fault

    def drip(self, seconds: float) -> bool:
        """Wait; return True if the service still runs."""
        return not self._closing.wait(seconds)

    def _answer(self, seen: Seen) -> Answer:
        route = self._routes.get(seen.path)
        if route is not None:
            return route(seen) if callable(route) else route
        found = data_sets.answer(seen.path, seen.query, self)
        return Answer(b'{"error": "no such path"}', status=404) if found is None else Answer(*found)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.connections: set[socket.socket] = set()

    def get_request(self):
        connection, address = super().get_request()
        self.connections.add(connection)
        return connection, address

    def shutdown_request(self, request) -> None:
        self.connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request, client_address) -> None:
        """Ignore a client that disconnects, which is not an error of the service."""

    def close_all(self) -> None:
        for connection in list(self.connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Otherwise the body waits for the client's acknowledgement of the headers: 40 ms for each answer.
    disable_nagle_algorithm = True

    def __init__(self, app: SourceApp, *args) -> None:
        self.app = app
        super().__init__(*args)

    def log_message(self, *args) -> None:
        """Do nothing: requests are recorded, not printed."""

    def do_GET(self) -> None:
        time.sleep(self.app.way_s())
        began_at = time.monotonic()
        parts = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {name.lower(): value for name, value in self.headers.items()}
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        seen = Seen(self.command, parts.path, query, headers, body, began_at, raw_query=parts.query)
        try:
            answer, fault = self.app.take(seen)
            seen.status = answer.status
            self._send(answer, fault)
        finally:
            seen.ended_at = time.monotonic()

    do_POST = do_GET  # noqa: N815 - the base class's name

    def _send(self, answer: Answer, fault: Fault | None) -> None:
        self.send_response(answer.status)
        headers = {"Content-Type": answer.type, **answer.headers}
        is_chunked = fault is not None and fault.chunked
        headers |= {"Transfer-Encoding": "chunked"} if is_chunked else {"Content-Length": str(len(answer.body))}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        cut_at = None if fault is None else fault.cut_at
        body = answer.body[:cut_at]
        if fault is not None and fault.drip_s:
            for place in range(len(body)):
                self.wfile.write(_chunk(body[place : place + 1]) if is_chunked else body[place : place + 1])
                if not self.app.drip(fault.drip_s):
                    break
        elif body:
            self.wfile.write(_chunk(body) if is_chunked else body)
        if cut_at is not None:
            self.close_connection = True
        elif is_chunked:
            self.wfile.write(b"0\r\n\r\n")


def _chunk(piece: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(piece), piece)


@contextmanager
def open_source_app(*, certificate: Path | None = None) -> Iterator[SourceApp]:
    """Run the service for the duration of a block; its data sets are read at their first use.

    With a file of a certificate and its key, it uses TLS.
    """
    with SourceApp(certificate).running() as app:
        yield app

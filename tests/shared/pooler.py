"""Pooler for PostgreSQL that works as PgBouncer does in transaction mode.

A connection of the server belongs to a client for one transaction, so the state of a session is lost or seen by the
next client. As in PgBouncer from version 1.21 on, prepared statements follow their client. A startup parameter that is
neither tracked nor ignored is refused. A cancel request reaches the connection that currently works for the client.
Free connections are given out in turn, so that no client has the same one for long. Left out: TLS, authentication of
the clients, timeouts, and setting a client's tracked parameters on each connection.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import os
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import parse_qs, urlsplit

import attrs
import trio

TRACKED = {"user", "database", "client_encoding", "datestyle", "timezone", "standard_conforming_strings"} | {
    "application_name"
}
PROTOCOL, CANCEL, TLS = 196_608, 80_877_102, 80_877_103
AUTHENTICATED, SASL, SASL_CONTINUE = 0, 10, 11


class Gone(Exception):  # noqa: N818 - describes the event
    """The other end has closed the connection."""


def packed(kind, body=b""):
    """Return a message in wire format."""
    return kind + (len(body) + 4).to_bytes(4) + body


def texts(*values):
    """Return texts in wire format."""
    return b"".join(value.encode() + b"\0" for value in values)


class Messages:
    """Messages of a stream, one by one. A cancelled read loses nothing."""

    def __init__(self, stream):
        self._stream = stream
        self._buffer = bytearray()

    async def next(self):
        """Return the next message's kind and body."""
        await self._hold(5)
        length = 1 + int.from_bytes(self._buffer[1:5])
        message = await self._hold(length)
        del self._buffer[:length]
        return message[:1], message[5:]

    async def first(self):
        """Return the body of the first message, which has no kind."""
        await self._hold(4)
        length = int.from_bytes(self._buffer[:4])
        message = await self._hold(length)
        del self._buffer[:length]
        return message[4:]

    async def _hold(self, length):
        while len(self._buffer) < length:
            data = await self._stream.receive_some(65_536)
            if not data:
                raise Gone
            self._buffer += data
        return bytes(self._buffer[:length])


@attrs.define(eq=False)
class ServerLink:
    """Connection to the server. `parses` are unanswered ones: the statement, and whether a client sent it."""

    stream: trio.SocketStream
    messages: Messages
    key: bytes = b""
    greeting: bytes = b""
    prepared: set[str] = attrs.field(factory=set)
    parses: deque[tuple[str, bool]] = attrs.field(factory=deque)
    served: set[int] = attrs.field(factory=set)

    async def log_in(self, user, password, database):
        parameters = texts("user", user, "database", database, "application_name", "pooler", "timezone", "UTC", "")
        await self.stream.send_all(packed(b"", PROTOCOL.to_bytes(4) + parameters))
        nonce = base64.b64encode(os.urandom(18)).decode()
        while True:
            kind, body = await self.messages.next()
            match kind, int.from_bytes(body[:4]):
                case b"R", method if method == SASL:
                    first = b"n,,n=,r=" + nonce.encode()
                    await self.stream.send_all(packed(b"p", texts("SCRAM-SHA-256") + len(first).to_bytes(4) + first))
                case b"R", method if method == SASL_CONTINUE:
                    await self.stream.send_all(packed(b"p", _proof(password, nonce, body[4:].decode())))
                case b"K", _:
                    self.key = body
                case b"S", _:
                    self.greeting += packed(kind, body)
                case b"E", _:
                    raise RuntimeError(body)
                case b"Z", _:
                    return


def _proof(password, nonce, challenge):
    """Return the last message of SCRAM-SHA-256."""
    given = dict(part.split("=", 1) for part in challenge.split(","))
    salted = hashlib.pbkdf2_hmac("sha256", password.encode(), base64.b64decode(given["s"]), int(given["i"]))
    client_key = hmac.digest(salted, b"Client Key", "sha256")
    last = f"c=biws,r={given['r']}"
    words = f"n=,r={nonce},{challenge},{last}"
    signature = hmac.digest(hashlib.sha256(client_key).digest(), words.encode(), "sha256")
    proof = bytes(a ^ b for a, b in zip(client_key, signature, strict=True))
    return f"{last},p={base64.b64encode(proof).decode()}".encode()


@attrs.define(eq=False)
class Client:
    """Connection of a client: its prepared statements by name, and the server's connection that it has now."""

    number: int
    stream: trio.SocketStream
    messages: Messages
    role: str = ""
    key: bytes = b""
    statements: dict[str, bytes] = attrs.field(factory=dict)
    link: ServerLink | None = None
    answers_due: int = 0
    unsynced: bool = False


@attrs.define(eq=False)
class Pooler:
    """Running pooler with at most `size` connections to the server; `dsn` leads to it.

    `clients` and `links` have all that ever existed.
    """

    dsn: str
    size: int
    _ignored: frozenset[str]
    _socket: str
    _login: tuple[str, str, str]
    clients: list[Client] = attrs.field(factory=list)
    links: list[ServerLink] = attrs.field(factory=list)
    _idle: deque[ServerLink] = attrs.field(factory=deque)
    _places: trio.Semaphore = attrs.field(init=False)

    def __attrs_post_init__(self):
        self._places = trio.Semaphore(self.size)

    async def is_shared(self, *roles):
        """Return True if it carried connections of exactly the allowed roles, and they shared its own."""
        came = {client.role for client in self.clients}
        shared = any(len(link.served) > 1 for link in self.links)
        return {*roles} <= came and not {"locks", "listener"} & came and shared

    async def serve(self, stream):
        """Serve one client, from its first message to its last."""
        client = Client(len(self.clients) + 1, stream, Messages(stream))
        try:
            if await self._welcome(client):
                while await self._serve_transaction(client):
                    pass
        except (Gone, trio.BrokenResourceError, trio.ClosedResourceError):
            pass

    async def _welcome(self, client):
        first = await client.messages.first()
        if int.from_bytes(first[:4]) == TLS:
            await client.stream.send_all(b"N")
            first = await client.messages.first()
        if int.from_bytes(first[:4]) == CANCEL:
            await self._cancel(first[4:])
            return False
        words = first[4:].decode().split("\0")
        parameters = {name.lower(): value for name, value in zip(words[::2], words[1::2], strict=True) if name}
        for name in parameters.keys() - TRACKED - self._ignored:
            fault = texts("SFATAL", "VFATAL", "C08P01", f"Munsupported startup parameter: {name}", "")
            await client.stream.send_all(packed(b"E", fault))
            return False
        self.clients.append(client)
        client.role = parameters["application_name"].rpartition(" ")[2]
        client.key = client.number.to_bytes(4) + os.urandom(4)
        link = await self._take()
        self._give_back(link)
        hello = packed(b"R", AUTHENTICATED.to_bytes(4)) + link.greeting + packed(b"K", client.key) + packed(b"Z", b"I")
        await client.stream.send_all(hello)
        return True

    async def _cancel(self, key):
        for client in self.clients:
            if client.key == key and client.link is not None:
                async with await trio.open_unix_socket(self._socket) as server:
                    await server.send_all(packed(b"", CANCEL.to_bytes(4) + client.link.key))
                    await server.receive_some(1)  # the server closes when it has done so

    async def _take(self):
        await self._places.acquire()
        try:
            return self._idle.popleft() if self._idle else await self._open()
        except BaseException:
            self._places.release()
            raise

    async def _open(self):
        stream = await trio.open_unix_socket(self._socket)
        link = ServerLink(stream, Messages(stream))
        self.links.append(link)
        await link.log_in(*self._login)
        return link

    def _give_back(self, link):
        self._idle.append(link)
        self._places.release()

    async def _serve_transaction(self, client):
        """Give the client a connection from its next message to the end of the transaction. Return False at its end."""
        kind, body = await client.messages.next()
        if kind == b"X":
            return False
        link = client.link = await self._take()
        link.served.add(client.number)
        last = None
        try:
            last = await self._relay(client, link, kind, body)
        finally:
            client.link = None
            if last is None:
                # Half a transaction belongs to no client: close the connection.
                link.stream.socket.close()
                self._places.release()
            else:
                self._give_back(link)
        if last is None:
            raise Gone
        # Only after the connection is free: the answer to the next message must not use the old one.
        await client.stream.send_all(last)
        return True

    async def _relay(self, client, link, kind, body):
        """Relay both ways until the transaction has ended; return its last message, or None if one side has closed."""
        last = None

        async def ask():
            message = (kind, body)
            while True:
                await link.stream.send_all(self._asked(client, link, *message))
                message = await client.messages.next()

        async def answer():
            nonlocal last
            while True:
                message = await link.messages.next()
                data, over = self._answered(client, link, *message)
                if over:
                    last = data
                    return
                await client.stream.send_all(data)

        async with trio.open_nursery() as nursery:

            async def until_gone(pump):
                with contextlib.suppress(Gone, trio.BrokenResourceError, trio.ClosedResourceError):
                    await pump()
                nursery.cancel_scope.cancel()

            nursery.start_soon(until_gone, ask)
            nursery.start_soon(until_gone, answer)
        return last

    def _asked(self, client, link, kind, body):
        """Return the server's message for a client's message."""
        if kind in {b"P", b"B", b"D", b"E", b"C", b"H"}:
            client.unsynced = True
        elif kind in {b"Q", b"S"}:
            client.unsynced = False
            client.answers_due += 1
        match kind:
            case b"X":
                raise Gone
            case b"P":
                name, rest = _text(body)
                if name:
                    client.statements[name] = rest
                    name = f"{client.number} {name}"
                    link.prepared.add(name)
                link.parses.append((name, True))
                return packed(kind, texts(name) + rest)
            case b"B":
                portal, rest = _text(body)
                name, rest = _text(rest)
                before, name = self._prepared(client, link, name)
                return before + packed(kind, texts(portal, name) + rest)
            case b"D" | b"C" if body[:1] == b"S":
                name, rest = _text(body[1:])
                before, name = self._prepared(client, link, name)
                if kind == b"C":
                    link.prepared.discard(name)
                return before + packed(kind, b"S" + texts(name) + rest)
            case _:
                return packed(kind, body)

    @staticmethod
    def _prepared(client, link, name):
        """Return the messages that prepare a client's statement on this connection, and its name there."""
        if not name:
            return b"", name
        there = f"{client.number} {name}"
        if there in link.prepared or name not in client.statements:
            return b"", there
        link.prepared.add(there)
        link.parses.append((there, False))
        return packed(b"P", texts(there) + client.statements[name]), there

    @staticmethod
    def _answered(client, link, kind, body):
        """Return the client's message for the server's message, and whether it ends the transaction."""
        match kind:
            case b"1":
                _, asked_for = link.parses.popleft()
                return (packed(kind, body) if asked_for else b""), False
            case b"Z":
                client.answers_due -= 1
                # Statements that were not prepared because of an earlier error.
                link.prepared.difference_update(name for name, _ in link.parses)
                link.parses.clear()
                return packed(kind, body), body == b"I" and not client.answers_due and not client.unsynced
            case _:
                return packed(kind, body), False


def _text(data):
    """Return the first text of a message, and the rest."""
    text, _, rest = data.partition(b"\0")
    return text.decode(), rest


@asynccontextmanager
async def open_pooler(dsn: str, *, size: int, ignored: frozenset[str]) -> AsyncIterator[Pooler]:
    """Run a pooler on a free port of this machine, in front of the server of `dsn`; drop `ignored` parameters."""
    parts = urlsplit(dsn)
    [directory] = parse_qs(parts.query)["host"]
    database = parts.path.removeprefix("/")
    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        port = listeners[0].socket.getsockname()[1]
        address = f"postgresql://{parts.username}:nobody-asks@127.0.0.1:{port}/{database}?sslmode=disable"
        login = (parts.username, parts.password, database)
        pooler = Pooler(address, size, ignored, f"{directory}/.s.PGSQL.5432", login)
        await nursery.start(trio.serve_listeners, pooler.serve, listeners)
        try:
            yield pooler
        finally:
            nursery.cancel_scope.cancel()
            for link in pooler.links:
                link.stream.socket.close()

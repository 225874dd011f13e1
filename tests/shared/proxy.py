"""Proxy for PostgreSQL that simulates network faults: silence, resets, refusals, latency.

It forwards TCP to the server's unix socket. It knows the role of each of our connections, which is the last word of the
application name at its start: locks, heartbeat, recorder, listener, pool, transaction.
"""

from __future__ import annotations

import random
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import parse_qs, urlsplit

import attrs
import trio


@attrs.frozen
class Hold:
    """Hold of data: for the connections of `role` (None: all), only the answers or both directions.

    With `links` it applies only to those, and to no later connections.
    """

    role: str | None
    answers_only: bool
    links: frozenset[Link] | None = None

    def holds(self, link: Link, *, answers: bool) -> bool:
        """Return True if this data of a connection is held."""
        return (
            self.role in (None, link.role)
            and (answers or not self.answers_only)
            and (self.links is None or link in self.links)
        )


@attrs.define(eq=False)
class Link:
    """Connection through the proxy."""

    scope: trio.CancelScope
    role: str | None = None
    asked: int = 0
    is_answered: bool = True

    def greeted(self, data: bytes) -> None:
        """Read the role from the client's first bytes, its startup packet."""
        name = re.search(rb"application_name\0[^\0]* ([^\0 ]+)\0", data)
        self.role = name[1].decode() if name else ""

    def passed(self, data: bytes, *, answers: bool) -> None:
        """Note a request, or a piece of its answer: the last one ends with the message that the server is idle."""
        self.is_answered = answers and data.endswith(b"Z\0\0\0\5I")
        self.asked += not answers


@attrs.define
class Proxy:
    """Running proxy; `dsn` leads through it. Each piece of data is delayed by `delay_s` and up to `jitter_s` more.

    `reworded` are bytes in answers, and the equally many bytes that replace them.
    """

    dsn: str
    _socket: str
    delay_s: float = 0
    jitter_s: float = 0
    reworded: tuple[bytes, bytes] = (b"", b"")
    _holds: set[Hold] = attrs.field(factory=set)
    _marks: list[tuple[str, bytes, bytes | None]] = attrs.field(factory=list)
    _changed: trio.Event = attrs.field(factory=trio.Event)
    _links: set[Link] = attrs.field(factory=set)
    _refusing: bool = False

    def freeze(self, role: str | None = None, *, answers_only: bool = False) -> None:
        """Create a black hole: connections stay open, and no data passes, or no answers."""
        self._holds.add(Hold(role, answers_only))

    def freeze_at(self, role: str, mark: bytes, *, after: bytes | None = None) -> None:
        """Create a black hole for the answers to a role's connections, starting at a request or answer with `mark`.

        So the answer to that statement is lost, whatever else the role sends meanwhile. With `after`, marks count only
        after a request or answer with those bytes.
        """
        self._marks.append((role, mark, after))

    async def is_frozen(self) -> bool:
        """Return True if data is currently held."""
        return bool(self._holds)

    def forget(self) -> None:
        """Simulate a firewall that lost its state: open connections pass nothing anymore, later ones work."""
        self._holds.add(Hold(None, answers_only=False, links=frozenset(self._links)))

    def links(self, role: str) -> set[Link]:
        """Return the open connections of a role, as far as the server knows."""
        return {link for link in self._links if link.role == role}

    def asked(self, role: str) -> int | None:
        """Return the number of requests of a role's connections; None while one has no answer, or there is none."""
        links = self.links(role)
        return sum(link.asked for link in links) if links and all(link.is_answered for link in links) else None

    def thaw(self) -> None:
        """End all black holes; held data is passed on."""
        self._holds.clear()
        self._changed.set()
        self._changed = trio.Event()

    def cut(self, role: str | None = None) -> None:
        """Reset open connections, all or those of a role. If all, also refuse new ones until `mend`."""
        self._refusing = role is None
        for link in list(self._links):
            if role in (None, link.role):
                link.scope.cancel()

    def mend(self) -> None:
        """Accept connections again."""
        self._refusing = False

    async def serve(self, client: trio.SocketStream) -> None:
        with trio.CancelScope() as scope:
            if self._refusing:
                return
            link = Link(scope)
            self._links.add(link)
            try:
                async with await trio.open_unix_socket(self._socket) as server, trio.open_nursery() as nursery:
                    nursery.start_soon(self._pass, link, client, server, nursery, False)
                    nursery.start_soon(self._pass, link, server, client, nursery, True)
            except OSError:
                return  # the server is not running: the client's connection ends
            finally:
                self._links.discard(link)

    async def _pass(
        self, link: Link, source: trio.abc.Stream, sink: trio.abc.Stream, nursery: trio.Nursery, answers: bool
    ) -> None:
        try:
            async for data in source:
                if not answers and link.role is None:
                    link.greeted(data)
                for role, mark, after in self._marks.copy():
                    if role == link.role and (after or mark) in data:
                        self._marks.remove((role, mark, after))
                        if after is None:
                            self.freeze(role, answers_only=True)
                        else:
                            self._marks.append((role, mark, None))
                if self.delay_s or self.jitter_s:
                    await trio.sleep(self.delay_s + random.uniform(0, self.jitter_s))
                await self._held_back(link, answers=answers)
                link.passed(data, answers=answers)
                await sink.send_all(data.replace(*self.reworded) if answers and self.reworded[0] else data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        await self._held_back(link, answers=answers)
        nursery.cancel_scope.cancel()

    async def _held_back(self, link: Link, *, answers: bool) -> None:
        while any(hold.holds(link, answers=answers) for hold in self._holds):
            await self._changed.wait()


@asynccontextmanager
async def open_proxy(dsn: str) -> AsyncIterator[Proxy]:
    """Run a proxy on a free port of this machine, in front of the server of `dsn`."""
    parts = urlsplit(dsn)
    [directory] = parse_qs(parts.query)["host"]
    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        port = listeners[0].socket.getsockname()[1]
        userinfo = parts.netloc.rpartition("@")[0]
        address = f"{parts.scheme}://{userinfo}@127.0.0.1:{port}{parts.path}?sslmode=disable"
        proxy = Proxy(address, f"{directory}/.s.PGSQL.{parts.port or 5432}")
        await nursery.start(trio.serve_listeners, proxy.serve, listeners)
        try:
            yield proxy
        finally:
            proxy.thaw()
            nursery.cancel_scope.cancel()

"""A proxy before PostgreSQL, to break its network as a real one breaks: silence, resets, refusals.

Forwards TCP to the server's unix socket. `freeze` is a black hole (connections stay open, nothing passes either way),
`thaw` its end; `cut` resets what is open and refuses what comes, `mend` its end. `frozen_roles` would need to read the
protocol; instead whoever wants to stop one session alone stops its backend process.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import parse_qs, urlsplit

import attrs
import trio


@attrs.define
class Proxy:
    """Running; `dsn` leads through it."""

    dsn: str
    _socket: str
    _open: trio.Event = attrs.field(factory=trio.Event)
    _scopes: set[trio.CancelScope] = attrs.field(factory=set)
    _refusing: bool = False

    def __attrs_post_init__(self) -> None:
        self._open.set()

    def freeze(self) -> None:
        self._open = trio.Event()

    def thaw(self) -> None:
        self._open.set()

    def cut(self) -> None:
        self._refusing = True
        for scope in self._scopes:
            scope.cancel()

    def mend(self) -> None:
        self._refusing = False

    async def serve(self, client: trio.SocketStream) -> None:
        with trio.CancelScope() as scope:
            if self._refusing:
                return
            self._scopes.add(scope)
            try:
                async with await trio.open_unix_socket(self._socket) as server, trio.open_nursery() as nursery:
                    nursery.start_soon(self._pass, client, server, nursery)
                    nursery.start_soon(self._pass, server, client, nursery)
            finally:
                self._scopes.discard(scope)

    async def _pass(self, source: trio.abc.Stream, sink: trio.abc.Stream, nursery: trio.Nursery) -> None:
        try:
            async for data in source:
                await self._open.wait()
                await sink.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        await self._open.wait()
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def open_proxy(dsn: str) -> AsyncIterator[Proxy]:
    """A proxy on a free port of this machine, before the server of `dsn`."""
    parts = urlsplit(dsn)
    [directory] = parse_qs(parts.query)["host"]
    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        port = listeners[0].socket.getsockname()[1]
        userinfo = parts.netloc.rpartition("@")[0]
        address = f"{parts.scheme}://{userinfo}@127.0.0.1:{port}{parts.path}?ssl=disable"
        proxy = Proxy(re.sub(r"\?ssl", "?sslmode", address), f"{directory}/.s.PGSQL.5432")
        await nursery.start(trio.serve_listeners, proxy.serve, listeners)
        try:
            yield proxy
        finally:
            proxy.thaw()
            nursery.cancel_scope.cancel()

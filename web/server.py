"""Serves the app by Hypercorn on Trio, on a listening socket of our own, until it is told to stop.

The supervisor opens the socket with `open_listener` and keeps it: a web actor that is restarted serves the same queue
of connections. Each time it gets a duplicate.

Connections are Hypercorn's, by HTTP/1.1 alone: whoever may connect could end the whole server by what its HTTP/2 does
not catch, or hold connections for which no timer runs.

Hypercorn shields its sends without a deadline, so a client that stops reading would hold up the whole shutdown. The
socket has `TCP_USER_TIMEOUT`, which accepted connections inherit: the kernel drops a connection whose other side has
taken nothing for so long. When `shutdown` returns, new connections are refused, open requests get some seconds, then
they are cancelled.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

import structlog
import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.events import Closed, Event, Updated
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.protocol.ws_stream import WSStream
from hypercorn.trio.lifespan import Lifespan
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from hypercorn.utils import parse_socket_addr, repr_socket_addr

from dataloader.web.app import App

log = structlog.get_logger(__name__)

BACKLOG: Final = 1024
STALLED_AFTER_S: Final = 10.0
"""A client that takes no data for so long is gone."""
CLOSE_S: Final = 1.0
GRACE_S: Final = 3.0
"""What open requests get at the shutdown."""


def open_listener(host: str, port: int, *, stalled_after_s: float = STALLED_AFTER_S) -> socket.socket:
    """A listening TCP socket on an address of this machine; port 0 takes a free one. Raises `OSError`."""
    family, kind, proto, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_NUMERICSERV
    )[0]
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stalled_after_s * 1000))
        sock.bind(address)
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


class Http1(H11Protocol):
    """HTTP/1.1 that is never switched to HTTP/2, and that closes after a handshake of a WebSocket was refused."""

    async def _check_protocol(self, event: Any) -> None:
        """No upgrade is offered: whoever asks for one is answered by HTTP/1.1."""

    async def _create_stream(self, request: Any) -> None:
        await super()._create_stream(request)
        if isinstance(self.stream, WSStream) and self.stream.closed:
            await self.send(Closed())


class Connection(TCPServer):
    """One client's connection. Whatever comes on it ends no other; when the client has gone nothing keeps it open."""

    _over = False

    async def run(self) -> None:
        """Serve it to its end."""
        try:
            await self._serve()
        except* OSError:
            pass  # the client has gone
        except* Exception as group:  # noqa: BLE001 - whatever comes on one connection ends no other
            log.info("a connection was ended: what came was no HTTP", error=str(group.exceptions[0]))
        finally:
            with trio.move_on_after(CLOSE_S, shield=True):
                await self._close()

    async def _serve(self) -> None:
        connected = self.stream.socket
        client = parse_socket_addr(connected.family, connected.getpeername())
        server = parse_socket_addr(connected.family, connected.getsockname())
        async with TaskGroup() as tasks:
            self._task_group = tasks
            self.protocol: Any = Http1(
                self.app,
                self.config,
                self.context,
                tasks,
                ConnectionState(self.state),
                ssl=False,
                client=client,
                server=server,
                send=self.protocol_send,
            )
            await self.protocol.initiate()
            await self.idle_task.restart(tasks, self._idle_timeout)
            await self._read_data()

    async def _read_data(self) -> None:
        await super()._read_data()
        # Else the timer of an idle connection would keep this one.
        self._over = True
        await self.idle_task.stop()

    async def protocol_send(self, event: Event) -> None:
        """What the protocol has for the client, or for the timer of idle connections."""
        if not (self._over and isinstance(event, Updated)):
            await super().protocol_send(event)


async def serve_web(
    app: App,
    sock: socket.socket,
    *,
    shutdown: Callable[[], Awaitable[None]],
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve `app` on `sock` until `shutdown` returns; then close `sock` and let the open requests end.

    `started` gets the URLs. After a crash `sock` is still open, for the next try.
    """
    config, context, state = _config(), WorkerContext(None), ConnectionState({})
    wrapped = ASGIWrapper(app)
    lifespan = Lifespan(wrapped, config, state)
    listener = trio.SocketListener(trio.socket.from_stdlib_socket(sock.dup()))
    async with trio.open_nursery() as nursery:
        await nursery.start(lifespan.handle_lifespan)
        await lifespan.wait_for_startup()
        async with trio.open_nursery() as connections:
            connect = partial(Connection, wrapped, config, context, state)
            async with trio.open_nursery() as accepting:
                accepting.start_soon(partial(trio.serve_listeners, connect, [listener], handler_nursery=connections))
                task_status.started([f"http://{repr_socket_addr(sock.family, sock.getsockname())}"])
                await shutdown()
                sock.close()
                accepting.cancel_scope.cancel()
            await context.terminated.set()
            connections.cancel_scope.deadline = trio.current_time() + GRACE_S
        await lifespan.wait_for_shutdown()
        nursery.cancel_scope.cancel()


def _config() -> Config:
    config = Config()
    config.shutdown_timeout = GRACE_S
    config.keep_alive_timeout = 75.0
    config.keep_alive_max_requests = 100_000
    config.include_server_header = False
    config.accesslog = None
    config.errorlog = logging.getLogger("hypercorn.error")
    config.errorlog.setLevel(logging.WARNING)
    return config

"""Serves the app by Hypercorn on Trio, on our own listening socket, until the shutdown.

The supervisor opens the socket with `open_listening_socket` and keeps it: a web actor that is restarted gets another
duplicate of it, and serves the same queue of connections.

The socket has `TCP_USER_TIMEOUT`, which accepted connections inherit: the kernel drops a connection whose client has
taken no data for that long. When `shutdown` returns, new connections are refused, idle ones are closed, and open
requests are cancelled after `grace_s` seconds.
"""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Final

import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.trio.lifespan import Lifespan
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from hypercorn.utils import repr_socket_addr

from dataloader.jobs.logger import get_logger
from dataloader.web.app import App
from dataloader.web.server.http1 import Connection, Server
from dataloader.web.server.limits import HttpLimits
from dataloader.web.server.refusals import Refusal

log = get_logger(__name__)

BACKLOG: Final = 4096
STALLED_AFTER_S: Final = 10.0
"""Seconds without progress after which the kernel drops a connection whose client takes no data."""
_NO_FILE: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})


def open_listening_socket(host: str, port: int, *, stalled_after_s: float = STALLED_AFTER_S) -> socket.socket:
    """Return a listening TCP socket on an address of this machine; port 0 takes any free one. Raises `OSError`."""
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


async def serve_web(
    app: App,
    sock: socket.socket,
    *,
    shutdown: Callable[[], Awaitable[None]],
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve `app` on `sock` until `shutdown` returns; then close `sock` and let the open requests end.

    `task_status.started` gets the URLs. After an error `sock` is still open, so that this can be called again.
    """
    services = app.services
    limits = services.http_limits
    config, context = _config(limits), WorkerContext(None)
    wrapped = ASGIWrapper(app)
    lifespan = Lifespan(wrapped, config, ConnectionState({}))
    listener = trio.SocketListener(trio.socket.from_stdlib_socket(sock.dup()))
    connections = services.connections
    _warn_of_few_files(connections.most, services.settings.max_connections)
    server = Server(wrapped, config, context, connections, services.refusals, limits)
    async with trio.open_nursery() as nursery:
        await nursery.start(lifespan.handle_lifespan)
        await lifespan.wait_for_startup()
        async with trio.open_nursery() as serving:
            async with listener, trio.open_nursery() as accepting:
                accepting.start_soon(_accept, listener, server, serving)
                task_status.started([f"http://{repr_socket_addr(sock.family, sock.getsockname())}"])
                await shutdown()
                sock.close()
                accepting.cancel_scope.cancel()
            await context.terminated.set()
            connections.close_idle()
            serving.cancel_scope.deadline = trio.current_time() + limits.grace_s
        await lifespan.wait_for_shutdown()
        nursery.cancel_scope.cancel()


async def _accept(listener: trio.SocketListener, server: Server, serving: trio.Nursery) -> None:
    """Accept and serve connections. Trio's own loop would log ten tracebacks a second when no file is left."""
    while True:
        await trio.lowlevel.wait_readable(listener.socket.fileno())
        await server.connections.room()
        try:
            stream = await listener.accept()
        except OSError as error:
            if error.errno not in _NO_FILE:
                raise
            server.refusals.count(Refusal.NO_FILE)
            server.connections.make_room()
            await trio.sleep(server.limits.no_file_s)
            continue
        connection = Connection(server, stream)
        server.connections.enter(connection)
        serving.start_soon(connection.run)


def _warn_of_few_files(most: int, wanted: int) -> None:
    if most < wanted:
        log.warning(
            "fewer connections than DL_MAX_CONNECTIONS are served, because the limit of open files is too low",
            max_connections=wanted,
            served=most,
            what_to_do="raise the limit of open files (ulimit -n, LimitNOFILE=), or lower DL_MAX_CONNECTIONS",
        )


def _config(limits: HttpLimits) -> Config:
    config = Config()
    config.shutdown_timeout = limits.grace_s
    config.keep_alive_max_requests = 100_000
    config.include_server_header = False
    config.accesslog = None
    config.errorlog = logging.getLogger("hypercorn.error")
    config.errorlog.setLevel(logging.WARNING)
    return config

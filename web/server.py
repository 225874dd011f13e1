"""Serves the app by Hypercorn on Trio, on a listening socket of our own, until it is told to stop.

The supervisor opens the socket with `open_listener` and keeps it: a web actor that is restarted serves the same queue
of connections. Each time Hypercorn gets a duplicate, which it closes in its own way.

Hypercorn shields its sends without a deadline, so a client that stops reading would hold up the whole shutdown. The
socket has `TCP_USER_TIMEOUT`, which accepted connections inherit: the kernel drops a connection whose other side has
taken nothing for so long. When `shutdown` returns, new connections are refused, open requests get some seconds, then
they are cancelled.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Final

import trio
from hypercorn.config import Config
from hypercorn.trio import serve

from dataloader.web.app import App

BACKLOG: Final = 1024
STALLED_AFTER_S: Final = 10.0
"""A client that takes no data for so long is gone."""
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


async def serve_web(  # noqa: ASYNC128 - Hypercorn calls started
    app: App,
    sock: socket.socket,
    *,
    shutdown: Callable[[], Awaitable[None]],
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve `app` on `sock` until `shutdown` returns; then close `sock` and let the open requests end.

    `started` gets the URLs. After a crash `sock` is still open, for the next try.
    """

    async def stop() -> None:
        await shutdown()
        sock.close()

    config = Config()
    config.bind = [f"fd://{os.dup(sock.fileno())}"]
    config.backlog = BACKLOG
    config.graceful_timeout = GRACE_S
    config.shutdown_timeout = GRACE_S
    config.keep_alive_timeout = 75.0
    config.keep_alive_max_requests = 100_000
    config.include_server_header = False
    config.accesslog = None
    config.errorlog = logging.getLogger("hypercorn.error")
    config.errorlog.setLevel(logging.WARNING)
    await serve(app, config, shutdown_trigger=stop, mode="asgi", task_status=task_status)

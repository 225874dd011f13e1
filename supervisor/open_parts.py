"""Opens and closes the foundations of a process's parts: the database, the sessions and the HTTP socket."""

from __future__ import annotations

import errno
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

import trio

from dataloader.actors.job_runs import Run
from dataloader.actors.signals import Signals
from dataloader.jobs.errors import AddressError, ConfigError
from dataloader.jobs.tasks import Tasks
from dataloader.store.connection.bridge import open_database
from dataloader.store.connection.options import DatabaseOptions
from dataloader.store.embedded.postgres import EmbeddedPostgres
from dataloader.supervisor.embedded_server import keep_server
from dataloader.supervisor.make_parts import make_parts
from dataloader.supervisor.parts import Parts
from dataloader.supervisor.settings import Settings
from dataloader.web.app import App, create_app
from dataloader.web.auth import Token
from dataloader.web.pages.addresses import PublicAddress
from dataloader.web.server.listen import open_listening_socket, serve_web
from dataloader.web.services import Services, WebSettings

CLOSE_S: Final = 7.0
"""Seconds in which the three sessions are closed; each takes at most two."""


def options_of(settings: Settings) -> DatabaseOptions:
    """Return the connection options of a process that runs jobs.

    Raises `ConfigError` if the settings have no database.
    """
    if settings.db_dsn is None:
        raise ConfigError("DL_DB_DSN: is required: the address of the database")
    return DatabaseOptions(
        dsn=settings.db_dsn,
        direct_dsn=settings.direct_dsn,
        pool_size=settings.pool_size,
        transaction_pool_size=settings.transaction_pool_size,
        connect_timeout_s=settings.connect_timeout_s,
        statement_timeout_s=settings.statement_timeout_s,
        transaction_timeout_s=settings.transaction_timeout_s,
        name=f"dataloader {settings.instance}",
    )


@asynccontextmanager
async def open_parts(
    settings: Settings,
    tasks: Tasks,
    *,
    with_web: bool,
    server: EmbeddedPostgres | None,
    unstoppable: Callable[[Run], None],
    stores_schedules: bool,
    signals: Signals | None = None,
) -> AsyncIterator[Parts]:
    """Open the parts over the database for the duration of a block. Raises `AddressError` if the HTTP address is taken.

    `server` is the embedded PostgreSQL that the settings lead to, if it is to be kept running.
    """
    options = options_of(settings)
    async with open_database(options) as database:
        parts = make_parts(
            settings,
            tasks,
            database,
            unstoppable=unstoppable,
            stores_schedules=stores_schedules,
            signals=signals,
        )
        parts.server = None if server is None else partial(keep_server, server)
        sock = _listen(settings.host, settings.port) if with_web else None
        try:
            if sock is not None:
                host, port = sock.getsockname()[:2]
                parts.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
                app = _app(parts)
                parts.answer_waits = app.services.waiting.answer_all
                parts.web = partial(serve_web, app, sock, shutdown=parts.over.wait)
            yield parts
        finally:
            if sock is not None:
                sock.close()
            parts.services.transactions.close()
            with trio.move_on_after(CLOSE_S, shield=True):
                await parts.locks.close()
                await parts.heartbeat.session.close()
                await parts.recorder.session.close()


def _listen(host: str, port: int) -> socket.socket:
    try:
        return open_listening_socket(host, port)
    except OSError as error:
        todo = "; choose another port with --port" if error.errno == errno.EADDRINUSE else ""
        raise AddressError(f"the service cannot listen at {host}:{port}: {error.strerror or error}{todo}") from error


def _app(parts: Parts) -> App:
    settings = parts.settings
    return create_app(
        Services(
            performer=parts.performer,
            tasks=parts.tasks,
            settings=WebSettings(
                tokens=tuple(Token.from_secret(t.name, t.role, t.token) for t in settings.tokens),
                public=PublicAddress.of(settings.public_url),
                environment=settings.environment,
                trusted_proxies=settings.trusted_proxies,
                max_body_bytes=settings.max_body_bytes,
                max_batch_body_bytes=settings.max_batch_body_bytes,
                max_connections=settings.max_connections,
                max_waits=settings.max_waits,
            ),
            state=parts.state,
            measures=parts.measures,
        )
    )

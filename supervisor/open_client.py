"""`open_client`: a client for programs that run no jobs, over the database or through a running service."""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, overload

import trio

from dataloader.jobs.client.client import Client
from dataloader.jobs.contract import Operator
from dataloader.jobs.errors import ConfigError
from dataloader.supervisor.settings import Settings

if TYPE_CHECKING:
    from dataloader.store.connection.options import DatabaseOptions


@overload
def open_client(dsn: str, *, operator: str | None = None) -> AbstractAsyncContextManager[Client]: ...


@overload
def open_client(*, url: str, token: str | None = None) -> AbstractAsyncContextManager[Client]: ...


def open_client(
    dsn: str | None = None, *, operator: str | None = None, url: str | None = None, token: str | None = None
) -> AbstractAsyncContextManager[Client]:
    """Open a client for the duration of a block: over the database, on Trio, or through a service, also on asyncio.

    The client connects at its first use. It runs no jobs and no steps of processes: use `open_supervisor` for that.

    Args:
        dsn: the address of the database, such as `postgresql://user:password@host/jobs`.
        operator: the name in the audit log; by default the account and the host.
        url: the address of a running service, used instead of `dsn`, such as `http://127.0.0.1:8080`.
        token: an API token of the service, if it has tokens; the audit log has the token's name.

    Raises:
        ConfigError: an address is not allowed, or `dsn` is used outside a Trio run.
    """
    if (dsn is None) == (url is None):
        raise ConfigError("open_client needs either dsn (of a database) or url (of a running service)")
    if url is not None:
        if operator is not None:
            raise ConfigError("operator: needs dsn; through a service, the token determines the operator")
        from dataloader.web.http_client import open_http_client  # noqa: PLC0415 - no driver is needed here

        return open_http_client(url, token)
    if token is not None:
        raise ConfigError("token: needs url")
    return _open_database_client(Settings(db_dsn=dsn), Operator(operator or account()))


@asynccontextmanager
async def _open_database_client(settings: Settings, operator: Operator) -> AsyncIterator[Client]:
    from dataloader.supervisor.database_client import (  # noqa: PLC0415 - the database driver is not needed over HTTP
        open_database_client,
    )

    if not trio.lowlevel.in_trio_task():
        raise ConfigError("dsn: needs a Trio run; with asyncio, use open_client(url=…) or dl_enqueue")
    options = client_options(settings, "dataloader client")
    async with open_database_client(options, operator, default_lease_s=settings.default_lease_s) as client:
        yield client


def client_options(settings: Settings, name: str) -> DatabaseOptions:
    """Return the connection options of a program that runs no jobs. `name` is shown in `pg_stat_activity`.

    Raises `ConfigError` if the settings name no database.
    """
    from dataloader.store.connection.options import DatabaseOptions  # noqa: PLC0415 - no driver is needed over HTTP

    if settings.db_dsn is None:
        raise ConfigError("DL_DB_DSN: is required: the address of the database")
    return DatabaseOptions(
        dsn=settings.db_dsn,
        direct_dsn=settings.direct_dsn,
        pool_size=settings.pool_size,
        connect_timeout_s=settings.connect_timeout_s,
        statement_timeout_s=settings.statement_timeout_s,
        name=name,
    )


def account() -> str:
    """Return `account@host` of this program, its name in the audit log."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a user ID without a name, as in containers
        user = str(os.geteuid())
    return f"{user}@{socket.gethostname()}"

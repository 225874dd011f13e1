"""`open_processes`: durable processes for programs that run none, by their database or through a running service."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import overload

import trio

from dataloader.jobs.contract import Operator
from dataloader.jobs.errors import ConfigError
from dataloader.jobs.process_contract import ProcessClient
from dataloader.supervisor.open_jobs import account, client_options
from dataloader.supervisor.settings import Settings


@overload
def open_processes(dsn: str, *, operator: str | None = None) -> AbstractAsyncContextManager[ProcessClient]: ...


@overload
def open_processes(*, url: str, token: str | None = None) -> AbstractAsyncContextManager[ProcessClient]: ...


def open_processes(
    dsn: str | None = None, *, operator: str | None = None, url: str | None = None, token: str | None = None
) -> AbstractAsyncContextManager[ProcessClient]:
    """Durable processes for the length of a block: by their database, on Trio, or through a service, also on asyncio.

    It connects at the first call, not before. It runs no steps: `open_supervisor` does that.

    Args:
        dsn: the address of the database, such as `postgresql://user:password@host/jobs`.
        operator: the name in the audit of what is done; by default the account and the host.
        url: the address of a running service instead, such as `http://127.0.0.1:8080`.
        token: an API token of the service, if it has tokens; the audit has the token's name.

    Raises:
        ConfigError: an address is not allowed, or `dsn` is used outside of a Trio run.
    """
    if (dsn is None) == (url is None):
        raise ConfigError("open_processes takes either dsn, the address of a database, or url, that of a service")
    if url is not None:
        if operator is not None:
            raise ConfigError("operator: can be given only with dsn; through a service the token says who acts")
        from dataloader.web.http_processes import open_http_processes  # noqa: PLC0415 - no driver is needed here

        return open_http_processes(url, token)
    if token is not None:
        raise ConfigError("token: can be given only with url")
    return _open_database_processes(Settings(db_dsn=dsn), Operator(operator or account()))


@asynccontextmanager
async def _open_database_processes(settings: Settings, operator: Operator) -> AsyncIterator[ProcessClient]:
    from dataloader.supervisor.listening_processes import open_database_processes  # noqa: PLC0415 - as above

    if not trio.lowlevel.in_trio_task():
        raise ConfigError("dsn: can be used only in a Trio run; on asyncio use open_processes(url=…)")
    options = client_options(settings, "dataloader client")
    async with open_database_processes(options, operator, default_lease_s=settings.default_lease_s) as processes:
        yield processes

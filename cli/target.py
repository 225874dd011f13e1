"""Target of a command: a running service (`--url`), the database of DL_DB_DSN, or the embedded one.

Commands use `@asks_queue`, which adds the options and passes an `AskedQueue`. `target.ask(question)` calls a function
with `Jobs`, `target.ask_client` one with the whole client. `provide_database` is for commands that need the database
itself.
"""

from __future__ import annotations

import functools
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

import attrs
import click
import trio

from dataloader.jobs.client.client import Client
from dataloader.jobs.client.jobs import Jobs
from dataloader.jobs.contract import Operator
from dataloader.jobs.error_groups import single_errors
from dataloader.jobs.errors import AccessDenied, ConfigError
from dataloader.jobs.listings import MAX_PAGE
from dataloader.supervisor.open_client import account, client_options
from dataloader.supervisor.settings import CLIENT_VARIABLE, Settings
from dataloader.supervisor.settings_layers import client_token, load_settings
from dataloader.supervisor.signals import obey

if TYPE_CHECKING:
    from dataloader.store.connection.options import DatabaseOptions
    from dataloader.store.embedded.postgres import EmbeddedPostgres

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

data_dir_option = click.option(
    "--data-dir",
    type=click.Path(path_type=Path),
    help="Directory of the embedded database, used without DL_DB_DSN.  [default: DL_DATA_DIR or .dataloader]",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")


@attrs.frozen
class AskedQueue:
    """Queue from the command line, with methods to use it."""

    url: str | None
    token: str | None = attrs.field(repr=False)
    data_dir: Path | None

    def ask(self, question: Callable[[Jobs], Awaitable[T]]) -> T:
        """Open the queue, call `question` with it, close it."""
        return self.ask_client(lambda client: question(client.jobs))

    def ask_client(self, question: Callable[[Client], Awaitable[T]]) -> T:
        """Call `question` with the whole client: of the service that was named, otherwise of the database."""
        if self.url is not None:
            token, named = (self.token, "--token") if self.token else (client_token(), CLIENT_VARIABLE)
            return run_trio(_ask_service, _open_http_client(self.url, token), question, named if token else None)
        with provide_database(load_settings(overrides={"data_dir": self.data_dir}), create=False) as settings:
            return run_trio(_ask_opened, open_client_of(settings), question)


async def all_rows(page_of: Callable[..., Awaitable[Any]], name: str) -> list[Any]:
    """Return the rows of all pages that `page_of` reads. A page has its rows as the attribute `name`."""
    page = await page_of(limit=MAX_PAGE)
    found = list(getattr(page, name))
    while page.next is not None:
        page = await page_of(limit=MAX_PAGE, after=page.next)
        found += getattr(page, name)
    return found


def _open_http_client(url: str, token: str | None) -> AbstractAsyncContextManager[Client]:
    from dataloader.web.http_client import open_http_client  # noqa: PLC0415 - a database needs no HTTP client

    return open_http_client(url, token)


@asynccontextmanager
async def open_client_of(settings: Settings) -> AsyncIterator[Client]:
    """Open a client of the settings' database for the duration of a block. The audit names the account."""
    from dataloader.supervisor.database_client import (  # noqa: PLC0415 - HTTP needs no driver
        open_database_client,
    )

    options, operator = command_options(settings), Operator(account())
    async with open_database_client(options, operator, default_lease_s=settings.default_lease_s) as client:
        yield client


def command_options(settings: Settings) -> DatabaseOptions:
    """Return the settings' connection options, with one connection. Raises `ConfigError` without a database."""
    return attrs.evolve(client_options(settings, "dataloader command"), pool_size=1)


def run_trio(operation: Callable[[*Ts], Awaitable[T]], *args: *Ts) -> T:
    """Run `operation` like `trio.run`. ^C cancels it, and is raised as `click.Abort` when everything is closed.

    If ^C were raised where it occurs, it could also interrupt the driver's C code, which then hangs or crashes.
    """
    try:
        results = trio.run(_until_interrupted, operation, *args)
    except BaseExceptionGroup as group:
        for error in single_errors(group):
            if isinstance(error, BrokenPipeError):  # the reader of our output has exited: click handles only this error
                raise error from None
        raise
    if not results:
        raise click.Abort from KeyboardInterrupt()
    return results[0]


async def _until_interrupted(operation: Callable[[*Ts], Awaitable[T]], *args: *Ts) -> list[T]:
    results = []
    with trio.open_signal_receiver(signal.SIGINT) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(obey, signals, lambda _name: nursery.cancel_scope.cancel())
            results.append(await operation(*args))
            nursery.cancel_scope.cancel()
    return results


async def _ask_opened(opening: AbstractAsyncContextManager[Client], question: Callable[[Client], Awaitable[T]]) -> T:
    async with opening as asked:
        return await question(asked)


async def _ask_service(
    opening: AbstractAsyncContextManager[Client], question: Callable[[Client], Awaitable[T]], token: str | None
) -> T:
    """Call `question` with the service. An error of the address or the token names its option or variable.

    `token` is the name of the option or variable that has set the token; None without a token.
    """
    try:
        return await _ask_opened(opening, question)
    except (ConfigError, AccessDenied) as error:
        field, _, text = str(error).partition(": ")
        if field != "token":
            raise type(error)(f"--{error}") from error
        if token is None:
            raise type(error)(f"{CLIENT_VARIABLE}: {text}; set {CLIENT_VARIABLE}, or pass --token") from error
        raise type(error)(f"{token}: {text}") from error


def asks_queue(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--url`, `--token`, `--data-dir` and `--json` to a command, which gets `target` first, `as_json` by name."""

    @json_option
    @data_dir_option
    @click.option("--token", help="API token for --url; preferably set by the variable.  [default: DL_TOKEN]")
    @click.option("--url", help="Use a running service, such as http://127.0.0.1:8080, instead of the database.")
    @functools.wraps(command)
    def with_target(*, url: str | None, token: str | None, data_dir: Path | None, **options: Any) -> Any:
        return command(AskedQueue(url, token, data_dir), **options)

    return with_target


@contextmanager
def provide_database(settings: Settings, *, create: bool) -> Iterator[Settings]:
    """Provide the settings with a database: unchanged, or with the embedded one. See `provide_server`."""
    with provide_server(settings, create=create) as (provided, _):
        yield provided


@contextmanager
def provide_server(settings: Settings, *, create: bool) -> Iterator[tuple[Settings, EmbeddedPostgres | None]]:
    """Provide the settings with a database, and the embedded server if used. It runs while it has users.

    Raises `ConfigError` if there is no database and `create` is false, so that a command in the wrong directory creates
    none there. Raises `EmbeddedDatabaseError` if it cannot be started.
    """
    if settings.db_dsn is not None:
        yield settings, None
        return
    from dataloader.store.embedded.data_dir import versions_in  # noqa: PLC0415 - most installations have another database
    from dataloader.store.embedded.postgres import embedded_postgres  # noqa: PLC0415

    if not create and not versions_in(settings.data_dir):
        raise ConfigError(
            f"DL_DB_DSN: is not set, and {settings.data_dir} has no embedded database; set it, or pass a running "
            "service as --url or a directory as --data-dir (`dataloader serve` creates one)"
        )
    with embedded_postgres(settings.data_dir) as server:
        yield attrs.evolve(settings, db_dsn=server.dsn), server

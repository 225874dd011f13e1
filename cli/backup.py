"""`backup` and `restore`, for the embedded database. Other servers have their own programs for both."""

from __future__ import annotations

import time
from pathlib import Path

import click

from dataloader.cli.output import print_json
from dataloader.cli.target import data_dir_option, json_option
from dataloader.jobs.errors import ConfigError
from dataloader.store.embedded.data_dir import versions_in
from dataloader.store.embedded.dump import back_up, check_backup
from dataloader.store.embedded.dump import restore as restore_database
from dataloader.store.embedded.postgres import embedded_postgres
from dataloader.supervisor.settings_layers import load_settings

MIB = 2**20


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@data_dir_option
@json_option
def backup_command(*, file: Path, data_dir: Path | None, as_json: bool) -> None:
    """Write the whole embedded database to FILE.

    FILE is a consistent snapshot; services keep running meanwhile. FILE appears when the backup is complete.
    Restore it with `dataloader restore FILE`.
    """
    directory = _directory(data_dir)
    versions = versions_in(directory)
    if not versions:
        raise ConfigError(f"--data-dir: {directory} has no embedded database")
    tables: list[str] = []
    began = time.monotonic()
    with embedded_postgres(directory, version=versions[0]) as server:
        size = back_up(server, file, tables.append)
    seconds = round(time.monotonic() - began, 1)
    if as_json:
        print_json({"file": str(file), "tables": len(tables), "bytes": size, "seconds": seconds})
    else:
        click.echo(f"{file}: {len(tables)} tables, {size / MIB:.1f} MiB in {seconds:g} s")


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--replace", is_flag=True, help="Replace the database if it is not empty.")
@data_dir_option
@json_option
def restore_command(*, file: Path, replace: bool, data_dir: Path | None, as_json: bool) -> None:
    """Restore the embedded database from FILE, which `backup` wrote.

    FILE is checked first. The data directory is created if it is missing. No process may use its database meanwhile.
    """
    directory = _directory(data_dir)
    tables: list[str] = []
    began = time.monotonic()
    check_backup(file)
    with embedded_postgres(directory) as server:
        restore_database(server, file, tables.append, replace=replace)
    seconds = round(time.monotonic() - began, 1)
    if as_json:
        print_json({"file": str(file), "data_dir": str(directory), "tables": len(tables), "seconds": seconds})
    else:
        click.echo(f"{directory}: {len(tables)} tables restored in {seconds:g} s")


def _directory(data_dir: Path | None) -> Path:
    settings = load_settings(overrides={"data_dir": data_dir})
    if settings.db_dsn is not None:
        raise ConfigError(
            "DL_DB_DSN: is set, but this command is only for the embedded database; use pg_dump and pg_restore of your"
            " server's version, or unset it"
        )
    return settings.data_dir

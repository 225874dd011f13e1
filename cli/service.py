"""Commands that run the service or show its configuration: `serve`, `tasks`, `config`."""

from __future__ import annotations

import faulthandler
from functools import partial
from pathlib import Path
from typing import Any, Final

import attrs
import click

from dataloader.cli.cells import Column
from dataloader.cli.entry import FAILED
from dataloader.cli.imports import few_collections
from dataloader.cli.output import print_json, print_table
from dataloader.cli.pipeline_options import as_variables, pipeline_options
from dataloader.cli.target import data_dir_option, json_option, provide_server
from dataloader.cli.task_module import load_tasks, path_option
from dataloader.jobs.error_groups import single_errors
from dataloader.jobs.errors import ConfigError, DataloaderError, EmbeddedDatabaseError
from dataloader.jobs.retry import RetryPolicy
from dataloader.jobs.secrets.masking import mask_address
from dataloader.jobs.tasks import Tasks
from dataloader.supervisor.settings import Settings, Worker
from dataloader.supervisor.settings_layers import explain, load_settings, unknown_variables

DEFAULT_QUEUE: Final = "default"
DEFAULT_CONCURRENCY: Final = 10
UNEXPECTED: Final = "ended by an unexpected error; running jobs are recovered when their leases expire"


@click.command()
@click.option("--tasks", "where", metavar="MODULE:ATTR", help="Tasks to run, such as my_module:tasks.")
@path_option
@click.option("--host", help="Address to listen on.  [default: DL_HOST or 127.0.0.1]")
@click.option("--port", type=int, help="Port to listen on; 0: a free port.  [default: DL_PORT or 8080]")
@click.option("--workers", metavar="JSON", help="Queues to serve.  [default: WORKERS_JSON]")
@click.option(
    "--drain-timeout", "drain_timeout_s", metavar="SECONDS", help="Maximum seconds that jobs continue after SIGTERM."
)
@click.option("--log-format", help="console, json or auto.")
@click.option("--log-level", help="debug, info, warning, error or critical.")
@pipeline_options
@data_dir_option
def serve_command(where: str | None, *, pipeline: dict[str, Any], **overrides: Any) -> int:
    """Run a service: the HTTP API and the jobs of its queues.

    Without WORKERS_JSON it serves the queue "default" and the queues of its tasks, ten concurrent jobs each; with an
    empty list it serves no queues. Without DL_DB_DSN it uses an embedded PostgreSQL in the data directory, started
    if necessary. --pipeline-… override DL_PIPELINE__… for loads that do not set their own values.

    SIGTERM or SIGINT drains it; a second signal stops its jobs immediately.
    """
    tasks = None if where is None else load_tasks(where)
    settings = load_settings(
        overrides=overrides | {"pipeline": as_variables(pipeline)},
        defaults={} if tasks is None else {"workers": _default_workers(tasks)},
    )
    if settings.workers and tasks is None:
        raise ConfigError("--tasks: is required, because WORKERS_JSON has queues to serve")
    return _run_service(settings, Tasks() if tasks is None else tasks)


def _default_workers(tasks: Tasks) -> tuple[Worker, ...]:
    own = {task.queue for task in tasks.values() if task.queue is not None}
    return tuple(Worker(queue, DEFAULT_CONCURRENCY) for queue in (DEFAULT_QUEUE, *sorted(own - {DEFAULT_QUEUE})))


def _run_service(settings: Settings, tasks: Tasks) -> int:
    with few_collections():
        import trio  # noqa: PLC0415 - `tasks` and `config` need neither this nor the whole supervisor

        from dataloader.jobs.logger import get_logger  # noqa: PLC0415
        from dataloader.supervisor.logs import configure_logging  # noqa: PLC0415
        from dataloader.supervisor.serve import serve as serve_until_drained  # noqa: PLC0415

    configure_logging(settings.log_format, settings.log_level)
    faulthandler.enable()  # prints the stack of a crash in native code
    log = get_logger(__name__)
    for warning in unknown_variables():
        log.warning(warning)
    if not settings.workers:
        log.warning("this process serves no queues, only the HTTP API")
    log.info("starting: waiting for the database")
    is_over = False
    try:
        with provide_server(settings, create=True) as (provided, server):
            if server is not None:
                data_dir = settings.data_dir.absolute()
                psql = f"dataloader psql --data-dir {data_dir}"
                log.info("embedded PostgreSQL started", data_dir=str(data_dir), psql=psql)
            try:
                return trio.run(partial(serve_until_drained, server=server), provided, tasks)
            except (Exception, BaseExceptionGroup) as error:
                if all(isinstance(single, DataloaderError | KeyboardInterrupt) for single in single_errors(error)):
                    raise
                log.critical(UNEXPECTED, exc_info=error)
                return FAILED
            finally:
                is_over = True
                if server is not None:
                    log.info("left the embedded PostgreSQL, which stops when no other process uses it")
    except KeyboardInterrupt:
        if is_over:
            log.warning("ended by a signal after the drain; an embedded PostgreSQL may still be running")
        raise


@click.command()
@click.option("--tasks", "where", metavar="MODULE:ATTR", required=True, help="Tasks, such as my_module:tasks.")
@path_option
@json_option
def tasks_command(*, where: str, as_json: bool) -> None:
    """List the tasks of a module, with their options."""
    rows = [
        {
            "name": task.name,
            "description": task.description,
            "kind": task.kind,
            "args": None if task.args is None else task.args.name,
            "queue": task.queue,
            "priority": task.priority,
            "lock_key": task.lock_key,
            "timeout_s": task.timeout_s,
            "max_attempts": task.max_attempts,
            "lease_ttl_sec": task.lease_ttl_sec,
            "retry": _retry_text(task.retry),
        }
        for task in load_tasks(where).values()
    ]
    if as_json:
        print_json(rows)
    else:
        columns = {
            "name": Column("NAME"),
            "kind": Column("KIND", rank=3),
            "args": Column("ARGS", rank=4),
            "queue": Column("QUEUE", rank=2),
            "lock_key": Column("LOCK_KEY", rank=3),
            "timeout_s": Column("TIMEOUT_S", rank=2),
            "max_attempts": Column("MAX_ATTEMPTS", rank=2),
            "retry": Column("RETRY", least=25, rank=4),
            "description": Column("DESCRIPTION", least=35),
        }
        print_table(list(columns.values()), ([row[name] for name in columns] for row in rows), nothing="no tasks")


def _retry_text(retry: RetryPolicy) -> str:
    growth = "× attempt" if retry.factor is None else f"× {retry.factor:g} ^ (attempt - 1)"
    final = f", never after {', '.join(error.__name__ for error in retry.final)}" if retry.final else ""
    return f"{retry.base_s:g} s {growth}, at most {retry.cap_s:g} s, + {retry.jitter:.0%}{final}"


@click.command()
@data_dir_option
@json_option
def config_command(*, data_dir: Path | None, as_json: bool) -> None:
    """Show all settings with their values and sources.

    Secrets are masked. If DL_DB_DSN is not set, its value is the address of the running embedded database.
    """
    overrides = {"data_dir": data_dir}
    rows = explain(overrides=overrides)
    if address := _embedded_address(load_settings(overrides=overrides)):
        rows = [attrs.evolve(row, value=address, source="embedded") if row.name == "DL_DB_DSN" else row for row in rows]
    if as_json:
        print_json(rows, is_masked=True)
    else:
        print_table(
            (Column("NAME"), Column("VALUE", folds=True), Column("SOURCE")),
            ((row.name, row.value, row.source) for row in rows),
            nothing="no settings",
        )
    for warning in unknown_variables():
        click.echo(warning, err=True)


def _embedded_address(settings: Settings) -> str | None:
    """Return the address of the embedded database, its password masked; None if it is not used or does not run."""
    from dataloader.store.embedded.postgres import running_server  # noqa: PLC0415 - most installations have another database

    if settings.db_dsn is not None:
        return None
    try:
        server = running_server(settings.data_dir)
    except (
        EmbeddedDatabaseError,
        ConfigError,
    ):  # it is another user's, or the extra is missing: the settings are shown anyway
        return None
    return None if server is None else mask_address(server.dsn)

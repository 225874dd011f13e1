"""Command `demo`: the whole service on real data.

program.py has the work, run as a guest of the usual `serve`, so that ^C drains here too. Progress and log lines are
written to stderr, on a terminal through one rich console, so that they do not mix. The results are written to stdout.
"""

from __future__ import annotations

import logging
import socket
import sys
from functools import partial
from pathlib import Path
from typing import Final

import click

from dataloader.cli.demo.program import WORKERS, DemoRun, load
from dataloader.cli.demo.results import print_results
from dataloader.cli.demo.screen import open_demo_screen
from dataloader.cli.demo.tasks import tasks
from dataloader.cli.entry import FAILED
from dataloader.cli.target import data_dir_option, json_option, provide_server
from dataloader.jobs.error_groups import first_error
from dataloader.jobs.errors import Draining, StoreUnavailable
from dataloader.supervisor.settings import Settings
from dataloader.supervisor.settings_layers import load_settings
from dataloader.supervisor.supervisor import Supervisor

ETL = "dataloader.flows.etl"
"""Logger of loads, which write four lines per year; the demo writes one."""
USUAL_PORT: Final = 8080


@click.command()
@click.option("--keep", is_flag=True, help="Keep the service running afterwards, until ^C.")
@click.option("--port", type=int, help="Port to listen on.  [default: DL_PORT, or 8080, or a free port]")
@data_dir_option
@json_option
def demo_command(*, keep: bool, port: int | None, data_dir: Path | None, as_json: bool) -> int:
    """Load the European Central Bank's exchange rates since 1999.

    Starts the embedded PostgreSQL and the whole service, triggers one job per year over HTTP, and checks the table
    `ecb_rate` against the file. A second run finds all rows unchanged. Needs no network.
    """
    import trio  # noqa: PLC0415 - not for --help

    from dataloader.supervisor.logs import configure_logging  # noqa: PLC0415
    from dataloader.supervisor.serve import serve  # noqa: PLC0415

    given = load_settings(
        overrides={"data_dir": data_dir, "port": port}, defaults={"port": USUAL_PORT if _is_free(USUAL_PORT) else 0}
    )
    # Never use DL_DB_DSN: a demo must not write to a real database.
    settings = Settings(data_dir=given.data_dir, workers=WORKERS, port=given.port)
    data_dir = given.data_dir
    run = DemoRun()
    screen = open_demo_screen()
    with screen:
        # Log lines with the same content would push the bars away.
        configure_logging("console", "warning" if sys.stderr.isatty() else "info")
        logging.getLogger(ETL).setLevel(logging.WARNING)

        async def guest(supervisor: Supervisor) -> None:
            url = str(supervisor.url)

            async def tell_of_drain() -> None:
                await supervisor.wait_draining()
                screen.draining()

            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(tell_of_drain)
                    await load(url, run, screen)
                    nursery.cancel_scope.cancel()
            except* (StoreUnavailable, Draining) as group:  # after ^C the service accepts no new jobs
                click.echo(str(first_error(group)), err=True)
            if keep and run.is_over:
                screen.stop()
                configure_logging("console", "info")
                logging.getLogger(ETL).setLevel(logging.NOTSET)
                print_results(run, as_json=as_json)
                _print_addresses(url, data_dir)
            else:
                supervisor.request_drain()

        with provide_server(settings, create=True) as (provided, server):
            code = trio.run(partial(serve, server=server), provided, tasks, guest)
    if not (keep and run.is_over):
        print_results(run, as_json=as_json)
    return code if run.is_right else code or FAILED


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _print_addresses(url: str, data_dir: Path) -> None:
    addresses = {
        "pages": f"{url}/ui",
        "API": f"{url}/docs",
        "status": f"{url}/status",
        "metrics": f"{url}/metrics",
        "jobs": f"dataloader jobs --url {url}",
        "table": f"dataloader psql --data-dir {data_dir.absolute()} -c 'table ecb_rate limit 10'",
    }
    click.echo("\nserving until ^C:", err=True)
    for name, address in addresses.items():
        click.echo(f"  {name:<8} {address}", err=True)

"""The command `demo`: the whole service on real data, and how that looks.

What happens is in cli/demo/program.py, run as a guest of the same `serve` that everybody runs, so that ^C drains here
too. Progress and log lines go to stderr, through one rich console on a terminal, so that neither writes into the other;
the results go to stdout.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import click

from dataloader.cli.demo.program import WORKERS, Load, Watcher, count_of, load, queue_of, year_of
from dataloader.cli.demo.tasks import Contents, tasks
from dataloader.cli.entry import FAILED
from dataloader.cli.output import Column, cell, print_json, print_table
from dataloader.cli.target import data_dir_option, json_option, provide_server
from dataloader.jobs.error_groups import first_error
from dataloader.jobs.errors import StoreUnavailable
from dataloader.jobs.model import JobRecord
from dataloader.jobs.states import Status
from dataloader.supervisor.settings import Settings
from dataloader.supervisor.settings_layers import load_settings
from dataloader.supervisor.supervisor import Supervisor

COUNTS = ("inserted", "updated", "unchanged")
ETL = "dataloader.flows.etl"
"""The logger of loads, which say in four lines a year what the demo says in one."""


@click.command()
@click.option("--keep", is_flag=True, help="Go on serving afterwards, until ^C.")
@data_dir_option
@json_option
def demo(*, keep: bool, data_dir: Path | None, as_json: bool) -> int:
    """Load the European Central Bank's exchange rates since 1999.

    On a PostgreSQL of its own: starts the embedded database and the whole service, triggers one job for each year
    by HTTP, and checks the table
    `ecb_rate` against the file. The second run finds everything unchanged. Needs no network.
    """
    import trio  # noqa: PLC0415 - not for --help

    from dataloader.supervisor.logs import configure_logging  # noqa: PLC0415
    from dataloader.supervisor.serve import serve  # noqa: PLC0415

    # Never DL_DB_DSN or a fixed port: a demo must not write into a real database, or fail beside a real service.
    data_dir = load_settings(overrides={"data_dir": data_dir}).data_dir
    settings = Settings(data_dir=data_dir, workers=WORKERS, port=0)
    run = Load()
    screen = _screen()
    with screen:
        # Lines about what the bars show would bury them.
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
            except* StoreUnavailable as group:  # after ^C the service takes no new jobs
                click.echo(str(first_error(group)), err=True)
            if keep and run.is_over:
                screen.stop()
                configure_logging("console", "info")
                logging.getLogger(ETL).setLevel(logging.NOTSET)
                _print_results(run, as_json=as_json)
                _print_addresses(url, data_dir)
            else:
                supervisor.request_drain()

        with provide_server(settings, create=True) as (provided, server):
            code = trio.run(partial(serve, server=server), provided, tasks, guest)
    if not (keep and run.is_over):
        _print_results(run, as_json=as_json)
    return code if run.is_right else code or FAILED


class _Screen(Watcher, Protocol):
    """Shows the load while it goes on, for the length of a block; `stop` ends that earlier.

    `draining` is called when ^C has come.
    """

    def __enter__(self) -> object: ...
    def __exit__(self, *_: object) -> None: ...
    def stop(self) -> None: ...
    def draining(self) -> None: ...


def _screen() -> _Screen:
    return _Bars() if sys.stderr.isatty() else _Lines()


class _Lines(_Screen):
    """A line for each year that ends, where nobody watches."""

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, *_: object) -> None:
        """Nothing to clean up."""

    def stop(self) -> None:
        """Nothing to end."""

    def draining(self) -> None:
        """The log says it."""

    def began(self, contents: Contents, *, left: int) -> None:
        """Say what is to come."""
        click.echo(_plan(contents, left), err=True)

    def changed(self, job: JobRecord) -> None:
        """Say how a year ended."""
        if job.status.is_final:
            click.echo(f"{year_of(job)}  {job.status}  {_seconds(job)} s", err=True)


class _Bars(_Screen):
    """A bar for each queue, with the years that run, and one for all rates."""

    def __init__(self) -> None:
        from rich.console import Console  # noqa: PLC0415 - only where there is a terminal
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

        # While it is shown sys.stderr goes through it: log lines come above the bars.
        self._progress = Progress(
            TextColumn("{task.description:<11}"),
            BarColumn(bar_width=30),
            TextColumn("{task.completed:>7,.0f} / {task.total:<7,.0f}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[running]}"),
            console=Console(stderr=True, highlight=False),
        )
        self._rates: Any = None
        self._queues: dict[str, Any] = {}
        self._contents = Contents(Counter(), Decimal())
        self._jobs: dict[object, JobRecord] = {}

    def __enter__(self) -> None:
        """Begin to show."""
        self._progress.start()

    def __exit__(self, *_: object) -> None:
        """Show no more."""
        self._progress.stop()

    def stop(self) -> None:
        """Leave the bars as they are."""
        self._progress.stop()

    def draining(self) -> None:
        """Say it above the bars."""
        self._progress.console.print("draining: no new jobs are taken; those that run are finished or go back")

    def began(self, contents: Contents, *, left: int) -> None:
        """Draw the bars."""
        self._progress.console.print(_plan(contents, left))
        self._contents = contents
        for queue, years in Counter(map(queue_of, contents.rates)).items():
            self._queues[queue] = self._progress.add_task(queue, total=years, running="")
        self._rates = self._progress.add_task("rates", total=contents.rates.total(), running="")

    def changed(self, job: JobRecord) -> None:
        """Move the bars."""
        self._jobs[job.job_id] = job
        queue = [job_ for job_ in self._jobs.values() if job_.queue == job.queue]
        running = sorted(year_of(job_) for job_ in queue if job_.status is Status.RUNNING)
        self._progress.update(
            self._queues[job.queue],
            completed=sum(job_.status.is_final for job_ in queue),
            running=" ".join(map(str, running)),
        )
        self._progress.update(self._rates, completed=sum(map(self._done, self._jobs.values())))

    def _done(self, job: JobRecord) -> int:
        if job.status is Status.SUCCEEDED:
            return self._contents.rates[year_of(job)]
        return int(job.progress.get("rows", 0)) if job.status is Status.RUNNING else 0


def _plan(contents: Contents, left: int) -> str:
    slots = ", ".join(f"{worker.concurrency} × {worker.queue}" for worker in WORKERS)
    text = f"{contents.rates.total():,} rates in {len(contents.rates)} jobs, one a year\nworkers: {slots}"
    return f"{text}\n{left} of the jobs were left in the queue by a run before" if left else text


def _seconds(job: JobRecord) -> str:
    if job.started_at is None or job.finished_at is None:
        return ""
    return f"{(job.finished_at - job.started_at).total_seconds():.2f}"


def _print_results(run: Load, *, as_json: bool) -> None:
    if as_json:
        print_json(_as_json(run))
    elif run.years:
        rows = [_row(job) for _, job in sorted(run.years.items())]
        succeeded = sum(job.status is Status.SUCCEEDED for job in run.years.values())
        totals = (f"{run.total(count):>9,}" for count in COUNTS)
        rows.append(("all", f"{succeeded} succeeded", "", *totals, f"{run.seconds:>7.2f}"))
        names = ("YEAR", "STATUS", "ATTEMPT", *(f"{name.upper():>9}" for name in COUNTS), "SECONDS")
        print_table(list(map(Column, names)), rows, nothing="")
    errors = [job for job in run.years.values() if job.error is not None]
    if run.failed is not None and run.failed not in errors:
        errors.append(run.failed)
    for job in errors:
        summary = (job.error or "").partition("\n")[0]
        click.echo(f"{job.task} {job.args.get('from', '')[:4]}: {cell(summary)}", err=True)
    if not as_json:
        click.echo(_verdict(run))


def _row(job: JobRecord) -> tuple[str, ...]:
    counts = ("" if (number := count_of(job, count)) is None else f"{number:>9,}" for count in COUNTS)
    return str(year_of(job)), str(job.status), str(job.attempt), *counts, f"{_seconds(job):>7}"


def _verdict(run: Load) -> str:
    if run.check is None or run.contents is None:
        done = sum(job.status is Status.SUCCEEDED for job in run.years.values())
        return (
            f"not finished: {done} years are loaded; jobs that wait in the queue are done by the next run"
            if run.failed is None
            else f"failed: job {run.failed.job_id} ({run.failed.task}) is {run.failed.status}"
        )
    return (
        f"file:   {run.contents.rates.total():,} rates that add up to {run.contents.sum:,}\n"
        f"table:  {run.check['rates']:,} rates that add up to {Decimal(run.check['sum'] or 0):,}\n"
        f"check:  {'equal' if run.is_right else 'NOT EQUAL'}"
    )


def _as_json(run: Load) -> dict[str, Any]:
    return {
        "run_id": run.run_id,
        "ok": run.is_right,
        "seconds": round(run.seconds, 3),
        "jobs": [_job_as_json(job) for _, job in sorted(run.years.items())],
        "total": {count: run.total(count) for count in COUNTS},
        "file": None if run.contents is None else {"rates": run.contents.rates.total(), "sum": str(run.contents.sum)},
        "table": run.check,
    }


def _job_as_json(job: JobRecord) -> dict[str, Any]:
    seconds = _seconds(job)
    return {
        "year": year_of(job),
        "job_id": job.job_id,
        "status": job.status,
        "attempt": job.attempt,
        **{count: count_of(job, count) for count in COUNTS},
        "seconds": float(seconds) if seconds else None,
        "error": job.error,
    }


def _print_addresses(url: str, data_dir: Path) -> None:
    addresses = {
        "API": f"{url}/docs",
        "status": f"{url}/status",
        "metrics": f"{url}/metrics",
        "jobs": f"dataloader jobs --url {url}",
        "table": f"dataloader psql --data-dir {data_dir.absolute()} -c 'table ecb_rate limit 10'",
    }
    click.echo("\nserving until ^C:", err=True)
    for name, address in addresses.items():
        click.echo(f"  {name:<8} {address}", err=True)

"""Display of the running demo, on stderr: bars for its queues on a terminal, otherwise a line for each year."""

from __future__ import annotations

import sys
from collections import Counter
from decimal import Decimal
from typing import Any, Protocol

import click

from dataloader.cli.demo.program import WORKERS, Watcher, queue_of, year_of
from dataloader.cli.demo.results import seconds_of
from dataloader.cli.demo.tasks import Contents
from dataloader.jobs.model import JobRecord
from dataloader.jobs.states import Status


class Screen(Watcher, Protocol):
    """Shows the progress of the load for the duration of a block; `stop` ends it earlier.

    `draining` is called after ^C.
    """

    def __enter__(self) -> object: ...
    def __exit__(self, *_: object) -> None: ...
    def stop(self) -> None:
        """End the display."""

    def draining(self) -> None:
        """Report that ^C was received."""


def open_demo_screen() -> Screen:
    """Return bars on a terminal, otherwise lines."""
    return Bars() if sys.stderr.isatty() else Lines()


class Lines(Screen):
    """Prints a line for each year that ends, if there is no terminal."""

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, *_: object) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Do nothing."""

    def draining(self) -> None:
        """Do nothing: the log reports it."""

    def began(self, contents: Contents, *, left: int) -> None:
        """Print the plan."""
        click.echo(_plan_text(contents, left), err=True)

    def changed(self, job: JobRecord) -> None:
        """Print the end of a year."""
        if job.status.is_final:
            click.echo(f"{year_of(job)}  {job.status}  {seconds_of(job)} s", err=True)


class Bars(Screen):
    """Shows a bar for each queue, with the running years, and one for all rates."""

    def __init__(self) -> None:
        from rich.console import Console  # noqa: PLC0415 - only with a terminal
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

        # While it is shown, sys.stderr is written through it, so log lines are above the bars.
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
        """Begin the display."""
        self._progress.start()

    def __exit__(self, *_: object) -> None:
        """End the display."""
        self._progress.stop()

    def stop(self) -> None:
        """End the display and keep the bars on the screen."""
        self._progress.stop()

    def draining(self) -> None:
        """Print a line above the bars."""
        self._progress.console.print("draining: no new jobs are claimed; running jobs finish or are released")

    def began(self, contents: Contents, *, left: int) -> None:
        """Draw the bars."""
        self._progress.console.print(_plan_text(contents, left))
        self._contents = contents
        for queue, years in Counter(map(queue_of, contents.rates)).items():
            self._queues[queue] = self._progress.add_task(queue, total=years, running="")
        self._rates = self._progress.add_task("rates", total=contents.rates.total(), running="")

    def changed(self, job: JobRecord) -> None:
        """Update the bars."""
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


def _plan_text(contents: Contents, left: int) -> str:
    slots = ", ".join(f"{worker.concurrency} × {worker.queue}" for worker in WORKERS)
    text = f"{contents.rates.total():,} rates in {len(contents.rates)} jobs, one per year\nworkers: {slots}"
    return f"{text}\n{left} of the jobs are still queued from an earlier run" if left else text

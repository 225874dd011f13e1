"""Results of a run of the demo, on stdout: a table or a JSON document, and whether the table equals the file."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import click

from dataloader.cli.cells import Column, cell
from dataloader.cli.demo.program import DemoRun, count_in_result, year_of
from dataloader.cli.output import print_json, print_table
from dataloader.jobs.model import JobRecord
from dataloader.jobs.states import Status

COUNTS = ("inserted", "updated", "unchanged")


def print_results(run: DemoRun, *, as_json: bool) -> None:
    """Print a row for each year, the errors, and whether the table equals the file; or all of it as JSON."""
    if as_json:
        print_json(_as_json(run))
    elif run.years:
        rows = [_year_row(job) for _, job in sorted(run.years.items())]
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


def _year_row(job: JobRecord) -> tuple[str, ...]:
    counts = ("" if (number := count_in_result(job, count)) is None else f"{number:>9,}" for count in COUNTS)
    return str(year_of(job)), str(job.status), str(job.attempt), *counts, f"{seconds_of(job):>7}"


def _verdict(run: DemoRun) -> str:
    if run.check is None or run.contents is None:
        done = sum(job.status is Status.SUCCEEDED for job in run.years.values())
        return (
            f"not finished: {done} years are loaded; the next run completes the queued jobs"
            if run.failed is None
            else f"failed: job {run.failed.job_id} ({run.failed.task}) is {run.failed.status}"
        )
    return (
        f"file:   {run.contents.rates.total():,} rates with the sum {run.contents.sum:,}\n"
        f"table:  {run.check['rates']:,} rates with the sum {Decimal(run.check['sum'] or 0):,}\n"
        f"check:  {'equal' if run.is_right else 'NOT EQUAL'}"
    )


def _as_json(run: DemoRun) -> dict[str, Any]:
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
    seconds = seconds_of(job)
    return {
        "year": year_of(job),
        "job_id": job.job_id,
        "status": job.status,
        "attempt": job.attempt,
        **{count: count_in_result(job, count) for count in COUNTS},
        "seconds": float(seconds) if seconds else None,
        "error": job.error,
    }


def seconds_of(job: JobRecord) -> str:
    """Return the duration of the job's last run; empty before it has ended."""
    if job.run_started_at is None or job.finished_at is None:
        return ""
    return f"{(job.finished_at - job.run_started_at).total_seconds():.2f}"

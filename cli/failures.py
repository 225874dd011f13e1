"""Commands for failures: groups of jobs by their error, the retry of a group, and the log of errors."""

from __future__ import annotations

import sys
from datetime import datetime
from typing import Any, Final, get_args
from uuid import UUID

import click

from dataloader.cli.arguments import instant_after_now
from dataloader.cli.cells import Column
from dataloader.cli.entry import Group
from dataloader.cli.output import first_line, print_json, print_table
from dataloader.cli.target import AskedQueue, asks_queue
from dataloader.jobs.client.jobs import Jobs
from dataloader.jobs.errors import NotFound
from dataloader.jobs.failures import FailureState
from dataloader.jobs.listings import JobFilter

_GROUPS: Final = (
    Column("GROUP"),
    Column("JOBS"),
    Column("WAITING"),
    Column("TASK", least=24),
    Column("NEWEST", rank=1),
    Column("ERROR", least=20),
)
_LOG: Final = (
    Column("ENTRY", rank=3),
    Column("AT"),
    Column("JOB"),
    Column("TASK", least=10),
    Column("ATTEMPT", rank=2),
    Column("THEN", rank=1),
    Column("ERROR", least=30),
)
_state_option = click.option(
    "--state",
    type=click.Choice(get_args(FailureState)),
    help="Only jobs that wait for a retry, or only jobs that failed for good.",
)
_limit_option = click.option(
    "--limit",
    type=click.IntRange(1, 1000),
    metavar="NUMBER",
    default=50,
    show_default=True,
    help="Maximum number of rows.",
)
_after_option = click.option("--after", help="Cursor printed by the previous page.")


@click.group(cls=Group)
def errors_command() -> None:
    """List failed jobs by error, and retry them."""


@errors_command.command("list")
@click.option("--task", help="Only jobs of this task.")
@_state_option
@click.option("--exact", is_flag=True, help="Group by the exact first line, including numbers and quoted texts.")
@_limit_option
@_after_option
@asks_queue
def errors_list_command(target: AskedQueue, *, as_json: bool, **wanted: Any) -> None:
    """Count the jobs that failed for good or wait for a retry, by task and error.

    Quoted texts are replaced by … and words with digits by #. List the jobs of a group: jobs --error-group GROUP.
    """
    page = target.ask(lambda jobs: jobs.error_groups(**wanted))
    if as_json:
        print_json(page)
        return
    print_table(
        _GROUPS,
        ((one.group, one.jobs, one.waiting, one.task, one.last_created_at, one.error) for one in page.groups),
        nothing="no errors",
    )
    if page.next is not None:
        click.echo(f"more: --after {page.next}", err=True)


@errors_command.command("retry")
@click.argument("group")
@click.option(
    "--at",
    type=instant_after_now,
    metavar="TIMESTAMP",
    help="Start: a timestamp, or 15m, 2h, 7d from now.  [default: now]",
)
@click.option("--spread", "spread_s", type=float, default=0, metavar="SECONDS", help="Spread the jobs over this time.")
@_state_option
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@asks_queue
def errors_retry_command(
    target: AskedQueue,
    *,
    group: str,
    at: datetime | None,
    spread_s: float,
    state: FailureState | None,
    yes: bool,
    as_json: bool,
) -> None:
    """Retry all jobs of GROUP, now or later.

    Jobs that failed for good start again from attempt 0. For jobs that wait for a retry, the next attempt is moved.
    """
    if not yes:
        if not sys.stdin.isatty():
            raise click.UsageError("confirmation needs a terminal; pass --yes")
        click.confirm(f"retry all jobs of the group {group}?", abort=True, err=True)

    async def question(jobs: Jobs) -> int:
        count = await jobs.retry_group(group, at=at, spread_s=spread_s, state=state)
        if not count and not (await jobs.find(JobFilter(error_group=group), limit=1)).jobs:
            raise NotFound(f"no job of the group {group!r} failed or waits for a retry")
        return count

    count = target.ask(question)
    if as_json:
        print_json({"changed": count})
    else:
        click.echo(f"{count} {'job' if count == 1 else 'jobs'}")


@errors_command.command("log")
@click.option("--task", help="Only errors of this task.")
@click.option("--queue", help="Only errors of this queue.")
@click.option("--group", help="Only errors of this group.")
@click.option("--job", "job_id", type=click.UUID, metavar="JOB_ID", help="Only errors of this job.")
@_limit_option
@_after_option
@asks_queue
def errors_log_command(target: AskedQueue, *, job_id: UUID | None, as_json: bool, **wanted: Any) -> None:
    """Read the log of errors, latest first: a row per failed run, including those of deleted jobs."""
    page = target.ask(lambda jobs: jobs.errors(job_id=job_id, **wanted))
    if as_json:
        print_json(page)
        return
    print_table(
        _LOG,
        (
            (one.error_id, one.at, one.job_id, one.task, one.attempt, one.status, first_line(one.error))
            for one in page.errors
        ),
        nothing="no errors",
    )
    if page.next is not None:
        click.echo(f"more: --after {page.next}", err=True)

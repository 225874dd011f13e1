"""Commands for bulk operations, which continue without the command: start, show and stop them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final
from uuid import UUID

import click

from dataloader.cli.arguments import finds_jobs
from dataloader.cli.cells import Column, cell
from dataloader.cli.entry import Group
from dataloader.cli.output import print_json, print_table
from dataloader.cli.target import AskedQueue, asks_queue
from dataloader.jobs.bulk_listings import NOT_TYPED, BulkCount, BulkRecord, Chosen
from dataloader.jobs.contract import Change
from dataloader.jobs.ids import uuid7
from dataloader.jobs.listings import EVERY_JOB, JobFilter
from dataloader.jobs.model import MAX_INT

CANCEL: Final = Change(action="cancel")
_BULK: Final = (
    Column("ID"),
    Column("ACT"),
    Column("STATE"),
    Column("JOBS"),
    Column("DONE"),
    Column("CHANGED"),
    Column("BEGAN", rank=1),
    Column("BY", least=6, rank=2),
)


@click.group(cls=Group)
def bulk_command() -> None:
    """Change many jobs by a bulk operation of the service.

    It continues after the command has ended. It changes the jobs that match when it begins, in batches of 500. See
    `bulk show`, `bulk stop`.
    """


def _begins(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add job IDs or a filter to a command."""
    for decorate in (
        asks_queue,
        click.option("--yes", is_flag=True, help="Do not ask for confirmation."),
        finds_jobs,
        click.argument("job_ids", nargs=-1, type=click.UUID, metavar="[JOB_ID]..."),
    ):
        command = decorate(command)
    return command


@bulk_command.command("cancel")
@_begins
def bulk_cancel_command(target: AskedQueue, **chosen: Any) -> None:
    """Cancel the jobs with these IDs, or all that match a filter."""
    _begin(target, CANCEL, "cancel", **chosen)


@bulk_command.command("retry")
@_begins
def bulk_retry_command(target: AskedQueue, **chosen: Any) -> None:
    """Queue failed, canceled and lost jobs again, each once, from attempt 0."""
    _begin(target, Change(action="retry"), "retry", **chosen)


@bulk_command.command("run-now")
@_begins
def bulk_run_now_command(target: AskedQueue, **chosen: Any) -> None:
    """Make delayed jobs due now."""
    _begin(target, Change(action="run_now"), "run now", **chosen)


@bulk_command.command("priority")
@click.argument("number", type=click.IntRange(0, MAX_INT), metavar="NUMBER")
@_begins
def bulk_priority_command(target: AskedQueue, *, number: int, **chosen: Any) -> None:
    """Set the priority of queued jobs to NUMBER. Smaller numbers run first; 100 is the default."""
    _begin(target, Change(action="set_priority", priority=number), f"set priority {number} for", **chosen)


def _begin(
    target: AskedQueue,
    change: Change,
    verb: str,
    *,
    job_ids: tuple[UUID, ...],
    wanted: JobFilter,
    yes: bool,
    as_json: bool,
) -> None:
    if bool(job_ids) == (wanted != EVERY_JOB):
        raise click.UsageError("give either JOB_IDs or a filter such as --queue or --status")
    chosen: Chosen = list(job_ids) if job_ids else wanted
    if not yes and not sys.stdin.isatty():
        raise click.UsageError("confirmation needs a terminal; pass --yes")
    most = None
    if change == CANCEL:
        tell_what_is_left_out(target, chosen)
    if not yes:
        counted = target.ask_client(lambda client: client.bulk.count(change, chosen))
        _confirm(counted, verb)
        most = max(counted.jobs, NOT_TYPED) if counted.exact else None
    bulk_id = uuid7()
    record = target.ask_client(lambda client: client.bulk.start(change, chosen, bulk_id=bulk_id, most=most))
    if as_json:
        print_json(record)
    else:
        click.echo(f"{record.bulk_id}  {_number_of_jobs(record.jobs)}")


def tell_what_is_left_out(target: AskedQueue, chosen: Chosen) -> None:
    """Print the number of jobs that a bulk cancel leaves out, if there are any."""
    counted = target.ask_client(lambda client: client.bulk.count(CANCEL, chosen))
    if counted.leaves_out:
        click.echo(counted.leaves_out, err=True)


def _confirm(counted: BulkCount, verb: str) -> None:
    number = _number_of_jobs(counted.jobs) if counted.exact else f"at least {_number_of_jobs(counted.jobs)}"
    if counted.exact and counted.jobs <= NOT_TYPED:
        click.confirm(f"{verb} {number}?", abort=True, err=True)
        return
    typed = click.prompt(f"{verb} {number}? Type the number to continue", err=True)
    if typed.replace(",", "").strip() != str(counted.jobs):
        raise click.Abort


def _number_of_jobs(number: int) -> str:
    return f"{number:,} {'job' if number == 1 else 'jobs'}"


@bulk_command.command("list")
@click.option(
    "--limit", type=click.IntRange(1, 500), default=20, show_default=True, help="Maximum number of bulk operations."
)
@asks_queue
def bulk_list_command(target: AskedQueue, *, limit: int, as_json: bool) -> None:
    """List bulk operations, latest first."""
    found = target.ask_client(lambda client: client.bulk.find(limit=limit)).bulk
    if as_json:
        print_json(found)
        return
    print_table(
        _BULK,
        (
            (one.bulk_id, one.action, one.state, one.jobs, one.done, one.changed, one.created_at, one.actor)
            for one in found
        ),
        nothing="no bulk operations",
    )


@bulk_command.command("show")
@click.argument("bulk_id", type=click.UUID, metavar="ID")
@asks_queue
def bulk_show_command(target: AskedQueue, *, bulk_id: UUID, as_json: bool) -> None:
    """Show the bulk operation ID and its progress."""
    _print_bulk_operation(target.ask_client(lambda client: client.bulk.get(bulk_id)), as_json=as_json)


@bulk_command.command("stop")
@click.argument("bulk_id", type=click.UUID, metavar="ID")
@asks_queue
def bulk_stop_command(target: AskedQueue, *, bulk_id: UUID, as_json: bool) -> None:
    """Stop the bulk operation ID. Jobs that it has changed stay changed."""
    _print_bulk_operation(target.ask_client(lambda client: client.bulk.stop(bulk_id)), as_json=as_json)


def _print_bulk_operation(record: BulkRecord, *, as_json: bool) -> None:
    if as_json:
        print_json(record)
        return
    for label, value in (
        ("id", record.bulk_id),
        ("act", record.action),
        ("priority", record.priority),
        ("filter", record.filter),
        ("state", record.state),
        ("jobs", record.jobs),
        ("done", record.done),
        ("changed", record.changed),
        ("by", record.actor),
        ("began", record.created_at),
        ("ended", record.ended_at),
        ("stopped by", record.stopped_by),
        ("error", record.error),
    ):
        if value is not None:
            click.echo(f"{label:10} {cell(value)}")

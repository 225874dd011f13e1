"""Commands that read durable processes: lists, one process, its events and tasks, groups of errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, get_args

import click

from dataloader.cli.arguments import json_object
from dataloader.cli.cells import Column, cell
from dataloader.cli.output import first_line, print_fields, print_json, print_table
from dataloader.cli.target import AskedQueue, asks_queue
from dataloader.jobs.process_listings import ProcessFilter, ProcessRecord, ProcessStatus

_PROCESSES: Final = (
    Column("TYPE", rank=1),
    Column("PROCESS", least=12),
    Column("STATUS"),
    Column("SINCE", rank=2),
    Column("TIMER", rank=3),
    Column("METADATA", least=12, rank=4),
    Column("DETAIL", least=12, rank=5),
)
_GROUPS: Final = (
    Column("GROUP"),
    Column("PROCESSES"),
    Column("TYPE", least=12),
    Column("NEWEST", least=12, rank=1),
    Column("ERROR", least=20),
)
_EVENTS: Final = (Column("EVENT"), Column("AT"), Column("TASK", rank=1), Column("PAYLOAD", least=20))
_TASKS: Final = (
    Column("TASK"),
    Column("KIND"),
    Column("METHOD", rank=1),
    Column("STATUS"),
    Column("AT", rank=2),
    Column("ENDED", rank=3),
    Column("ANSWER", least=16),
)
_VERSIONS: Final = (
    Column("TYPE", least=12),
    Column("VERSION"),
    Column("SERVED"),
    Column("INIT"),
    Column("RUNNING"),
    Column("ERROR"),
)
TYPE = click.argument("process_type", metavar="TYPE")
ID = click.argument("process_id", metavar="ID")
METADATA = click.option(
    "--metadata", type=json_object, metavar="JSON", help="Only processes whose metadata contain these."
)
_newest = click.option("--newest", "newest_first", is_flag=True, help="Latest first.")
_after = click.option("--after", help="Cursor printed by the previous page.")


def _limit(default: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return click.option(
        "--limit",
        type=click.IntRange(1, 1000),
        metavar="NUMBER",
        default=default,
        show_default=True,
        help="Maximum number of rows.",
    )


@click.command("list")
@click.option("--type", "process_type", help="Only processes of this type.")
@click.option("--status", type=click.Choice(get_args(ProcessStatus)), help="Only processes with this status.")
@METADATA
@click.option(
    "--error-group", metavar="GROUP", help="Only processes of this error group (see `dataloader process errors`)."
)
@_limit(50)
@_after
@asks_queue
def process_list_command(
    target: AskedQueue,
    *,
    process_type: str | None,
    status: ProcessStatus | None,
    metadata: dict[str, Any] | None,
    error_group: str | None,
    limit: int,
    after: str | None,
    as_json: bool,
) -> None:
    """List processes, newest first."""
    wanted = ProcessFilter(type=process_type, status=status, metadata=metadata, error_group=error_group)
    page = target.ask_client(lambda client: client.processes.find(wanted, limit=limit, after=after))
    if as_json:
        print_json(page)
        return
    print_table(_PROCESSES, map(_process_row, page.processes), nothing="no processes")
    _say_more(page.next)


@click.command("versions")
@click.option("--type", "process_type", help="Only versions of this type.")
@asks_queue
def process_versions_command(target: AskedQueue, *, process_type: str | None, as_json: bool) -> None:
    """List the versions of process types, with the numbers of their processes.

    Processes wait if no running worker serves their version. Numbers are counted up to 10,000.
    """
    found = target.ask_client(lambda client: client.processes.versions(process_type))
    if as_json:
        print_json({"versions": found})
        return
    rows = ((one.type, one.version, "yes" if one.served else "no", one.init, one.running, one.error) for one in found)
    print_table(_VERSIONS, rows, nothing="no processes")


@click.command("show")
@TYPE
@ID
@asks_queue
def process_show_command(target: AskedQueue, *, process_type: str, process_id: str, as_json: bool) -> None:
    """Show a process and its current step."""
    show_record(target.ask_client(lambda client: client.processes.get(process_type, process_id)), as_json=as_json)


@click.command("events")
@TYPE
@ID
@_newest
@_limit(200)
@_after
@asks_queue
def process_events_command(
    target: AskedQueue, *, process_type: str, process_id: str, as_json: bool, **page: Any
) -> None:
    """Read the events of a process, oldest first."""
    found = target.ask_client(lambda client: client.processes.events(process_type, process_id, **page))
    if as_json:
        print_json(found)
        return
    rows = ((event.event_id, event.at, event.task_id, event.payload) for event in found.events)
    print_table(_EVENTS, rows, nothing="no events")
    _say_more(found.next)


@click.command("tasks")
@TYPE
@ID
@_newest
@_limit(200)
@_after
@asks_queue
def process_tasks_command(
    target: AskedQueue, *, process_type: str, process_id: str, as_json: bool, **page: Any
) -> None:
    """List the requests and timers of a process, oldest first."""
    found = target.ask_client(lambda client: client.processes.tasks(process_type, process_id, **page))
    if as_json:
        print_json(found)
        return
    rows = (
        (
            task.task_id, task.kind, task.method, task.status, task.created_at, task.finished_at,
            task.response if task.error is None else first_line(task.error),
        )
        for task in found.tasks
    )  # fmt: skip
    print_table(_TASKS, rows, nothing="no tasks")
    _say_more(found.next)


@click.command("errors")
@click.option("--type", "process_type", help="Only processes of this type.")
@_limit(50)
@_after
@asks_queue
def process_errors_command(
    target: AskedQueue, *, process_type: str | None, limit: int, after: str | None, as_json: bool
) -> None:
    """Count the processes in error by type and error. List those of a group: process list --error-group GROUP."""
    page = target.ask_client(
        lambda client: client.processes.errors(process_type=process_type, limit=limit, after=after)
    )
    if as_json:
        print_json(page)
        return
    rows = ((one.group, one.processes, one.type, one.example, one.error) for one in page.groups)
    print_table(_GROUPS, rows, nothing="no errors")
    _say_more(page.next)


def _process_row(one: ProcessRecord) -> tuple[object, ...]:
    timer = None if one.timer is None else f"{one.timer.kind} {cell(one.timer.at)}"
    status = one.status if one.running is None else f"{one.status} ({one.running.kind})"
    detail = None if one.detail is None else first_line(one.detail)
    return one.type, one.process_id, status, one.status_changed_at, timer, dict(one.metadata) or None, detail


def show_record(one: ProcessRecord, *, as_json: bool) -> None:
    """Print one process."""
    if as_json:
        print_json(one)
        return
    fields: dict[str, Any] = {"process": f"{one.type}/{one.process_id}", "version": one.version, "status": one.status}
    fields |= {"since": one.status_changed_at, "created_at": one.created_at, "detail": one.detail}
    fields |= {"error_group": one.error_group, "corrupted_by": one.corrupted_by, "state": one.state}
    fields |= {"metadata": dict(one.metadata) or None, "events": one.last_event_id}
    if one.timer is not None:
        fields["timer"] = f"{one.timer.kind} at {cell(one.timer.at)} (task {one.timer.task_id})"
    if one.running is not None:
        fields["runs"] = f"{one.running.kind} since {cell(one.running.since)} (task {one.running.task_id})"
    print_fields({name: value for name, value in fields.items() if value is not None})


def _say_more(following: str | None) -> None:
    if following is not None:
        click.echo(f"more: --after {following}", err=True)

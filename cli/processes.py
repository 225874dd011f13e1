"""Commands for durable processes: start, call, repair, stop, remove, list and show them."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Any
from uuid import UUID

import click

from dataloader.cli.arguments import instant_after_now, json_object, json_value, span_to_wait
from dataloader.cli.cells import cell
from dataloader.cli.deliveries import process_deliveries_command, process_release_command, process_sinks_command
from dataloader.cli.entry import FAILED, NOT_SUCCEEDED, Group
from dataloader.cli.output import print_json
from dataloader.cli.process_reads import (
    ID,
    TYPE,
    process_errors_command,
    process_events_command,
    process_list_command,
    process_show_command,
    process_tasks_command,
    process_versions_command,
    show_record,
)
from dataloader.cli.target import AskedQueue, asks_queue
from dataloader.jobs.client.client import Client
from dataloader.jobs.client.processes import ANSWER_S, ProcessClient
from dataloader.jobs.process_listings import ProcessAnswer, ProcessFilter, ProcessRecord
from dataloader.jobs.process_requests import ProcessImport, ProcessRequest

_args = click.option(
    "--args", type=json_value, metavar="JSON", help="Arguments of the step: JSON, @file, or - for stdin."
)
_key = click.option("--key", help="A repeated request with this key returns the first answer.")
_metadata = click.option("--metadata", type=json_object, metavar="JSON", help="Flat JSON object for searches.")
_timeout = click.option(
    "--timeout",
    "timeout_s",
    type=span_to_wait,
    metavar="SECONDS",
    default=ANSWER_S,
    show_default=True,
    help="Maximum seconds to wait for the answer; 0: do not wait.",
)

_ident = click.option(
    "--ident", type=click.UUID, metavar="UUID", help="Ident of the task, in case its number was reused after a restore."
)


@click.group(cls=Group)
def process_command() -> None:
    """Start, call, repair, list and show durable processes."""


for reading in (
    process_list_command,
    process_show_command,
    process_events_command,
    process_tasks_command,
    process_versions_command,
    process_errors_command,
    process_sinks_command,
    process_deliveries_command,
    process_release_command,
):
    process_command.add_command(reading)


@process_command.command("start")
@TYPE
@ID
@_args
@_key
@_metadata
@_timeout
@asks_queue
def process_start_command(
    target: AskedQueue, *, process_type: str, process_id: str, timeout_s: float, as_json: bool, **fields: Any
) -> int:
    """Start a process and print its answer."""
    request = ProcessRequest(type=process_type, process_id=process_id, kind="init", **fields)
    return _print_answer(
        target.ask_client(lambda client: client.processes.ask(request, wait_s=timeout_s)),
        as_json=as_json,
        timeout_s=timeout_s,
    )


@process_command.command("call")
@TYPE
@ID
@click.argument("method")
@_args
@_key
@click.option(
    "--start", type=json_value, metavar="JSON", help="Start the process with these args if it does not exist."
)
@click.option(
    "--expires",
    "expires_at",
    type=instant_after_now,
    metavar="TIMESTAMP",
    help="Latest start: a timestamp, or 15m from now.",
)
@click.option("--withdraw", is_flag=True, help="After the timeout, withdraw the call if it has not begun.")
@_timeout
@asks_queue
def process_call_command(
    target: AskedQueue,
    *,
    process_type: str,
    process_id: str,
    method: str,
    args: Any,
    key: str | None,
    start: Any,
    expires_at: datetime | None,
    withdraw: bool,
    timeout_s: float,
    as_json: bool,
) -> int:
    """Call a method and print its answer."""
    may_start = "start" in _given_options()
    request = ProcessRequest(
        type=process_type,
        process_id=process_id,
        kind="call",
        method=method,
        args=args,
        key=key,
        expires_at=expires_at,
        may_start=may_start,
        start=start,
    )
    answer = target.ask_client(lambda client: client.processes.ask(request, wait_s=timeout_s, withdraw=withdraw))
    return _print_answer(answer, as_json=as_json, timeout_s=timeout_s)


def _given_options() -> list[str]:
    """Return the options that were given on the command line."""
    context = click.get_current_context()
    default = click.core.ParameterSource.DEFAULT
    return [name for name in context.params if context.get_parameter_source(name) not in {default, None}]


@process_command.command("wait")
@click.argument("task_id", type=click.IntRange(1), metavar="TASK")
@_ident
@_timeout
@asks_queue
def process_wait_command(
    target: AskedQueue, *, task_id: int, ident: UUID | None, timeout_s: float, as_json: bool
) -> int:
    """Wait for the answer of TASK and print it."""
    task = target.ask_client(lambda client: client.processes.task(task_id, wait_s=timeout_s, ident=ident))
    return _print_answer(task.answer, as_json=as_json, timeout_s=timeout_s)


@process_command.command("withdraw")
@click.argument("task_id", type=click.IntRange(1), metavar="TASK")
@_ident
@asks_queue
def process_withdraw_command(target: AskedQueue, *, task_id: int, ident: UUID | None, as_json: bool) -> int:
    """Withdraw the call TASK, if it has not begun."""
    return _print_answer(
        target.ask_client(lambda client: client.processes.withdraw(task_id, ident=ident)), as_json=as_json
    )


def _acts(what: str, act: Callable[[ProcessClient, str, str], Awaitable[ProcessRecord]]) -> click.Command:
    """Return a command that applies one action to one process. `what` is its help."""

    @click.command(help=what)
    @TYPE
    @ID
    @asks_queue
    def command(target: AskedQueue, *, process_type: str, process_id: str, as_json: bool) -> None:
        show_record(target.ask_client(lambda client: act(client.processes, process_type, process_id)), as_json=as_json)

    return command


process_command.add_command(
    _acts(
        "Stop the running step. Its process is in error afterwards.",
        lambda asked, *which: asked.stop(*which),
    ),
    "stop",
)
process_command.add_command(
    _acts("Remove a process and show its last state.", lambda asked, *which: asked.remove(*which)), "remove"
)


def _finds(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that choose processes in error to a command for one process."""
    for option in (
        click.option("--yes", is_flag=True, help="Do not ask for confirmation."),
        click.option(
            "--metadata", type=json_object, metavar="JSON", help="All processes in error whose metadata contain these."
        ),
        click.option(
            "--error-group",
            metavar="GROUP",
            help="All processes of this error group (see `dataloader process errors`).",
        ),
        click.option("--all", "of_type", is_flag=True, help="All processes of TYPE in error."),
        click.argument("process_id", metavar="[ID]", required=False),
        click.argument("process_type", metavar="[TYPE]", required=False),
    ):
        command = option(command)
    return command


def _filter_or_one(
    verb: str,
    process_type: str | None,
    process_id: str | None,
    *,
    of_type: bool,
    error_group: str | None,
    metadata: dict[str, Any] | None,
    yes: bool,
) -> ProcessFilter | None:
    """Return the filter of a command for many processes; None for one process."""
    many = of_type or error_group is not None or metadata is not None
    if many is (process_id is not None) or (process_type is None and (of_type or not many)):
        raise click.UsageError("give one process (TYPE and ID), or many (TYPE --all, --error-group or --metadata)")
    if not many:
        return None
    if not yes:
        if not sys.stdin.isatty():
            raise click.UsageError("confirmation needs a terminal; pass --yes")
        click.confirm(f"{verb} all these processes?", abort=True, err=True)
    return ProcessFilter(type=process_type, error_group=error_group, metadata=metadata)


@process_command.command("repair")
@_finds
@_args
@_key
@_timeout
@asks_queue
def process_repair_command(
    target: AskedQueue,
    *,
    process_type: str,
    process_id: str,
    args: Any,
    key: str | None,
    timeout_s: float,
    as_json: bool,
    **which: Any,
) -> int:
    """Repair one or many processes in error.

    Runs the repair of their type. Choose many by TYPE --all, --error-group or --metadata.
    """
    wanted = _filter_or_one("repair", process_type, process_id, **which)
    if wanted is not None:
        if key is not None:
            raise click.UsageError("--key needs a single process (TYPE and ID)")
        return _say_many(target, lambda client: client.processes.repair_many(wanted, args), as_json=as_json)
    request = ProcessRequest(type=process_type, process_id=process_id, kind="repair", args=args, key=key)
    return _print_answer(
        target.ask_client(lambda client: client.processes.ask(request, wait_s=timeout_s)),
        as_json=as_json,
        timeout_s=timeout_s,
    )


@process_command.command("resume")
@_finds
@asks_queue
def process_resume_command(
    target: AskedQueue, *, process_type: str, process_id: str, as_json: bool, **which: Any
) -> int:
    """Resume one or many processes in error.

    A failed timeout is tried again. Choose many by TYPE --all, --error-group or --metadata.
    """
    wanted = _filter_or_one("resume", process_type, process_id, **which)
    if wanted is not None:
        return _say_many(target, lambda client: client.processes.resume_many(wanted), as_json=as_json)
    show_record(target.ask_client(lambda client: client.processes.resume(process_type, process_id)), as_json=as_json)
    return 0


@process_command.command("import")
@TYPE
@ID
@click.option(
    "--state", type=json_value, metavar="JSON", help="State, as defined by its type: JSON, @file, or - for stdin."
)
@_metadata
@click.option(
    "--event", "events", type=json_value, multiple=True, metavar="JSON", help="Event of the process; may be repeated."
)
@asks_queue
def process_import_command(
    target: AskedQueue,
    *,
    process_type: str,
    process_id: str,
    metadata: dict[str, Any] | None,
    as_json: bool,
    **fields: Any,
) -> None:
    """Import a process of another system. No step runs."""
    process = ProcessImport(type=process_type, process_id=process_id, metadata=metadata or {}, **fields)
    show_record(target.ask_client(lambda client: client.processes.put(process)), as_json=as_json)


def _print_answer(answer: ProcessAnswer, *, as_json: bool, timeout_s: float = 0) -> int:
    """Print an answer; return the exit code: 0 done, 1 none in time, 3 refused, failed or cancelled."""
    if as_json:
        print_json(answer)
    elif answer.status == "finished" and answer.error is None:
        click.echo(cell(answer.response) or "done")
    elif answer.is_answered:
        word = "refused" if answer.status == "finished" else "failed" if answer.status == "error" else "cancelled"
        click.echo(f"{word}: {cell(answer.error)}", err=True)
    else:
        click.echo(f"task {answer.task_id}  {answer.status}")
    if not answer.is_answered:
        return FAILED if timeout_s else 0
    return 0 if answer.status == "finished" and answer.error is None else NOT_SUCCEEDED


def _say_many(target: AskedQueue, question: Callable[[Client], Awaitable[int]], *, as_json: bool) -> int:
    count = target.ask_client(question)
    if as_json:
        print_json({"changed": count})
    else:
        click.echo(f"{count} {'process' if count == 1 else 'processes'}")
    return 0

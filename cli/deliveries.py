"""Commands for deliveries of durable processes: their state, and the release of held ones."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

import click

from dataloader.cli.cells import Column
from dataloader.cli.output import first_line, print_json, print_table
from dataloader.cli.target import AskedQueue, asks_queue
from dataloader.jobs.process_outbox import HeldFilter

_SINKS: Final = (
    Column("SINK", least=12),
    Column("WAITING"),
    Column("OLDEST", rank=1),
    Column("HELD UP"),
    Column("HELD"),
    Column("TYPES", rank=2),
    Column("KINDS", rank=3),
)
_HELD: Final = (
    Column("SINK", rank=1),
    Column("TYPE", rank=2),
    Column("PROCESS", least=12),
    Column("FIRST", rank=3),
    Column("TRIES"),
    Column("AGAIN", least=4),
    Column("ERROR", least=20),
)


def _filters(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--held", is_flag=True, help="Only held deliveries, which wait for an operator."),
        click.option("--process", "process_id", metavar="ID", help="Only deliveries of the process with this ID."),
        click.option("--type", "process_type", help="Only deliveries of processes of this type."),
        click.option("--sink", help="Only this sink; `messages` selects messages to other processes."),
    ):
        command = option(command)
    return command


def _deliveries_filter(sink: str | None, process_type: str | None, process_id: str | None, *, held: bool) -> HeldFilter:
    return HeldFilter(sink=sink, type=process_type, process_id=process_id, held=held)


@click.command("sinks")
@asks_queue
def process_sinks_command(target: AskedQueue, *, as_json: bool) -> None:
    """List the sinks that receive process events.

    Shows the waiting deliveries of each, and those of messages to other processes.
    """
    found = target.ask_client(lambda client: client.processes.sinks())
    if as_json:
        print_json({"sinks": found})
        return
    rows = (
        (one.sink, one.waiting, one.oldest_at, one.held_up, one.held, ", ".join(one.types or ()), ", ".join(one.kinds))
        for one in found
    )
    print_table(_SINKS, rows, nothing="no sinks")


@click.command("deliveries")
@_filters
@click.option(
    "--limit",
    type=click.IntRange(1, 1000),
    metavar="NUMBER",
    default=50,
    show_default=True,
    help="Maximum number of rows.",
)
@click.option("--after", help="Cursor printed by the previous page.")
@asks_queue
def process_deliveries_command(
    target: AskedQueue,
    *,
    sink: str | None,
    process_type: str | None,
    process_id: str | None,
    held: bool,
    as_json: bool,
    **page: Any,
) -> None:
    """List processes whose deliveries have failed and are retried or held."""
    wanted = _deliveries_filter(sink, process_type, process_id, held=held)
    found = target.ask_client(lambda client: client.processes.deliveries(wanted, **page))
    if as_json:
        print_json(found)
        return
    rows = (
        (
            one.sink, one.type, one.process_id, one.kind if one.event_id is None else f"event {one.event_id}",
            one.tries, one.next_at or "held", first_line(one.error),
        )
        for one in found.deliveries
    )  # fmt: skip
    print_table(_HELD, rows, nothing="no failed or held deliveries")
    if found.next is not None:
        click.echo(f"more: --after {found.next}", err=True)


@click.command("release")
@_filters
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@asks_queue
def process_release_command(
    target: AskedQueue,
    *,
    sink: str | None,
    process_type: str | None,
    process_id: str | None,
    held: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Retry failed or held deliveries now."""
    wanted = _deliveries_filter(sink, process_type, process_id, held=held)
    if wanted == HeldFilter():
        raise click.UsageError("give a filter: --sink, --type, --process or --held")
    if not yes:
        if not sys.stdin.isatty():
            raise click.UsageError("confirmation needs a terminal; pass --yes")
        click.confirm("release all these deliveries?", abort=True, err=True)
    count = target.ask_client(lambda client: client.processes.release(wanted))
    if as_json:
        print_json({"released": count})
    else:
        click.echo(f"{count} {'process' if count == 1 else 'processes'}")

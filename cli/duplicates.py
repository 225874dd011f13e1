"""Command for duplicates: waiting jobs with the same task and args."""

from __future__ import annotations

import click

from dataloader.cli.cells import Column, cell
from dataloader.cli.output import print_json, print_table
from dataloader.cli.target import AskedQueue, asks_queue
from dataloader.jobs.errors import BadRequest

_GROUPS = (
    Column("JOBS"),
    Column("QUEUE", least=8, rank=1),
    Column("TASK", least=10),
    Column("BEST"),
    Column("OLDEST", rank=2),
    Column("ARGS", least=20),
)


@click.command()
@click.option("--task", help="Only jobs of this task.")
@click.option("--queue", help="Only jobs of this queue.")
@click.option(
    "--limit",
    type=click.IntRange(1, 1000),
    metavar="NUMBER",
    default=50,
    show_default=True,
    help="Maximum number of groups.",
)
@click.option("--cancel", is_flag=True, help="Cancel the duplicates of the task, except the best of each group.")
@asks_queue
def duplicates_command(
    target: AskedQueue, *, task: str | None, queue: str | None, limit: int, cancel: bool, as_json: bool
) -> None:
    """List jobs with equal task and args, or cancel all but one."""
    if cancel:
        if task is None:
            raise BadRequest("task", "is required with --cancel")
        canceled = target.ask(lambda jobs: jobs.cancel_duplicates(task, queue=queue))
        if as_json:
            print_json({"canceled": canceled})
        else:
            click.echo(f"{canceled} canceled")
        return
    groups = target.ask(lambda jobs: jobs.duplicates(task=task, queue=queue, limit=limit))
    if as_json:
        print_json(groups)
        return
    print_table(
        _GROUPS,
        ((one.jobs, one.queue, one.task, one.best, one.oldest_at, cell(one.args)) for one in groups),
        nothing="no duplicates",
    )

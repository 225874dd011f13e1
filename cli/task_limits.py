"""Commands for tasks and their limits: effective limits, the reason why no job starts, and operators' actions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TextIO, get_args

import attrs
import click

from dataloader.cli.cells import Column, cell
from dataloader.cli.entry import Group
from dataloader.cli.output import print_fields, print_json, print_table
from dataloader.cli.target import AskedQueue, all_rows, asks_queue
from dataloader.jobs.client.limits import Limits
from dataloader.jobs.errors import BadRequest
from dataloader.jobs.limit_files import read_limits
from dataloader.jobs.limits import AtPeriodEnd, TaskLimits
from dataloader.jobs.task_listings import OpenJobs, TaskState

_TASKS: Final = (
    Column("TASK", least=12),
    Column("WAITING", rank=1),
    Column("RUNNING", rank=1),
    Column("STATE"),
    Column("OPENS", rank=2),
    Column("LEFT", rank=3),
    Column("LIMITS", least=20, rank=4),
)
_LIMITS: Final = [field.name for field in attrs.fields(TaskLimits)]
NAME: Final = click.argument("name")
SAYS_JOBS: Final = click.Choice(get_args(OpenJobs))


@click.group(cls=Group)
def task_command() -> None:
    """List, show, limit, pause, resume and remove tasks."""


@task_command.command("list")
@asks_queue
def task_list_command(target: AskedQueue, *, as_json: bool) -> None:
    """List the tasks, with the numbers of jobs that wait for their limits, and whether jobs may start now."""
    found = target.ask_client(lambda client: all_rows(client.limits.tasks, "tasks"))
    if as_json:
        print_json(found)
    else:
        _print_tasks(found)


@task_command.command("show")
@NAME
@asks_queue
def task_show_command(target: AskedQueue, *, name: str, as_json: bool) -> None:
    """Show the task NAME: its limits, and why and until when none of its jobs may start."""
    found = target.ask_client(lambda client: client.limits.task(name))
    if as_json:
        print_json(found)
        return
    fields: dict[str, object] = {"task": found.task}
    fields |= {key: value for key in ("description", "queue", "priority") if (value := getattr(found, key)) is not None}
    fields |= {"state": task_state_text(found), "opens": found.opens_at, "left": found.left}
    fields |= {"error": found.error}
    fields |= {"waiting": found.waiting, "running": found.running}
    fields |= {key: dict(getattr(found, key)) or None for key in ("declared", "override")}
    fields |= {"declared by": found.declared_by}
    print_fields({key: value for key, value in fields.items() if value is not None})


@task_command.command("set")
@NAME
@click.option(
    "--work-periods",
    multiple=True,
    metavar="PERIOD",
    help="Work period such as 'MON-FRI 00:00-06:00'; may be repeated.",
)
@click.option("--zone", help="Time zone of --work-periods.")
@click.option(
    "--at-period-end",
    type=click.Choice(get_args(AtPeriodEnd)),
    help="Running jobs at the end of a work period: continue, or return to the queue.",
)
@click.option("--max-running", type=int, metavar="NUMBER", help="Maximum running jobs, over all processes.")
@click.option("--max-running-per-partition", type=int, metavar="NUMBER", help="Maximum running jobs per partition_key.")
@click.option("--batch-size", type=int, metavar="NUMBER", help="Number of jobs that start together.")
@click.option("--batch-delay", "batch_delay_s", type=float, metavar="SECONDS", help="Pause between two batches.")
@click.option("--supplier", help="Supplier whose rate limits and work periods also apply.")
@click.option("--cost", type=int, metavar="NUMBER", help="Units of the supplier's rate limits per start.")
@click.option("--retry-priority", type=int, metavar="NUMBER", help="Priority of jobs after a failed run.")
@click.option(
    "--retry-delay", "retry_delay_s", type=float, metavar="SECONDS", help="Pause between a failed run and the next."
)
@click.option("--max-attempts", type=int, metavar="NUMBER", help="Maximum attempts of jobs enqueued from now on.")
@click.option("--unset", multiple=True, type=click.Choice(_LIMITS), help="Remove this override; may be repeated.")
@asks_queue
def task_set_command(target: AskedQueue, *, name: str, unset: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Override limits of the task NAME from the next claim on. Overrides survive deployments."""
    changes = changes_of(options, unset)
    [found] = target.ask_client(lambda client: client.limits.set_tasks({name: changes}))
    _print_task(found, as_json=as_json)


@task_command.command("apply")
@click.argument("file", type=click.File(encoding="utf-8"))
@asks_queue
def task_apply_command(target: AskedQueue, *, file: TextIO, as_json: bool) -> None:
    """Override the limits of many tasks from FILE, all or none; - for stdin.

    FILE has a JSON list with an entry per task, whose limits become overrides. For the names see docs/limits.md.
    """
    changes = read_limits(file.read())
    found = target.ask_client(lambda client: client.limits.set_tasks(changes))
    if as_json:
        print_json(found)
    else:
        _print_tasks(found)


def _task_change(what: str, change: Callable[[Limits, str], Any]) -> click.Command:
    """Return a command that applies one action to one task. `what` is its help."""

    @click.command(help=what)
    @NAME
    @asks_queue
    def command(target: AskedQueue, *, name: str, as_json: bool) -> None:
        _print_task(target.ask_client(lambda client: change(client.limits, name)), as_json=as_json)

    return command


task_command.add_command(
    _task_change(
        "Pause the task NAME: none of its jobs start; running jobs continue.", lambda one, name: one.pause_task(name)
    ),
    "pause",
)
task_command.add_command(_task_change("Resume the task NAME.", lambda limits, name: limits.resume_task(name)), "resume")


@task_command.command("remove")
@NAME
@click.option("--jobs", type=SAYS_JOBS, help="Jobs that have not ended: wait, or are canceled.")
@asks_queue
def task_remove_command(target: AskedQueue, *, name: str, jobs: OpenJobs | None, as_json: bool) -> None:
    """Remove the task NAME until a process declares it again. Running processes start no more of its jobs."""
    found = target.ask_client(lambda client: client.limits.remove_task(name, jobs=jobs))
    if as_json:
        print_json(found)
    else:
        click.echo(f"{cell(found.task)}  removed")


def changes_of(options: dict[str, Any], unset: tuple[str, ...]) -> dict[str, Any]:
    """Return the changes of a `set` command: the given options, and None for those of `--unset`."""
    given = {key: value for key, value in options.items() if value is not None and value != ()}
    for key in unset:
        if key in given:
            raise BadRequest(key, "is both set and unset; use one of them")
    if not given and not unset:
        raise click.UsageError("nothing to change: set at least one limit, or pass --unset")
    return {key: list(value) if isinstance(value, tuple) else value for key, value in given.items()} | dict.fromkeys(
        unset
    )


def task_state_text(one: TaskState) -> str:
    """Return in words whether jobs of a task may start."""
    return "open" if one.closed is None else f"closed: {one.closed.replace('_', ' ')}"


def _print_tasks(found: list[TaskState]) -> None:
    print_table(
        _TASKS,
        (
            (one.task, one.waiting, one.running, task_state_text(one), one.opens_at, one.left, dict(one.limits))
            for one in found
        ),
        nothing="no tasks",
    )


def _print_task(one: TaskState, *, as_json: bool) -> None:
    if as_json:
        print_json(one)
    else:
        click.echo(f"{cell(one.task)}  {cell(task_state_text(one))}  {cell(dict(one.limits))}".rstrip())

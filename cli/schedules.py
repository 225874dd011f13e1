"""Commands for schedules: their plans, and operators' actions."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any, Final

import click

from dataloader.cli.arguments import RenamedChoice, instant_before_now, json_object
from dataloader.cli.cells import Column, cell
from dataloader.cli.entry import Group
from dataloader.cli.output import print_json, print_table, print_to_stderr
from dataloader.cli.target import AskedQueue, all_rows, asks_queue
from dataloader.jobs.client.client import Client
from dataloader.jobs.client.schedules import Schedules
from dataloader.jobs.schedule_listings import MAX_NEXT, ScheduleEvent, ScheduleRecord
from dataloader.jobs.schedules import FORMER_OVERLAPS, Missed, Overlap, Schedule

_SCHEDULES: Final = (
    Column("SCHEDULE", least=12),
    Column("TASK", least=10, rank=1),
    Column("TIMES"),
    Column("NEXT"),
    Column("LAST", rank=2),
    Column("STATE"),
)
_MISSED: Final = click.Choice([str(one) for one in Missed])
_EVENTS: Final = (Column("AT"), Column("WHAT"), Column("DETAIL", least=20))


@click.group(cls=Group)
def schedule_command() -> None:
    """List, show, set, pause, run and backfill schedules."""


@schedule_command.command("list")
@asks_queue
def schedule_list_command(target: AskedQueue, *, as_json: bool) -> None:
    """List the schedules with their next times."""
    found = target.ask_client(lambda client: all_rows(client.schedules.find, "schedules"))
    if as_json:
        print_json(found)
        return
    print_table(
        _SCHEDULES,
        ((one.name, one.task, _times(one), one.next_at, one.last_at, _state_word(one)) for one in found),
        nothing="no schedules",
    )


@schedule_command.command("show")
@click.argument("name")
@asks_queue
def schedule_show_command(target: AskedQueue, *, name: str, as_json: bool) -> None:
    """Show the schedule NAME: its declaration, its state and its event history."""

    async def question(client: Client) -> tuple[ScheduleRecord, list[ScheduleEvent]]:
        return await client.schedules.get(name), (await client.schedules.events(name, limit=10)).events

    found, events = target.ask_client(question)
    if as_json:
        print_json({"schedule": found, "events": events})
        return
    for label, value in (
        ("schedule", found.name),
        ("task", f"{found.task} (not declared by any process)" if found.unknown_task else found.task),
        ("times", _times(found)),
        ("next", found.next_at),
        ("last", found.last_at),
        ("last job", found.last_job_id),
        ("state", _schedule_state(found)),
        ("declared", found.spec),
        ("stored by", found.stored_by),
    ):
        click.echo(f"{label:10} {cell(value)}")
    if events:
        print_table(_EVENTS, ((event.at, event.kind, event.payload) for event in events), nothing="")


@schedule_command.command("set")
@click.argument("name")
@click.option("--task", required=True, help="Task of its jobs.")
@click.option("--cron", help="Five fields, such as '30 6 * * MON-FRI', or an alias such as @daily.")
@click.option("--every", "every_s", type=float, metavar="SECONDS", help="Seconds between two times, instead of --cron.")
@click.option("--zone", default="UTC", show_default=True, help="Time zone of --cron.")
@click.option("--args", type=json_object, default="{}", help="Args of each job: JSON, @FILE, or - for stdin.")
@click.option("--queue", help="Queue of its jobs.  [default: the task's queue]")
@click.option(
    "--missed",
    type=_MISSED,
    default="once",
    show_default=True,
    help="Catch-up policy: handling of missed times.",
)
@click.option(
    "--overlap",
    type=RenamedChoice(Overlap, FORMER_OVERLAPS),
    default="buffer_one",
    show_default=True,
    help="Overlap policy: handling of a time whose previous job has not ended.",
)
@click.option(
    "--jitter",
    "jitter_s",
    type=float,
    default=0,
    metavar="SECONDS",
    help="Delay each job by a random time, at most this.",
)
@click.option("--pause-on-failure", is_flag=True, help="Pause the schedule when one of its jobs has failed for good.")
@asks_queue
def schedule_set_command(target: AskedQueue, *, name: str, queue: str | None, as_json: bool, **fields: Any) -> None:
    """Store the schedule NAME, replacing an existing one. Programs no longer change it afterwards."""
    wanted = Schedule(name=name, job={} if queue is None else {"queue": queue}, **fields)
    stored = target.ask_client(lambda client: client.schedules.put(wanted))
    _print_schedule(stored, as_json=as_json)
    if stored.unknown_task:
        print_to_stderr(f"no process has declared the task {stored.task!r}; check its name")


def _schedule_change(what: str, change: Callable[[Schedules, str], Any]) -> click.Command:
    """Return a command that applies one action to one schedule. `what` is its help."""

    @click.command(help=what)
    @click.argument("name")
    @asks_queue
    def command(target: AskedQueue, *, name: str, as_json: bool) -> None:
        _print_schedule(target.ask_client(lambda client: change(client.schedules, name)), as_json=as_json)

    return command


schedule_command.add_command(
    _schedule_change("Pause the schedule NAME: it enqueues no jobs.", lambda schedules, name: schedules.pause(name)),
    "pause",
)
schedule_command.add_command(
    _schedule_change(
        "Resume the schedule NAME. Its catch-up policy applies to missed times.",
        lambda schedules, name: schedules.resume(name),
    ),
    "resume",
)


@schedule_command.command("remove")
@click.argument("name")
@asks_queue
def schedule_remove_command(target: AskedQueue, *, name: str, as_json: bool) -> None:
    """Remove the schedule NAME; its jobs stay. A program that declares it adds it again at its next start."""
    removed = target.ask_client(lambda client: client.schedules.delete(name))
    if as_json:
        print_json(removed)
    else:
        click.echo(f"{cell(removed.name)}  removed")


@schedule_command.command("run")
@click.argument("name")
@asks_queue
def schedule_run_command(target: AskedQueue, *, name: str, as_json: bool) -> None:
    """Enqueue a job of the schedule NAME now, in addition to its plan."""
    added = target.ask_client(lambda client: client.schedules.run(name))
    if as_json:
        print_json(added)
    else:
        click.echo(f"{added.job_id}  {added.status}")


@schedule_command.command("next")
@click.argument("name")
@click.option("--number", type=click.IntRange(1, MAX_NEXT), default=10, show_default=True, help="Number of times.")
@asks_queue
def schedule_next_command(target: AskedQueue, *, name: str, number: int, as_json: bool) -> None:
    """List the next planned times of the schedule NAME, paused or not."""
    times = target.ask_client(lambda client: client.schedules.next_times(name, number=number))
    if as_json:
        print_json(times)
        return
    for at in times:
        click.echo(cell(at))


@schedule_command.command("backfill")
@click.argument("name")
@click.option(
    "--from", "begin", type=instant_before_now, required=True, help="Begin: a timestamp, or a duration before now."
)
@click.option(
    "--to",
    "end",
    type=instant_before_now,
    required=True,
    help="End (exclusive): a timestamp, or a duration before now.",
)
@click.option("--again", is_flag=True, help="Also enqueue jobs for times that already have one.")
@click.option("--dry-run", is_flag=True, help="Only list the jobs that would be enqueued.")
@asks_queue
def schedule_backfill_command(
    target: AskedQueue, *, name: str, begin: datetime, end: datetime, again: bool, dry_run: bool, as_json: bool
) -> None:
    """Enqueue jobs for past planned times of the schedule NAME that have none.

    Each job of a load loads from the watermark: use `dataloader etl run LOAD --from` to load a past span.
    """
    found = target.ask_client(lambda client: client.schedules.backfill(name, begin, end, again=again, dry_run=dry_run))
    if as_json:
        print_json(found)
        return
    for at in found.times:
        click.echo(cell(at))
    verb = "would be enqueued" if dry_run else "enqueued"
    click.echo(f"{len(found.times):,} jobs {verb}; {found.had_jobs:,} times already have one")


def _times(one: ScheduleRecord) -> str | None:
    if one.fault is not None:
        return None
    spec = one.spec
    return f"every {spec['every_s']:g} s" if "every_s" in spec else f"{spec['cron']} {spec.get('zone', 'UTC')}"


def _state_word(one: ScheduleRecord) -> str:
    if one.retired_at is not None:
        return "retired"
    if one.paused:
        return "paused"
    if one.fault is not None:
        return "unreadable"
    return "on" if one.next_at is not None else "over"


def _schedule_state(one: ScheduleRecord) -> str:
    word = _state_word(one)
    why = one.paused_why if word == "paused" else one.fault
    return word if why is None else f"{word}: {why}"


def _print_schedule(one: ScheduleRecord, *, as_json: bool) -> None:
    if as_json:
        print_json(one)
    else:
        due = "" if one.next_at is None else f"  next {cell(one.next_at)}"
        click.echo(f"{cell(one.name)}  {cell(_schedule_state(one))}{due}")

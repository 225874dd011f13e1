"""Commands that change jobs, single ones or all that match a filter, and the audit of changes."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID

import attrs
import click

from dataloader.cli.arguments import finds_jobs, row_number
from dataloader.cli.bulk import tell_what_is_left_out
from dataloader.cli.cells import Column, cell
from dataloader.cli.entry import report
from dataloader.cli.output import job_state_text, print_json, print_table, why_job_waits
from dataloader.cli.target import AskedQueue, asks_queue
from dataloader.jobs.client.jobs import Jobs
from dataloader.jobs.errors import Conflict, DataloaderError, JobNotFound
from dataloader.jobs.listings import AuditRecord, JobFilter
from dataloader.jobs.model import MAX_INT, JobRecord


@attrs.frozen
class _Change:
    """Change of a command: for one job, for all of a filter, and the question before the latter."""

    to_one: Callable[[Jobs, UUID], Awaitable[JobRecord]]
    to_all: Callable[[Jobs, JobFilter], Awaitable[int]]
    question: str
    said: Callable[[JobRecord], str] = job_state_text
    """Return the state of one job after the change."""
    leaves_out: bool = False
    """True if bulk changes leave out jobs that wake durable processes."""


def _changes_jobs(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add job IDs to a command, or a filter with `--all`."""
    for decorate in (
        asks_queue,
        click.option("--yes", is_flag=True, help="Do not ask for confirmation of --all."),
        click.option("--all", "everything", is_flag=True, help="All jobs that match the filter."),
        finds_jobs,
        click.argument("job_ids", nargs=-1, type=click.UUID, metavar="[JOB_ID]..."),
    ):
        command = decorate(command)
    return command


@click.command()
@_changes_jobs
def cancel_command(target: AskedQueue, **chosen: Any) -> int:
    """Cancel jobs by their IDs, or with --all and a filter.

    Queued jobs end immediately, running jobs at their next checkpoint. Ended jobs do not change. With --all, jobs that
    wake durable processes do not change either.
    """
    change = _Change(
        lambda jobs, job_id: jobs.cancel(job_id), lambda jobs, wanted: jobs.cancel(wanted), "cancel {}", leaves_out=True
    )
    return _change_jobs(target, change, **chosen)


@click.command()
@click.option("--force", is_flag=True, help="Also retry running jobs whose lease never expires and is not renewed.")
@_changes_jobs
def retry_command(target: AskedQueue, *, force: bool, everything: bool, **chosen: Any) -> int:
    """Queue failed, canceled or lost jobs again, from attempt 0.

    Choose them by their IDs, or with --all and a filter.
    """
    if force and everything:
        raise click.UsageError("--force needs JOB_IDs; it cannot be used with --all")
    change = _Change(
        lambda jobs, job_id: jobs.retry(job_id, force=force), lambda jobs, wanted: jobs.retry(wanted), "retry {}"
    )
    return _change_jobs(target, change, everything=everything, **chosen)


@click.command()
@_changes_jobs
def run_now_command(target: AskedQueue, **chosen: Any) -> int:
    """Make delayed jobs due now.

    Choose them by their IDs, or with --all and a filter. A job still waits if its lock_key is held or its limits are
    reached.
    """
    change = _Change(
        lambda jobs, job_id: jobs.run_now(job_id),
        lambda jobs, wanted: jobs.run_now(wanted),
        "run {} now",
        _what_is_left,
    )
    return _change_jobs(target, change, **chosen)


@click.command()
@click.argument("number", type=click.IntRange(0, MAX_INT), metavar="NUMBER")
@_changes_jobs
def priority_command(target: AskedQueue, *, number: int, **chosen: Any) -> int:
    """Change the priority of queued jobs.

    Choose them by their IDs, or with --all and a filter. Smaller numbers run first; 100 is the default.
    """
    change = _Change(
        lambda jobs, job_id: jobs.set_priority(job_id, number),
        lambda jobs, wanted: jobs.set_priority(wanted, number),
        f"set the priority of {{}} to {number}",
    )
    return _change_jobs(target, change, **chosen)


def _change_jobs(
    target: AskedQueue,
    change: _Change,
    *,
    job_ids: tuple[UUID, ...],
    wanted: JobFilter,
    everything: bool,
    yes: bool,
    as_json: bool,
) -> int:
    if everything == bool(job_ids):
        raise click.UsageError("give either JOB_IDs, or --all with a filter such as --queue")
    if everything:
        if wanted == JobFilter():
            raise click.UsageError("--all needs a filter such as --queue or --status")
        return _change_all(target, change, wanted, yes=yes, as_json=as_json)
    if wanted != JobFilter():
        raise click.UsageError("a filter needs --all; it cannot be used with JOB_IDs")
    return _change_each(target, change, job_ids, as_json=as_json)


def _change_each(target: AskedQueue, change: _Change, job_ids: tuple[UUID, ...], *, as_json: bool) -> int:
    async def question(jobs: Jobs) -> tuple[list[JobRecord], list[DataloaderError]]:
        changed: list[JobRecord] = []
        refused: list[DataloaderError] = []
        left = list(dict.fromkeys(job_ids))
        while left:
            job_id = left.pop(0)
            try:
                changed.append(await change.to_one(jobs, job_id))
            except (JobNotFound, Conflict) as error:  # the other jobs can still be changed
                refused.append(error)
            except DataloaderError as error:  # the other jobs would fail as well; print the finished changes
                if not changed and not refused:
                    raise
                refused.append(DataloaderError(f"job {job_id}: {error}"))
                refused += [DataloaderError(f"job {other}: not changed") for other in left]
                break
        return changed, refused

    changed, refused = target.ask(question)
    if as_json:
        print_json(changed)
    else:
        for job in changed:
            click.echo(f"{job.job_id}  {change.said(job)}")
    return max((report(error) for error in refused), default=0)


def _what_is_left(job: JobRecord) -> str:
    """Return a job's status and the reason why it still waits although it is due, other than an unserved queue."""
    why = why_job_waits(attrs.evolve(job, queue_state=None))
    return f"{job_state_text(job)}: {why}" if why else job_state_text(job)


def _change_all(target: AskedQueue, change: _Change, wanted: JobFilter, *, yes: bool, as_json: bool) -> int:
    if not yes and not sys.stdin.isatty():
        raise click.UsageError("confirmation of --all needs a terminal; pass --yes")
    if change.leaves_out:
        tell_what_is_left_out(target, wanted)
    if not yes:
        click.confirm(f"{change.question.format(_filter_text(wanted))}?", abort=True, err=True)
    count = target.ask(lambda jobs: change.to_all(jobs, wanted))
    if as_json:
        print_json({"changed": count})
    else:
        click.echo(f"{count} {'job' if count == 1 else 'jobs'}")
    return 0


def _filter_text(wanted: JobFilter) -> str:
    texts = (
        f"{name} {' or '.join(sorted(value)) if isinstance(value, frozenset) else cell(value)}"
        for name, value in wanted.criteria().items()
    )
    return f"all jobs with {' and '.join(texts)}"


def _about(entry: AuditRecord) -> str:
    """Return the changed job, if there is one, and the details."""
    return "  ".join(filter(None, (cell(entry.job_id), cell(entry.detail))))


@click.command()
@click.option(
    "--limit",
    type=click.IntRange(1, 500),
    metavar="NUMBER",
    default=50,
    show_default=True,
    help="Maximum number of entries.",
)
@click.option("--before", type=row_number, metavar="NUMBER", help="Only entries before the entry with this number.")
@asks_queue
def audit_command(target: AskedQueue, *, limit: int, before: int | None, as_json: bool) -> None:
    """List operators' actions, latest first."""
    entries = target.ask(lambda jobs: jobs.audit(limit=limit, after=before)).audit
    if as_json:
        print_json(entries)
        return
    print_table(
        (Column("ENTRY", rank=1), Column("AT"), Column("ACTOR", least=8), Column("ACTION"), Column("ABOUT", least=36)),
        ((entry.audit_id, entry.ts, entry.actor, entry.action, _about(entry)) for entry in entries),
        nothing="no entries",
    )

"""Commands for single jobs: add, show and list them, read their event history or log."""

from __future__ import annotations

import math
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, Final, get_args
from uuid import UUID

import click
import trio

from dataloader.cli.arguments import finds_jobs, instant_after_now, json_object, row_number, span_to_wait
from dataloader.cli.cells import Column, cell
from dataloader.cli.entry import FAILED, NOT_SUCCEEDED
from dataloader.cli.output import (
    first_line,
    job_state_text,
    print_job,
    print_json,
    print_table,
    print_to_stderr,
    why_job_waits,
    why_not_taken,
    why_silent,
)
from dataloader.cli.target import AskedQueue, asks_queue
from dataloader.cli.waiting import Patience, wait_for_end
from dataloader.jobs.client.jobs import Jobs
from dataloader.jobs.errors import StoreUnavailable
from dataloader.jobs.listings import LEVELS, MAX_PAGE, JobFilter, Level, LogLine, LogPage
from dataloader.jobs.model import Enqueued, JobRecord, NewJob, WhenFailed
from dataloader.jobs.page_cursor import After
from dataloader.jobs.states import QueueState, Status
from dataloader.jobs.wait_reasons import WaitReason

_NOTES: Final = {
    "again": "the first job with this idempotency key",
    "kept": "a job that already covers this request",
    "updated": "a waiting job, updated by this request",
    "older": "the newest job of its key; this request is not newer",
}
FOLLOW_S: Final = 1.0
"""Seconds between two reads of a followed log. A process writes its lines within a second."""


def _version(text: str) -> float | datetime:
    try:
        return float(text)
    except ValueError:
        return instant_after_now(text)


def _check_timeout(timeout_s: float, *, wait: bool) -> None:
    if timeout_s < math.inf and not wait:
        raise click.UsageError("--timeout needs --wait")


wait_option = click.option("--wait", is_flag=True, help="Wait until the job has ended; exit 3 unless it succeeded.")
timeout_option = click.option(
    "--timeout", "timeout_s", type=span_to_wait, metavar="SECONDS", default=math.inf, help="Maximum seconds of --wait."
)


@click.command()
@click.argument("queue", metavar="[QUEUE]")
@click.argument("task", metavar="TASK", required=False)
@click.option(
    "--args",
    type=json_object,
    default="{}",
    metavar="JSON",
    help="A JSON object, @file, or - for stdin.",
)
@click.option("--lock-key", help="Jobs with the same key never run concurrently.  [default: the task's, or none]")
@click.option("--partition-key", default="", help="Stored with the job, for its handler and for limits per partition.")
@click.option("--priority", type=int, help="Smaller numbers run first.  [default: the task's, or 100]")
@click.option(
    "--available-at",
    type=instant_after_now,
    metavar="TIMESTAMP",
    help="Earliest start: a timestamp, or 15m, 2h, 7d from now.",
)
@click.option(
    "--after",
    type=click.UUID,
    multiple=True,
    metavar="JOB_ID",
    help="Wait until this job has ended; may be repeated.",
)
@click.option(
    "--when-failed",
    type=click.Choice(get_args(WhenFailed)),
    default="cancel",
    show_default=True,
    help="If a job of --after did not succeed: cancel this job, or run it.",
)
@click.option("--root", type=click.UUID, metavar="JOB_ID", help="Root job that this job belongs to.")
@click.option("--idempotency-key", help="A repeated request with this key returns the first job.")
@click.option(
    "--job-version",
    "version",
    type=_version,
    metavar="NUMBER|TIMESTAMP",
    help="Version of the request, for tasks that update waiting jobs; an older request changes nothing.",
)
@click.option("--max-attempts", type=int, help="Maximum number of attempts, after which the job has failed for good.")
@click.option(
    "--lease-ttl-sec",
    "--lease",
    "lease_ttl_sec",
    type=int,
    help="Seconds without a heartbeat after which the job is recovered.",
)
@wait_option
@timeout_option
@asks_queue
def trigger_command(target: AskedQueue, *, wait: bool, timeout_s: float, as_json: bool, **request: Any) -> int:
    """Enqueue a job for TASK in QUEUE, or in the task's own queue."""
    _check_timeout(timeout_s, wait=wait)
    if request["task"] is None:
        request["queue"], request["task"] = None, request["queue"]
    new = NewJob(**request)
    changes = _Changes()

    async def question(jobs: Jobs) -> tuple[Enqueued, JobRecord | None]:
        [enqueued] = await jobs.enqueue_many([new])
        changes.show_reason(new.task, enqueued)
        if not wait:
            return enqueued, None
        job_id = enqueued.job_id
        return enqueued, await wait_for_end(
            jobs, job_id, timeout_s=timeout_s, on_change=changes.show, tell=print_to_stderr
        )

    enqueued, job = target.ask(question)
    if job is not None:
        return _print_job_end(job, as_json=as_json, all_fields=False)
    if as_json:
        print_json(enqueued)
    else:
        note = "" if enqueued.created else f"  ({_NOTES[enqueued.did]})"
        click.echo(f"{enqueued.job_id}  {enqueued.status}{note}")
    return 0


@click.command()
@click.argument("job_id", type=click.UUID)
@click.option("--all-fields", is_flag=True, help="Show all fields, not only the most important ones.")
@wait_option
@timeout_option
@asks_queue
def status_command(
    target: AskedQueue, *, job_id: UUID, all_fields: bool, wait: bool, timeout_s: float, as_json: bool
) -> int:
    """Show a job's status, progress and result."""
    _check_timeout(timeout_s, wait=wait)

    async def question(jobs: Jobs) -> tuple[JobRecord, WaitReason | None]:
        job = await jobs.get(job_id)
        if wait:
            return await wait_for_end(
                jobs, job_id, timeout_s=timeout_s, on_change=_Changes().show, tell=print_to_stderr
            ), None
        return job, None if as_json or all_fields or job.status is not Status.QUEUED else await jobs.why(job_id)

    job, why = target.ask(question)
    if wait:
        return _print_job_end(job, as_json=as_json, all_fields=all_fields)
    _print_job_or_json(job, as_json=as_json, all_fields=all_fields, why=why)
    return 0


@click.command()
@finds_jobs
@click.option(
    "--limit",
    type=click.IntRange(1, 500),
    metavar="NUMBER",
    default=50,
    show_default=True,
    help="Maximum number of jobs.",
)
@click.option("--after", help="Cursor printed by the previous page.")
@asks_queue
def jobs_command(target: AskedQueue, *, wanted: JobFilter, limit: int, after: str | None, as_json: bool) -> None:
    """List jobs, newest first."""
    page = target.ask(lambda jobs: jobs.find(wanted, limit=limit, after=after))
    if as_json:
        print_json(page)
        return
    print_table(_COLUMNS, map(_job_row, page.jobs), nothing="no jobs")
    if page.next is not None:
        click.echo(f"more: --after {page.next}", err=True)


@click.command()
@click.argument("job_id", type=click.UUID)
@click.option(
    "--limit",
    type=click.IntRange(1, 1000),
    metavar="NUMBER",
    default=200,
    show_default=True,
    help="Maximum number of events.",
)
@click.option(
    "--after", type=row_number, metavar="NUMBER", default=0, help="Only events after the event with this number."
)
@asks_queue
def events_command(target: AskedQueue, *, job_id: UUID, limit: int, after: int, as_json: bool) -> None:
    """Show a job's event history, oldest first."""
    journal = target.ask(lambda jobs: jobs.events(job_id, after=after, limit=limit)).events
    if as_json:
        print_json(journal)
        return
    print_table(
        (Column("EVENT"), Column("AT"), Column("KIND"), Column("PAYLOAD", least=20)),
        ((event.event_id, event.ts, event.kind, _error_early(event.payload)) for event in journal),
        nothing="no events",
    )


@click.command()
@click.argument("job_id", type=click.UUID)
@click.option("--follow", is_flag=True, help="Follow the log until the job has ended.")
@click.option("--level", type=click.Choice(LEVELS), help="Only lines of this level or above.")
@click.option("--load", help="Only lines about this load of a flow.")
@click.option(
    "--limit",
    type=click.IntRange(1, 1000),
    metavar="NUMBER",
    help="Maximum number of lines, without --follow.  [default: 1000]",
)
@click.option(
    "--after",
    help="Only lines after this cursor of the previous page, or after the event with this number.",
)
@asks_queue
def logs_command(
    target: AskedQueue,
    *,
    job_id: UUID,
    follow: bool,
    level: Level | None,
    load: str | None,
    limit: int | None,
    after: str | None,
    as_json: bool,
) -> None:
    """Show a job's log lines, oldest first.

    These are the lines of `job.log`, the lines of a load, and the start and the end of each attempt.
    """
    if follow and (as_json or limit is not None):
        raise click.UsageError("--follow cannot be used with --json or --limit")

    def read(jobs: Jobs, behind: After) -> Awaitable[LogPage]:
        return jobs.logs(job_id, after=behind, limit=limit or MAX_PAGE, level=level, load=load)

    if follow:
        target.ask(lambda jobs: _follow_log(jobs, job_id, read, after))
        return
    page = target.ask(lambda jobs: read(jobs, after))
    if as_json:
        print_json(page)
        return
    _print_lines(page)
    if page.next is not None:
        click.echo(f"more: --after {page.next}", err=True)
    elif not page.lines:
        click.echo("no lines", err=True)


async def _follow_log(
    jobs: Jobs, job_id: UUID, read: Callable[[Jobs, After], Awaitable[LogPage]], after: After
) -> None:
    """Print the job's log lines until it has ended."""
    patience = Patience(job_id, print_to_stderr)
    while True:
        try:
            has_ended = (await jobs.get(job_id)).status.is_final
            page = await read(jobs, after)  # lines from before the end are visible with the end
        except StoreUnavailable as error:
            await patience.outlast(error)
            continue
        patience.answered()
        _print_lines(page)
        after = page.next or max((line.event_id for line in page.lines), default=after)
        if page.next is None:
            if has_ended:
                return
            await trio.sleep(FOLLOW_S)


def _print_lines(page: LogPage) -> None:
    for line in page.lines:
        said = (cell(line.message), cell(line.fields)) if line.kind == "log" else (_mark_text(line),)
        click.echo("  ".join(filter(None, (cell(line.ts), f"{cell(line.level):7}", *said))))


def _mark_text(line: LogLine) -> str:
    """Return the text for the start or end of an attempt; for an end with the reason and the next attempt."""
    said, given = cell(line.message), line.fields
    if line.kind == "picked" and isinstance(given.get("worker"), str):
        said += f" on {cell(given['worker'])}"
    if isinstance(given.get("error"), str):
        said += f": {first_line(given['error'])}"
    if line.kind == "requeue" and isinstance(delay_s := given.get("delay_s", 0), int | float):
        with suppress(OverflowError):  # another service may write any number
            said += f"; next at {cell(line.ts + timedelta(seconds=delay_s))}"
    return f"— {said} —"


def _error_early(payload: object) -> object:
    """Reorder a payload for a list, which cuts the end of a line: the attempt, its error, then all other fields."""
    if not isinstance(payload, dict):
        return payload
    order = {"attempt": 0, "error": 1, "fields": 3}
    short = {name: round(value, 1) if isinstance(value, float) else value for name, value in payload.items()}
    return dict(sorted(short.items(), key=lambda item: order.get(item[0], 2)))


_COLUMNS: Final = (
    Column("JOB_ID"),
    Column("STATUS"),
    Column("TASK", least=12, rank=1),
    Column("QUEUE", least=8, rank=2),
    Column("ATTEMPT", rank=3),
    Column("CREATED", rank=4),
    Column("DETAIL", least=12, rank=5),
)


def _job_row(job: JobRecord) -> tuple[object, ...]:
    attempt = f"{job.attempt}/{job.max_attempts}"
    return job.job_id, _short_state(job), job.task, job.queue, attempt, job.created_at, _detail(job)


def _short_state(job: JobRecord) -> str:
    """Return the status, and a word for the reason of a wait. The queue is first, because it blocks all of its jobs."""
    if job.cancel_requested and not job.status.is_final:
        return f"{job.status} (canceling)"
    if job.queue_state is not None and (job.queue_state is not QueueState.FULL or job.waits_for is None):
        return f"{job.status} ({job.queue_state})"
    return f"{job.status} ({job.waits_for})" if job.waits_for else str(job.status)


def _detail(job: JobRecord) -> object:
    """Return the first line of the error, or else the progress. `status` shows the whole error.

    For a running job return the progress, or the lack of heartbeats: its error is that of an earlier attempt.
    """
    if job.status is Status.RUNNING:
        return why_silent(job, datetime.now(UTC)) or job.progress
    return first_line(job.error) if job.error else job.progress


def _print_job_or_json(job: JobRecord, *, as_json: bool, all_fields: bool, why: WaitReason | None = None) -> None:
    if as_json:
        print_json(job)
    else:
        print_job(job, all_fields=all_fields, why=why)


def _print_job_end(job: JobRecord, *, as_json: bool, all_fields: bool) -> int:
    """Show the job after the wait; return the exit code for its end."""
    _print_job_or_json(job, as_json=as_json, all_fields=all_fields)
    if not job.status.is_final:
        click.echo(f"job {job.job_id} has not ended yet", err=True)
        return FAILED
    return 0 if job.status is Status.SUCCEEDED else NOT_SUCCEEDED


class _Changes:
    """Prints changes of the job during a wait, each once; in a pipe only failed attempts and waits."""

    def __init__(self) -> None:
        self._state = self._reason = ""
        self._attempt = 0

    def show(self, job: JobRecord) -> None:
        """Print the changes."""
        reason = why_job_waits(job)
        self._show_attempt(job, reason)
        self._tell(reason)
        state = f"{job.job_id}  {job_state_text(job)}  attempt {job.attempt}  {cell(job.progress)}".rstrip()
        if sys.stderr.isatty() and state != self._state:
            self._state = state
            click.echo(state, err=True)

    def _show_attempt(self, job: JobRecord, reason: str) -> None:
        """Print that an attempt failed, and why, unless the reason of the wait already has the error."""
        if job.status.is_final:
            return  # the final output has the error
        ended = job.attempt - (job.status is Status.RUNNING)
        error = first_line(job.error) if job.error else ""
        if ended != self._attempt and ended > 0 and error and error not in reason:
            goes_on = f"attempt {job.attempt} runs" if job.status is Status.RUNNING else "the job is queued again"
            click.echo(f"attempt {ended} of {job.max_attempts} failed: {error}; {goes_on}", err=True)
        self._attempt = ended

    def show_reason(self, task: str, added: Enqueued) -> None:
        """Print why an added job is not claimed, if that is new. A full queue is reported only once."""
        state = added.queue_state
        self._tell("" if state is None else why_not_taken(added.queue, task, state))

    def _tell(self, reason: str) -> None:
        if reason and reason != self._reason:
            self._reason = reason
            click.echo(f"the job waits: {reason}", err=True)

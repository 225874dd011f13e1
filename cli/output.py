"""Output of commands: a table or a list of fields for people, one JSON document for programs.

In a pipe, tables have all columns, uncut. On a terminal they are fitted to its width (drawing.py), and IDs are never
cut, so that they can be copied. Any client may have written the values of jobs: secrets in them are masked and
invisible characters are escaped, so that they cannot control the reader's terminal.
"""

from __future__ import annotations

import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from datetime import MAXYEAR, UTC, datetime
from typing import Any, Final

import attrs
import click
import msgspec

from dataloader.cli.cells import Column, cell
from dataloader.jobs.model import JobRecord
from dataloader.jobs.secrets.masking import mask
from dataloader.jobs.states import QueueState, Status, WaitsFor
from dataloader.jobs.visible import visible, visible_json
from dataloader.jobs.wait_reasons import WaitReason


def print_to_stderr(said: str) -> None:
    """Print a line to stderr. stdout is only for the result."""
    click.echo(visible(said), err=True)


def print_json(value: object, *, is_masked: bool = False) -> None:
    """Print one JSON document: a record, or a list or dictionary of them, with secrets masked unless `is_masked`."""
    plain = msgspec.to_builtins(value)
    click.echo(visible_json(msgspec.json.encode(plain if is_masked else mask(plain)).decode()))


def print_table(columns: Sequence[Column], rows: Iterable[Sequence[object]], *, nothing: str) -> None:
    """Print rows under their columns' names; if there are none, the sentence `nothing` on stderr.

    In a pipe, print all columns uncut; on a terminal what fits its width, one line per row.
    """
    table = [list(row) for row in rows]
    if not table:
        click.echo(nothing, err=True)
    elif sys.stdout.isatty():
        from dataloader.cli.drawing import draw  # noqa: PLC0415 - importing rich takes a tenth of a second

        draw(columns, table)
    else:
        cells = [[column.name for column in columns], *([cell(value) for value in row] for row in table)]
        widths = [max(map(len, texts)) for texts in zip(*cells, strict=True)]
        for line in cells:
            padded = (text.ljust(width) for text, width in zip(line, widths, strict=True))
            click.echo("  ".join(padded).rstrip())


def print_fields(fields: dict[str, object]) -> None:
    """Print one field per line. The lines of a longer text are below its name."""
    width = max(map(len, fields))
    for name, value in fields.items():
        lines = str(mask(value)).splitlines() if isinstance(value, str) else [cell(value)]
        if len(lines) > 1:
            click.echo(name)
            for line in lines:
                click.echo(f"  {visible(line)}")
        else:
            click.echo(_hanging_line(f"{name.ljust(width)}  ", visible("".join(lines))))


def _hanging_line(name: str, text: str) -> str:
    """Return a field in one line, or on a narrow terminal in several, all indented behind the name."""
    if not sys.stdout.isatty():
        return f"{name}{text}".rstrip()
    room = max(shutil.get_terminal_size().columns, len(name) + 20)
    lines = textwrap.wrap(
        text,
        room,
        initial_indent=name,
        subsequent_indent=" " * len(name),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines) or name.rstrip()


def job_state_text(job: JobRecord) -> str:
    """Return a job's status, with important additions."""
    if job.cancel_requested and not job.status.is_final:
        return f"{job.status} (cancel requested)"
    return f"{job.status} (waits for {job.waits_for})" if job.waits_for else str(job.status)


def why_not_taken(queue: str, task: str, state: QueueState) -> str:
    """Return the reason why a ready job of a queue waits, and a remedy."""
    name = repr(cell(queue))
    match state:
        case QueueState.PAUSED:
            return f"the queue {name} is paused; resume it with `dataloader resume {shlex.quote(cell(queue))}`"
        case QueueState.NO_WORKER:
            return unserved(queue)
        case QueueState.FULL:
            return f"all slots of the queue {name} are taken"
        case QueueState.UNKNOWN_TASK:
            return unknown_task(queue, task)


def unserved(queue: str) -> str:
    """Return the reason why the jobs of a queue without a worker wait."""
    return f"no worker serves the queue {cell(queue)!r}; list the served queues with `dataloader workers`"


def unknown_task(queue: str, task: str) -> str:
    """Return the reason why a job waits whose task is unknown in its queue."""
    return f"no worker of the queue {cell(queue)!r} has the task {cell(task)!r}; check its name"


_FOR_OTHERS: Final = {
    WaitsFor.LOCK: "another job with the same lock_key is running",
    WaitsFor.AFTER: "a job that it depends on has not ended",
    WaitsFor.LIMIT: "a limit of its task or supplier is reached; see `dataloader task show {task}`",
}


def why_job_waits(job: JobRecord) -> str:
    """Return the reason why a queued job does not run yet, and a remedy; the empty string if there is none.

    A queue that does not take jobs is first, because it blocks all of its jobs. A full queue does not.
    """
    if job.status is not Status.QUEUED:
        return ""
    if job.queue_state is not None and (job.queue_state is not QueueState.FULL or job.waits_for is None):
        return why_not_taken(job.queue, job.task, job.queue_state)
    match job.waits_for:
        case WaitsFor.TIME:
            due = f"attempt {job.attempt + 1} of {job.max_attempts} is due at {cell(job.available_at)}"
            return f"{due}, after: {first_line(job.error)}" if job.error else due
        case WaitsFor.LOCK | WaitsFor.AFTER | WaitsFor.LIMIT:
            return _FOR_OTHERS[job.waits_for].format(task=shlex.quote(cell(job.task)))
        case None:
            return ""


def why_silent(job: JobRecord, now: datetime) -> str:
    """Return since when a running job's lease was not renewed, and the consequence; the empty string if it is renewed.

    Healthy processes renew it three times in its length. `now` is this machine's clock, which may differ slightly from
    the database's.
    """
    if job.status is not Status.RUNNING or job.heartbeat_at is None:
        return ""
    silent_s = (now - job.heartbeat_at).total_seconds()
    if silent_s < max(job.lease_ttl_sec / 2, _LEAST_SILENCE_S):
        return ""
    ends_at = job.lease_expires_at
    if ends_at is None or ends_at.year == MAXYEAR:
        then = "its lease never expires; use `dataloader cancel` or `dataloader retry --force`"
    elif ends_at > now:
        then = f"its lease expires at {cell(ends_at)}, then the job is recovered"
    else:
        then = f"its lease expired at {cell(ends_at)}; the next running service recovers the job"
    return f"no heartbeat for {silent_s:.0f} s ({then})"


_LEAST_SILENCE_S: Final = 10.0
"""Shortest reported silence in seconds. A shorter one may be a difference of two clocks."""
_MAX_ERROR: Final = 200
"""Maximum characters of an error in a line about other things."""


def first_line(error: str) -> str:
    """Return an error without its traceback, as part of a line."""
    text = cell(error.partition("\n")[0].rstrip())
    return text if len(text) <= _MAX_ERROR else f"{text[: _MAX_ERROR - 1]}…"


def _why_fields(job: JobRecord) -> dict[str, str]:
    fields = {}
    if job.queue_state is not None:
        fields["queue_state"] = f"{job.queue_state}: {why_not_taken(job.queue, job.task, job.queue_state)}"
    if job.waits_for in {WaitsFor.LOCK, WaitsFor.LIMIT}:
        fields["waits_for"] = f"{job.waits_for}: {why_job_waits(attrs.evolve(job, queue_state=None))}"
    return fields


def _detailed_why_fields(job: JobRecord, why: WaitReason) -> dict[str, str]:
    """Return each reason once: if the queue does not take the job, our sentence with a remedy, otherwise `why`."""
    if job.queue_state in {None, QueueState.FULL}:
        name = "waits_for" if job.waits_for else "queue_state" if job.queue_state else "waits_because"
        code = f"{state}: " if (state := job.waits_for or job.queue_state) else ""
        return {name: code + " ".join([why.text, *why.also])}
    fields = _why_fields(job)
    return fields | {"waits_for": f"{job.waits_for}: {why.text}"} if job.waits_for else fields


def print_job(job: JobRecord, *, all_fields: bool, why: WaitReason | None = None) -> None:
    """Print one job, either its main fields or all fields. `why` is the detailed reason why it waits, if known."""
    fields: dict[str, Any] = {"job_id": job.job_id, "status": job_state_text(job)}
    if all_fields:
        fields = attrs.asdict(job, recurse=False)
    else:
        fields |= {"queue": job.queue, "task": job.task, "attempt": f"{job.attempt} of {job.max_attempts}"}
        fields |= {"created_at": job.created_at} | ({"moves": job.moves} if job.moves else {})
        fields |= _why_fields(job) if why is None else _detailed_why_fields(job, why)
        if job.waits_for is WaitsFor.TIME:
            fields["available_at"] = job.available_at
        for name in (
            "started_at",
            "run_started_at",
            "heartbeat_at",
            "finished_at",
            "claimed_by",
            "progress",
            "result",
            "error",
        ):
            if getattr(job, name) not in (None, {}):
                fields[name] = getattr(job, name)
        if silent := why_silent(job, datetime.now(UTC)):
            fields["heartbeat_at"] = f"{cell(job.heartbeat_at)}: {silent}"
        if job.status is Status.RUNNING and "error" in fields:
            fields["last_error"] = fields.pop("error")  # of an earlier attempt; this one may be fine
    print_fields(fields)

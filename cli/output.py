"""What commands print: a table or a list of fields for people, one JSON document for machines.

In a pipe tables are plain columns, all of them and whole; on a terminal they are drawn to fit its width (drawing.py),
and ids are never cut, so that they can be copied. Values come from jobs, which anybody may have made: secrets in them
are masked and what can't be seen is escaped, so that they can't write on the reader's terminal.
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


def tell(said: str) -> None:
    """Print a line for whoever watches on stderr: what is printed on stdout is the answer alone."""
    click.echo(visible(said), err=True)


def print_json(value: object, *, is_masked: bool = False) -> None:
    """Print one JSON document: a record, or a list or dictionary of them; secrets masked, unless they are already."""
    plain = msgspec.to_builtins(value)
    click.echo(visible_json(msgspec.json.encode(plain if is_masked else mask(plain)).decode()))


def print_table(columns: Sequence[Column], rows: Iterable[Sequence[object]], *, nothing: str) -> None:
    """Print rows under their column's names; without any, the sentence `nothing` on stderr.

    In a pipe all columns, whole; on a terminal as much as its width has room for, a line for each row.
    """
    table = [list(row) for row in rows]
    if not table:
        click.echo(nothing, err=True)
    elif sys.stdout.isatty():
        from dataloader.cli.drawing import draw  # noqa: PLC0415 - a tenth of a second for rich

        draw(columns, table)
    else:
        cells = [[column.name for column in columns], *([cell(value) for value in row] for row in table)]
        widths = [max(map(len, texts)) for texts in zip(*cells, strict=True)]
        for line in cells:
            padded = (text.ljust(width) for text, width in zip(line, widths, strict=True))
            click.echo("  ".join(padded).rstrip())


def print_fields(fields: dict[str, object]) -> None:
    """Print one field a line; the lines of a longer text stand below its name."""
    width = max(map(len, fields))
    for name, value in fields.items():
        lines = str(mask(value)).splitlines() if isinstance(value, str) else [cell(value)]
        if len(lines) > 1:
            click.echo(name)
            for line in lines:
                click.echo(f"  {visible(line)}")
        else:
            click.echo(_hung(f"{name.ljust(width)}  ", visible("".join(lines))))


def _hung(name: str, text: str) -> str:
    """A field in one line, or on a terminal that is too narrow for it, in several, all of them behind the name."""
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


def state_of(job: JobRecord) -> str:
    """A job's status, with what a reader must know beside it."""
    if job.cancel_requested and not job.status.is_final:
        return f"{job.status} (cancel requested)"
    return f"{job.status} (waits for {job.waits_for})" if job.waits_for else str(job.status)


def why_not_taken(queue: str, task: str, state: QueueState) -> str:
    """Why a job of a queue waits although it is ready, and what the reader can do."""
    name = repr(cell(queue))
    match state:
        case QueueState.PAUSED:
            return f"the queue {name} is paused; `dataloader resume` ends that"
        case QueueState.NO_WORKER:
            return unserved(queue)
        case QueueState.FULL:
            return f"all slots of the queue {name} are taken"
        case QueueState.UNKNOWN_TASK:
            return unknown_task(queue, task)


def unserved(queue: str) -> str:
    """Why the jobs of a queue wait that has no worker."""
    return f"no dataloader worker serves the queue {cell(queue)!r}; `dataloader queues` lists those that are served"


def unknown_task(queue: str, task: str) -> str:
    """Why a job waits whose task is unknown where it is queued."""
    return f"no worker of the queue {cell(queue)!r} knows the task {cell(task)!r}; is its name right?"


_FOR_OTHERS: Final = {
    WaitsFor.LOCK: "another job with its lock_key runs",
    WaitsFor.AFTER: "a job that it runs after has not ended",
    WaitsFor.LIMIT: "the limits of its task or its supplier are reached; `dataloader task show {task}` tells more",
}


def why_waits(job: JobRecord) -> str:
    """Why a queued job does not run yet, and what the reader can do; the empty text if nothing keeps it.

    A queue that does not take jobs comes first, for it holds up whatever is in it; one that is merely full does not.
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
        case WaitsFor.TASK:
            return unknown_task(job.queue, job.task)
        case None:
            return ""


def why_silent(job: JobRecord, now: datetime) -> str:
    """Since when nobody has renewed a running job's lease, and what comes of it; the empty text while somebody does.

    Healthy processes renew it three times in its length. `now` is this machine's clock, which may differ a little from
    the database's.
    """
    if job.status is not Status.RUNNING or job.heartbeat_at is None:
        return ""
    silent_s = (now - job.heartbeat_at).total_seconds()
    if silent_s < max(job.lease_ttl_sec / 2, _LEAST_SILENCE_S):
        return ""
    ends_at = job.lease_expires_at
    if ends_at is None or ends_at.year == MAXYEAR:
        then = "its lease never ends: `dataloader cancel` or `dataloader retry --force` ends that"
    elif ends_at > now:
        then = f"its lease ends at {cell(ends_at)}, then it is taken back"
    else:
        then = f"its lease ended at {cell(ends_at)}; the next service that runs takes it back"
    return f"no heartbeat for {silent_s:.0f} s ({then})"


_LEAST_SILENCE_S: Final = 10.0
"""So long a silence may be no more than two clocks that differ."""
_MAX_ERROR: Final = 200
"""Characters of an error where it is not the subject."""


def first_line(error: str) -> str:
    """What an error says, without its traceback, for a line that is about more."""
    text = cell(error.partition("\n")[0].rstrip())
    return text if len(text) <= _MAX_ERROR else f"{text[: _MAX_ERROR - 1]}…"


def print_job(job: JobRecord, *, all_fields: bool) -> None:
    """Print one job, either what says how it stands or every field."""
    fields: dict[str, Any] = {"job_id": job.job_id, "status": state_of(job)}
    if all_fields:
        fields = attrs.asdict(job, recurse=False)
    else:
        fields |= {"queue": job.queue, "task": job.task, "attempt": f"{job.attempt} of {job.max_attempts}"}
        fields |= {"created_at": job.created_at} | ({"moves": job.moves} if job.moves else {})
        if job.queue_state is not None:
            fields["queue_state"] = f"{job.queue_state}: {why_not_taken(job.queue, job.task, job.queue_state)}"
        if job.waits_for in {WaitsFor.LOCK, WaitsFor.LIMIT, WaitsFor.TASK} and (
            why := why_waits(attrs.evolve(job, queue_state=None))
        ):
            fields["waits_for"] = f"{job.waits_for}: {why}"
        if job.waits_for is WaitsFor.TIME:
            fields["available_at"] = job.available_at
        for name in ("started_at", "heartbeat_at", "finished_at", "claimed_by", "progress", "result", "error"):
            if getattr(job, name) not in (None, {}):
                fields[name] = getattr(job, name)
        if silent := why_silent(job, datetime.now(UTC)):
            fields["heartbeat_at"] = f"{cell(job.heartbeat_at)}: {silent}"
        if job.status is Status.RUNNING and "error" in fields:
            fields["last_error"] = fields.pop("error")  # of an attempt before, while this one may run well
    print_fields(fields)

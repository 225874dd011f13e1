"""Display of a load during `--wait`: a bar on a terminal, lines in a pipe, and the summary at its end.

All data is read from the job: its status, progress and result, as flows/etl writes them. The progress is printed to
stderr, the summary to stdout.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Protocol

import click

from dataloader.cli.cells import Column, cell
from dataloader.cli.output import job_state_text, print_fields, print_job, print_table, why_job_waits
from dataloader.jobs.model import JobRecord
from dataloader.jobs.states import Status

LINE_S: Final = 5.0
"""Seconds between two lines about one state of a job."""
MAX_FAILURES: Final = 10
"""Maximum failures in a summary."""
_ROWS: Final = ("inserted", "updated", "changed", "closed", "deleted", "unchanged")
PHASES: Final = {
    "requests": ("requests", "requests_failed", "details", "details_failed", "details_skipped", "segments"),
    "processing": ("records", "records_failed", "left_out", "rows", "duplicates"),
    "writing": (*_ROWS, "rows_failed", "segments_failed"),
}
"""Counts of each phase, in display order. Unknown counts are shown with the last phase."""
_SAID: Final = {"rows": "rows made"}
"""Counts with other names on the screen: the pages count the rows that are written."""


class JobScreen(Protocol):
    """Shows the job during a wait, for the duration of a block."""

    def __enter__(self) -> object: ...
    def __exit__(self, *_: object) -> None: ...
    def changed(self, job: JobRecord) -> None:
        """Show the current state of the job."""


def open_job_screen(name: str, *, as_json: bool) -> JobScreen:
    """Return a bar on a terminal, otherwise lines; with `--json` no lines."""
    if sys.stderr.isatty():
        return _Bar(name)
    return _JobLines(name, is_quiet=as_json)


class _JobLines(JobScreen):
    """Prints a line for each state of the job and each long wait, and periodically for progress."""

    def __init__(self, name: str, *, is_quiet: bool) -> None:
        self._name = name
        self._is_quiet = is_quiet
        self._state = self._wait = ""
        self._said_at = 0.0

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, *_: object) -> None:
        """Do nothing."""

    def changed(self, job: JobRecord) -> None:
        """Print the state, unless it is too soon."""
        state, wait, now = job_state_text(job), _long_wait(job), time.monotonic()
        is_new = state != self._state or wait not in {"", self._wait}
        if self._is_quiet or (now < self._said_at + LINE_S and not is_new):
            return
        self._state, self._wait, self._said_at = state, wait, now
        click.echo("  ".join(filter(None, (cell(self._name), state, *state_lines(job)))), err=True)


class _Bar(JobScreen):
    """Shows three lines: a bar of the segments, the counts with rows/s, and the reason of a wait."""

    def __init__(self, name: str) -> None:
        from rich.console import Console, Group  # noqa: PLC0415 - only with a terminal
        from rich.live import Live  # noqa: PLC0415
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415
        from rich.table import Column  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        self._progress = Progress(
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
            BarColumn(bar_width=20),
            TimeElapsedColumn(),
            TextColumn("{task.fields[state]}", markup=False, table_column=Column(no_wrap=True)),
        )
        self._bar = self._progress.add_task(cell(name), total=None, state="")
        self._lines = ("", "")
        self._first: tuple[float, int] | None = None

        def picture() -> Group:
            return Group(self._progress, *(Text(line, no_wrap=True, overflow="ellipsis") for line in self._lines))

        # While it is shown, sys.stderr is written through it, so log lines are above the bar.
        self._live = Live(console=Console(stderr=True, highlight=False), get_renderable=picture)

    def __enter__(self) -> None:
        """Begin the display."""
        self._live.start()

    def __exit__(self, *_: object) -> None:
        """End the display and keep the bar on the screen."""
        self._live.stop()

    def changed(self, job: JobRecord) -> None:
        """Update the bar."""
        if job.status.is_final:
            self._progress.update(self._bar, total=1, completed=1)
        elif isinstance(job.progress, dict) and (planned := _progress_number(job.progress, "segments_planned")):
            self._progress.update(self._bar, total=planned, completed=_segments_in(job.progress))
        self._progress.update(self._bar, state=job_state_text(job))
        waiting = _waiting(job)
        counts = state_lines(job, per_s=self._per_s(job))[1 if waiting else 0 :]
        self._lines = ("  ".join(counts), waiting)

    def _per_s(self, job: JobRecord) -> float | None:
        """Return the rows per second since the job was first seen running."""
        if job.status is not Status.RUNNING or not isinstance(job.progress, dict):
            return None
        now, rows = time.monotonic(), _rows_in(job.progress)
        self._first = self._first or (now, rows)
        seconds = now - self._first[0]
        return (rows - self._first[1]) / seconds if seconds else None


_OF_A_LOAD: Final = frozenset({"segment", "requests", "rows"})
"""Fields in the progress of a load or a flow that other tasks do not have."""
_MIDNIGHT: Final = "T00:00:00+0000"
"""Text that is left out of the segments of a day."""


def state_lines(job: JobRecord, *, per_s: float | None = None) -> list[str]:
    """Return a job's state in words: the reason of its wait in the queue, or its progress."""
    if job.status is Status.QUEUED:
        return [why] if (why := why_job_waits(job)) else []
    progress = job.progress
    if not isinstance(progress, dict):
        return []
    if "tables" in progress:
        return [f"tables {_progress_number(progress, 'tables_done'):,} of {_progress_number(progress, 'tables'):,}"]
    if not _OF_A_LOAD & progress.keys():  # of another task, with any content
        return [cell(progress)] if progress else []
    said = [waiting] if (waiting := _waiting(job)) else []
    said.append(f"rows made {_rows_in(progress):,}" + ("" if per_s is None else f" ({per_s:,.0f}/s)"))
    said.append(f"requests {_progress_number(progress, 'requests'):,}")
    # A segment mostly fails because of a request, which is already counted.
    failed_segments = _progress_number(progress, "segments_failed")
    failed = sum(_progress_number(progress, name) for name in progress if name.endswith("_failed")) - failed_segments
    if failed:
        said.append(f"failed {failed:,}")
    if planned := _progress_number(progress, "segments_planned"):
        told = f" ({failed_segments:,} failed)" if failed_segments else ""
        said.append(f"segments {_segments_in(progress):,} of {planned:,}{told}")
    elif failed_segments:
        said.append(f"segments failed {failed_segments:,}")
    said += [cell(progress[name]) for name in ("load", "segment") if progress.get(name) not in {None, "", job.task}]
    return [text.replace(_MIDNIGHT, "") for text in said]


def _long_wait(job: JobRecord) -> str:
    """Return a job's reason to wait if it outlasts a line, so that no line follows; otherwise the empty string."""
    if job.queue_state is not None:
        return job.queue_state
    waiting = job.progress.get("waiting") if isinstance(job.progress, dict) else None
    if job.status is not Status.RUNNING or not isinstance(waiting, dict):
        return ""
    try:
        until = datetime.fromisoformat(waiting["until"])
        is_long = until > datetime.now(UTC) + timedelta(seconds=LINE_S)
    except (KeyError, TypeError, ValueError):
        is_long = True
    return f"{waiting.get('for')} {waiting.get('source')}" if is_long else ""


_AT_SOURCE: Final = {
    "request": "another run's request to",
    "pause": "the pause of",
    "retry-after": "the Retry-After of",
    "rate-limit": "the rate limit of",
    "error": "the limits, which cannot be evaluated, of",
}
"""Reasons of a wait at a source, in words."""


def _waiting(job: JobRecord) -> str:
    """Return a run's reason to wait and its end; the empty string if it does not wait."""
    waiting = job.progress.get("waiting") if isinstance(job.progress, dict) else None
    if job.status is not Status.RUNNING or not isinstance(waiting, dict):
        return ""
    reason, source = waiting.get("for"), waiting.get("source")
    words = f"waits for {cell(_AT_SOURCE.get(reason, reason) if isinstance(reason, str) else reason)}"
    if source:
        words += f" {cell(source)}"
    try:
        return f"{words} until {cell(datetime.fromisoformat(waiting['until'])).partition(' ')[2]}"
    except (KeyError, TypeError, ValueError):
        return words


def _progress_number(counts: Mapping[str, Any], name: str) -> int:
    value = counts.get(name, 0)
    return value if isinstance(value, int) else 0


def _rows_in(progress: Mapping[str, Any]) -> int:
    """Return the rows made from records. They are in their table when their segment is complete."""
    return _progress_number(progress, "rows")


def _segments_in(progress: Mapping[str, Any]) -> int:
    """Return the number of finished segments, including failed ones."""
    return _progress_number(progress, "segments") + _progress_number(progress, "segments_failed")


def print_summary(job: JobRecord) -> None:
    """Print the end of a load or a flow: its counts and failures. For other jobs, print their fields."""
    result = job.result if isinstance(job.result, dict) else {}
    status = result.get("status") if job.status is Status.SUCCEEDED else None
    fields: dict[str, object] = {"job_id": job.job_id, "status": status or job_state_text(job)}
    if job.error:
        fields["error"] = job.error.partition("\n")[0]
    elif reason := result.get("reason"):
        fields["failed" if status != "succeeded" else "reason"] = reason
    if isinstance(counts := result.get("counts"), dict):
        fields["seconds"] = result.get("seconds")
        print_fields(fields | _by_phase(counts, result.get("phases")))
        _print_failures(job, [result])
    elif isinstance(tasks := result.get("tasks"), dict):
        print_fields(fields)
        click.echo()
        rows = [
            row for name in sorted(tasks, key=lambda name: _began(tasks[name])) for row in _task_rows(name, tasks[name])
        ]
        columns = (Column("TASK"), Column("STATUS"), Column("SECONDS", rank=1), Column("COUNTS", folds=True))
        print_table(columns, rows, nothing="no task has started")
        _print_failures(job, list(tasks.values()))
    else:
        print_job(job, all_fields=False)
        if job.status is Status.SUCCEEDED:
            click.echo(f"{cell(job.task)} is a plain task, not a load or a flow", err=True)


def _began(summary: Mapping[str, Any]) -> str:
    """Return the time when a task first worked: the database keeps no order of names."""
    parts = {**summary.get("phases", {}), **summary.get("tables", {})}
    return min((part["began_at"] for part in parts.values() if part.get("began_at")), default="")


def _task_rows(name: str, summary: Mapping[str, Any]) -> list[tuple[object, ...]]:
    """Return the row of a task in a flow, or the rows of all tables in a set of dimensions."""
    if isinstance(tables := summary.get("tables"), dict):
        return [(f"{name}: {table}", one.get("status"), None, one.get("counts")) for table, one in tables.items()]
    return [(name, summary.get("status"), summary.get("seconds"), summary.get("counts") or summary.get("reason"))]


def _by_phase(counts: Mapping[str, Any], phases: object) -> dict[str, object]:
    known = {name for names in PHASES.values() for name in names}
    found: dict[str, object] = {}
    for phase, names in PHASES.items():
        listed = [*names, *(() if phase != "writing" else sorted(counts.keys() - known))]
        said = [
            f"{_SAID.get(name, name).replace('_', ' ')} {cell(counts[name])}" for name in listed if counts.get(name)
        ]
        times = phases.get(phase) if isinstance(phases, dict) else None
        if isinstance(times, dict) and times.get("busy_s"):
            said.append(f"busy {cell(times['busy_s'])} s")
        found[phase] = ", ".join(said) or "nothing"
    return found


def _print_failures(job: JobRecord, summaries: Sequence[Mapping[str, Any]]) -> None:
    failures = [failure for summary in summaries for failure in summary.get("failures", [])]
    if not failures:
        return
    shown = failures[:MAX_FAILURES]
    columns = {
        "segment": Column("SEGMENT", least=10, rank=2),
        "phase": Column("PHASE", rank=3),
        "item": Column("ITEM", least=10, rank=1),
        "error": Column("ERROR", least=40),
    }
    rows = [[failure.get(name) for name in columns] for failure in shown]
    for row in rows:
        row[0] = cell(row[0]).replace(_MIDNIGHT, "")
    click.echo()
    print_table(list(columns.values()), rows, nothing="")
    if len(failures) > len(shown) or sys.stdout.isatty():
        click.echo(f"all failures, with full texts: dataloader etl failures --run {job.job_id} --json", err=True)

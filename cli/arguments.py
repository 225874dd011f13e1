"""Argument types of several commands: timestamps, JSON objects, and the filter for jobs.

Invalid values are click's usage errors: one line that names the option, exit code 2.
"""

from __future__ import annotations

import functools
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import click
import msgspec

from dataloader.jobs.former_names import former_value, renamed
from dataloader.jobs.states import Status

_SPAN: Final = re.compile(r"(\d{1,6})([smhd])")
_UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


class RenamedChoice(click.Choice[str]):
    """Choice whose former values are refused with their new names."""

    def __init__(self, choices: Iterable[str], former: Mapping[str, str]) -> None:
        super().__init__([str(choice) for choice in choices])
        self.former = former

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Convert like click."""
        if value in self.former:
            self.fail(former_value(value, self.former[value]), param, ctx)
        return super().convert(value, param, ctx)


def former_option(former: str, new: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator for a command whose option `former` is now named `new`: the former name is refused with it."""

    def refuse(_context: click.Context, _option: click.Parameter, value: str | None) -> None:
        if value is not None:
            raise click.UsageError(f"the option {former} {renamed(new)}")

    return click.option(former, hidden=True, expose_value=False, callback=refuse)


def instant_before_now(text: str) -> datetime:
    """Return the timestamp of an RFC 3339 text, or of a span such as `90s`, `15m`, `2h`, `7d` before now."""
    return _parse_instant(text, -1)


def instant_after_now(text: str) -> datetime:
    """Return a timestamp like `instant_before_now`, with a span counted from now on."""
    return _parse_instant(text, 1)


def _parse_instant(text: str, sign: int) -> datetime:
    try:
        if span := _SPAN.fullmatch(text):
            return datetime.now(UTC) + sign * timedelta(**{_UNITS[span[2]]: int(span[1])})
        instant = datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        instant = None
    if instant is None or instant.tzinfo is None:
        allowed = "a timestamp with a time zone, such as 2026-01-31T06:00:00Z, or a duration: 90s, 15m, 2h, 7d"
        raise click.BadParameter(f"must be {allowed}, not {text!r}")
    return instant


def row_number(text: str | int) -> int:
    """Return the number of a row in one of the queue's tables."""
    number = int(text) if re.fullmatch(r"[0-9]{1,19}", str(text)) else -1
    if not 0 <= number < 2**63:
        raise click.BadParameter(f"must be an integer of at least 0, not {text!r}")
    return number


def span_to_wait(value: str | float) -> float:
    """Return a number of seconds from 0 on, or `inf`."""
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not seconds >= 0:
        raise click.BadParameter(f"must be a number of seconds, at least 0, not {value!r}")
    return seconds


def day_or_instant(text: str) -> str:
    """Return the text if it is a day or a timestamp, or the timestamp of a duration such as `7d` before now.

    Without a time zone, it is in that of the load's windows.
    """
    if _SPAN.fullmatch(text):
        return instant_before_now(text).isoformat(timespec="seconds")
    for kind in (date, datetime):
        try:
            kind.fromisoformat(text)
        except ValueError:
            continue
        return text
    allowed = (
        "a date or a timestamp, such as 2026-01-31 or 2026-01-31T06:00Z, or a duration before now: 90s, 15m, 2h, 7d"
    )
    raise click.BadParameter(f"must be {allowed}, not {text!r}")


def json_object(text: str) -> dict[str, Any]:
    """Return the JSON object in the text, in the file after an `@`, or, for `-`, on standard input."""
    return _parse_json(text, dict[str, Any], "a JSON object")  # type: ignore[no-any-return]


def json_value(text: str) -> Any:
    """Return any JSON value, given as for `json_object`."""
    return _parse_json(text, Any, "JSON")


def _parse_json(text: str, kind: Any, said: str) -> Any:
    try:
        if text == "-":
            encoded = sys.stdin.buffer.read()
        else:
            encoded = Path(text[1:]).read_bytes() if text.startswith("@") else text.encode()
        return msgspec.json.decode(encoded, type=kind)
    except OSError as error:
        raise click.BadParameter(f"{text[1:]}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeError) as error:
        raise click.BadParameter(f"must be {said}: {error}") from error
    except RecursionError as error:
        raise click.BadParameter("is nested too deeply") from error


def some_statuses(text: str) -> frozenset[Status]:
    """Return one status, or several separated by commas."""
    try:
        return frozenset(Status(name.strip()) for name in text.split(","))
    except ValueError:
        allowed = f"one of {', '.join(Status)}, or several separated by commas"
        raise click.BadParameter(f"must be {allowed}, not {text!r}") from None


def finds_jobs(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that choose jobs to a command, which gets them as `wanted`, a `JobFilter`."""

    @click.option("--queue", help="Only jobs of this queue.")
    @click.option("--task", help="Only jobs of this task.")
    @click.option(
        "--status",
        multiple=True,
        type=some_statuses,
        metavar="STATUS",
        help=f"Only jobs with this status, or several separated by commas: {', '.join(Status)}.",
    )
    @click.option("--lock-key", help="Only jobs with this lock_key.")
    @click.option("--worker", help="Only jobs that this worker process runs.")
    @click.option("--schedule", help="Only jobs of this schedule.")
    @click.option("--root", type=click.UUID, metavar="JOB_ID", help="Only this job and the jobs with it as their root.")
    @click.option(
        "--error-group", metavar="GROUP", help="Only jobs of this error group (see `dataloader errors list`)."
    )
    @click.option(
        "--since",
        type=instant_before_now,
        metavar="TIMESTAMP",
        help="Only jobs created since: a timestamp, or 15m, 2h, 7d ago.",
    )
    @click.option(
        "--until",
        type=instant_before_now,
        metavar="TIMESTAMP",
        help="Only jobs created before: a timestamp or duration, as above.",
    )
    @click.option(
        "--ended-since",
        type=instant_before_now,
        metavar="TIMESTAMP",
        help="Only jobs that ended since: a timestamp, or 15m, 2h, 7d ago.",
    )
    @click.option(
        "--ended-until",
        type=instant_before_now,
        metavar="TIMESTAMP",
        help="Only jobs that ended before: a timestamp or duration, as above.",
    )
    @functools.wraps(command)
    def with_filter(
        *args: Any,
        queue: str | None,
        task: str | None,
        status: tuple[frozenset[Status], ...],
        lock_key: str | None,
        worker: str | None,
        schedule: str | None,
        root: UUID | None,
        error_group: str | None,
        since: datetime | None,
        until: datetime | None,
        ended_since: datetime | None,
        ended_until: datetime | None,
        **options: Any,
    ) -> Any:
        from dataloader.jobs.listings import JobFilter  # noqa: PLC0415

        wanted = JobFilter(
            queue=queue,
            task=task,
            status=frozenset().union(*status) or None,
            lock_key=lock_key,
            worker=worker,
            schedule=schedule,
            created_from=since,
            created_to=until,
            finished_from=ended_since,
            finished_to=ended_until,
            root=root,
            error_group=error_group,
        )
        return command(*args, wanted=wanted, **options)

    return with_filter

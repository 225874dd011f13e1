"""Statistics of runs: how many ended in an hour or a day, by queue, task and outcome, and their durations."""

from __future__ import annotations

import enum
from datetime import datetime
from typing import Annotated, Final, Literal

import attrs

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.model import MAX_NAME, Instant, about, check_instant, check_text
from dataloader.jobs.page_cursor import Next, PageCursor
from dataloader.jobs.secrets.record_masks import SENSITIVE
from dataloader.jobs.states import Status, Step

Span = Literal["hour", "day", "total"]
"""Period of one row of statistics: an hour, a day in UTC, or the whole requested time."""


class RunOutcome(enum.StrEnum):
    """Outcome of a run.

    `EXPIRED`: its lease ended, and its job returned to the queue. `LOST`: its lease and its job ended. A run of a stage
    whose job has moved on has `SUCCEEDED`.
    """

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    RETRIED = "retried"
    SNOOZED = "snoozed"
    RETURNED = "returned"
    CANCELED = "canceled"
    EXPIRED = "expired"
    LOST = "lost"


_OF_STEPS: Final = {
    Step.SUCCEED: RunOutcome.SUCCEEDED,
    Step.FAIL: RunOutcome.FAILED,
    Step.RETRY: RunOutcome.RETRIED,
    Step.SNOOZE: RunOutcome.SNOOZED,
    Step.RETURN: RunOutcome.RETURNED,
    Step.CLOSE: RunOutcome.RETURNED,
    Step.CANCEL: RunOutcome.CANCELED,
    Step.MOVE: RunOutcome.SUCCEEDED,
}


def outcome_of_run(step: Step, status: Status | None) -> RunOutcome:
    """Return the outcome of a run that ended with `step`. `status` is the job's afterwards; None if unknown."""
    return _OF_STEPS[step] if status is None or status is Status.QUEUED else RunOutcome(status)


@attrs.define(eq=False)
class RunSum:
    """Number of runs, and their durations in seconds: the total, and the longest."""

    runs: int = 0
    total_s: float = 0.0
    max_s: float = 0.0

    def add(self, run_s: float) -> None:
        """Count a run of `run_s` seconds."""
        self.runs += 1
        self.total_s += run_s
        self.max_s = max(self.max_s, run_s)


@attrs.frozen(kw_only=True)
class RunStats:
    """Runs of a queue and a task that ended with an outcome within an hour, a day, or the whole time."""

    at: Annotated[Instant, about("Begin of the hour, the day (in UTC) or the whole period.")]
    queue: Annotated[str, about("Name of the queue."), SENSITIVE]
    task: Annotated[str, about("Name of the task."), SENSITIVE]
    outcome: Annotated[
        RunOutcome,
        about("Outcome of the runs; `expired`: the lease expired and the job was requeued; `lost`: and the job ended."),
    ]
    runs: Annotated[int, about("Number of runs that ended.")]
    total_s: Annotated[float, about("Total duration of the runs, in seconds.")]
    mean_s: Annotated[float, about("Mean duration of a run, in seconds.")]
    max_s: Annotated[float, about("Maximum duration of a run, in seconds.")]


@attrs.frozen
class RunStatsPage:
    """Page of statistics, by time, queue, task and outcome."""

    stats: Annotated[list[RunStats], about("Statistics.")]
    next: Next


BY_RUN: Final = PageCursor(tuple[Instant, str, str, str])
"""Order of statistics: time, queue, task, outcome."""


@attrs.frozen(kw_only=True)
class StatsFilter:
    """Filter of statistics: from the hour or day that contains `begin` to `end` (exclusive), by queue and task.

    A field that is None matches all. Raises `BadRequest`.
    """

    begin: datetime
    end: datetime | None = None
    queue: str | None = None
    task: str | None = None
    by: Span = "hour"

    def __attrs_post_init__(self) -> None:
        """Refuse values that no row can have."""
        check_instant("begin", self.begin)
        if self.end is not None:
            check_instant("end", self.end)
            if self.end <= self.begin:
                raise BadRequest("end", f"must be later than begin, not {self.end.isoformat()}")
        for name in ("queue", "task"):
            text = getattr(self, name)
            if text is not None:
                check_text(name, text, MAX_NAME)

"""Failures: groups of jobs by their error, and the error log, with a row for each failed run.

The jobs of a group have one task, and errors with the same first line after replacement of the parts that differ
between jobs: quoted texts become `…`, words with a digit become `#`. The rule is in
store/migrations/functions/failures.sql.
"""

from __future__ import annotations

import math
import re
from datetime import datetime
from typing import Annotated, Final, Literal, get_args
from uuid import UUID

import attrs
from msgspec import Meta

from dataloader.jobs.errors import BadRequest, NotFound
from dataloader.jobs.model import Instant, about, check_instant
from dataloader.jobs.page_cursor import Next
from dataloader.jobs.secrets.record_masks import SENSITIVE, Public
from dataloader.jobs.states import Status

FailureState = Literal["waiting", "failed"]
"""`waiting`: the job failed and waits for its next attempt. `failed`: it failed for good, or its worker was lost."""
STATUSES: Final = {
    "waiting": frozenset({Status.QUEUED}),
    "failed": frozenset({Status.FAILED, Status.LOST}),
    None: frozenset({Status.QUEUED, Status.FAILED, Status.LOST}),
}
"""Statuses of the jobs of each state, and of all."""
MAX_SPREAD_S: Final = 30 * 86_400.0
"""Longest time over which a group's next attempts are spread."""
_ID: Final = re.compile(r"[0-9a-f]{16}(?:\.[0-9a-f]{16})?")

GroupId = Annotated[str, about("ID of the group, which its jobs have as `error_group`."), Public("a digest")]


class ErrorGroupNotFound(NotFound):
    """No job has failed with such an error, as far as the error log goes back."""


def group_id(group: int, exact: int | None) -> str:
    """Return the ID of a group from its number and, for an exact group, the number of its line."""
    return ".".join(f"{number & (2**64 - 1):016x}" for number in (group, exact) if number is not None)


def group_key(name: str, text: str) -> tuple[int, int | None]:
    """Return the numbers of an ID. Raises `BadRequest` for field `name`."""
    if not _ID.fullmatch(text):
        raise BadRequest(name, f"must be the ID of an error group, not {text!r:.60}")
    group, *exact = (int.from_bytes(bytes.fromhex(part), signed=True) for part in text.split("."))
    return group, exact[0] if exact else None


def group_number(name: str, text: str) -> int:
    """Return the number of an ID's group, without that of an exact text. Raises `BadRequest` for field `name`."""
    number, _ = group_key(name, text)
    return number


def check_state(state: str | None) -> None:
    """Raise `BadRequest` for an unknown state."""
    if state is not None and state not in STATUSES:
        raise BadRequest("state", f"must be {' or '.join(get_args(FailureState))}, not {state!r:.60}")


@attrs.frozen(kw_only=True)
class ErrorGroup:
    """Jobs of one task that failed with the same error, for good or until their next attempt."""

    group: GroupId
    task: Annotated[str, about("Task of the jobs."), SENSITIVE]
    error: Annotated[
        str, about("Common first line of the errors, with … for quoted texts and # for words with digits."), SENSITIVE
    ]
    jobs: Annotated[int, about("Number of jobs.")]
    waiting: Annotated[int, about("Number of jobs that wait for their next attempt.")]
    first_created_at: Annotated[Instant, about("Creation time of the oldest job.")]
    last_created_at: Annotated[Instant, about("Creation time of the newest job.")]
    example: Annotated[UUID, about("ID of the newest job.")]


@attrs.frozen
class ErrorGroupPage:
    """Page of the groups, those with the most jobs first."""

    groups: Annotated[list[ErrorGroup], about("Groups.")]
    next: Next


@attrs.frozen(kw_only=True)
class GroupRetry:
    """Retry of the jobs of a group. Raises `BadRequest` for a value that is not allowed.

    Args:
        group: the group's ID.
        state: only jobs that wait for their next attempt, or only jobs that failed for good.
        at: start time; None or a past time means now.
        spread_s: seconds after `at` over which the jobs are spread randomly, 0 to 2,592,000 (30 days).
    """

    group: str
    state: FailureState | None = None
    at: datetime | None = None
    spread_s: float = 0.0

    def __attrs_post_init__(self) -> None:
        """Refuse values that are not allowed."""
        group_key("group", self.group)
        check_state(self.state)
        if self.at is not None:
            check_instant("at", self.at)
        if not (math.isfinite(self.spread_s) and 0 <= self.spread_s <= MAX_SPREAD_S):
            raise BadRequest("spread_s", f"must be a number from 0 to {MAX_SPREAD_S:,.0f}, not {self.spread_s}")


@attrs.frozen
class GroupRetried:
    """Number of retried jobs, and the cursor for the next request."""

    changed: Annotated[int, about("Number of retried jobs.")]
    next: Annotated[
        str | None,
        Meta(description="Pass it as `after` to continue with the remaining jobs; null after the last."),
        Public("a cursor has the place of a row"),
    ]


@attrs.frozen(kw_only=True)
class ErrorRecord:
    """Failed run. The record stays when its job is deleted."""

    error_id: Annotated[int, about("Number of the entry, in ascending order of time.")]
    at: Annotated[Instant, about("Time of the failure.")]
    job_id: Annotated[UUID, about("ID of the job.")]
    task: Annotated[str, about("Task."), SENSITIVE]
    queue: Annotated[str, about("Queue."), SENSITIVE]
    attempt: Annotated[int, about("Number of the attempt.")]
    worker: Annotated[str | None, about("Process that ran the job; null for another service's."), SENSITIVE]
    status: Annotated[Status, about("Status of the job after the failure: queued for another attempt, failed or lost.")]
    group: GroupId
    error: Annotated[str, about("Error, at most 4,000 characters."), SENSITIVE]


@attrs.frozen
class ErrorPage:
    """Page of the error log, latest first."""

    errors: Annotated[list[ErrorRecord], about("Errors.")]
    next: Next

"""Bulk operations, which outlive their requester: their records, and the checks of new ones.

The jobs are frozen when an operation begins. Jobs that match its filter later are not included, and a job that fails
again after a retry is not retried again. An actor of any process does the work, batch by batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal
from uuid import UUID

import attrs

from dataloader.jobs.contract import Change
from dataloader.jobs.errors import BadRequest, NotFound
from dataloader.jobs.listings import EVERY_JOB, JobFilter
from dataloader.jobs.model import MAX_INT, Instant, about, check_between
from dataloader.jobs.page_cursor import Next

COUNTED: Final = 10_000
"""Maximum number of jobs counted before an operation begins; beyond it the count is "at least" this number."""
MAX_CHOSEN: Final = 1_000
"""Maximum number of jobs named by their IDs."""
NOT_TYPED: Final = 1_000
"""An operation on more jobs than this is confirmed by typing their number."""

Action = Literal["cancel", "retry", "run_now", "set_priority"]
BulkState = Literal["open", "done", "stopped", "failed"]


class BulkNotFound(NotFound):
    """No bulk operation has this ID."""


@attrs.frozen
class BulkCount:
    """Number of jobs that a bulk operation would change now."""

    jobs: Annotated[int, about("Jobs that would be changed; counting ends at 10,000.")]
    exact: Annotated[bool, about("Whether there are no more: else there are at least so many.")]
    left_out: Annotated[
        int, about("Jobs that match and wake durable processes, which a cancel leaves out; counting ends at 10,000.")
    ] = 0

    @property
    def leaves_out(self) -> str | None:
        """Sentence about the jobs that are left out, or None."""
        if not self.left_out:
            return None
        if self.left_out == 1:
            return "1 job that wakes a durable process is left out: stop its step, or remove the process."
        number = f"{self.left_out:,}" if self.left_out < COUNTED else f"at least {COUNTED:,}"
        return f"Left out: {number} jobs that wake durable processes. Stop their steps, or remove the processes."


@attrs.frozen(kw_only=True)
class BulkRecord:
    """Bulk operation and its progress."""

    bulk_id: Annotated[UUID, about("The act's id.")]
    action: Annotated[Action, about("What is done to the jobs.")]
    priority: Annotated[int | None, about("The new priority, for `set_priority`.")]
    filter: Annotated[Mapping[str, Any], about("Which jobs were meant; `chosen`: so many were named by their ids.")]
    actor: Annotated[str, about("The operator.")]
    created_at: Annotated[Instant, about("When its jobs were frozen.")]
    jobs: Annotated[int, about("Jobs that were frozen.")]
    done: Annotated[int, about("Jobs that were looked at.")]
    changed: Annotated[int, about("Jobs of these that were changed; the others had ended or were changed meanwhile.")]
    error: Annotated[str | None, about("Why its last batch could not be done.")]
    stopped_by: Annotated[str | None, about("The operator who has stopped it.")]
    ended_at: Annotated[Instant | None, about("When it ended.")]
    state: Annotated[BulkState, about("open: work is left; done; stopped: by an operator; failed: see `error`.")]


@attrs.frozen
class BulkPage:
    """Page of bulk operations, latest first."""

    bulk: Annotated[list[BulkRecord], about("The acts.")]
    next: Next


Chosen = JobFilter | Sequence[UUID]
"""Jobs of a bulk operation: those that match a filter, or those with these IDs."""


def check_act(change: Change, chosen: Chosen) -> None:
    """Raise `BadRequest` for an invalid operation, and for one on no job or on every job."""
    if change.force:
        raise BadRequest("force", "is for one job, not for many")
    if change.action == "set_priority":
        check_between("priority", change.priority, 0, MAX_INT)
    if isinstance(chosen, JobFilter):
        if chosen == EVERY_JOB:
            raise BadRequest("filter", "must have a criterion, such as queue or status: an empty one means every job")
    elif not 1 <= len(chosen) <= MAX_CHOSEN:
        raise BadRequest("job_ids", f"must be from 1 to {MAX_CHOSEN:,} ids, not {len(chosen):,}; use a filter for more")

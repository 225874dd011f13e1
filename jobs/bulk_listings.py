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
from dataloader.jobs.secrets.record_masks import SENSITIVE, Public

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

    jobs: Annotated[int, about("Jobs that would be changed, counted up to 10,000.")]
    exact: Annotated[bool, about("True if `jobs` is exact, false if there are more.")]
    left_out: Annotated[
        int, about("Matching jobs that wake durable processes and that a cancel skips, counted up to 10,000.")
    ] = 0

    @property
    def leaves_out(self) -> str | None:
        """Sentence about the jobs that are left out, or None."""
        if not self.left_out:
            return None
        if self.left_out == 1:
            return "1 job that wakes a durable process is skipped: stop its step, or remove the process."
        number = f"{self.left_out:,}" if self.left_out < COUNTED else f"at least {COUNTED:,}"
        return f"{number} jobs that wake durable processes are skipped: stop their steps, or remove the processes."


@attrs.frozen(kw_only=True)
class BulkRecord:
    """Bulk operation and its progress."""

    bulk_id: Annotated[UUID, about("ID of the bulk operation.")]
    action: Annotated[Action, about("Change of the jobs.")]
    priority: Annotated[int | None, about("New priority, for `set_priority`.")]
    filter: Annotated[
        Mapping[str, Any],
        about("Filter of the jobs; `chosen`: number of jobs given by their IDs."),
        Public("stored without secrets"),
    ]
    actor: Annotated[str, about("Operator who started it."), SENSITIVE]
    created_at: Annotated[Instant, about("Time at which its set of jobs was fixed.")]
    jobs: Annotated[int, about("Number of jobs.")]
    done: Annotated[int, about("Number of processed jobs.")]
    changed: Annotated[
        int, about("Number of changed jobs. The other processed jobs had ended or changed in the meantime.")
    ]
    error: Annotated[str | None, about("Error of the last batch."), SENSITIVE]
    stopped_by: Annotated[str | None, about("Operator who stopped it."), SENSITIVE]
    ended_at: Annotated[Instant | None, about("End time.")]
    state: Annotated[BulkState, about("`open`: in progress; `done`; `stopped`: by an operator; `failed`: see `error`.")]


@attrs.frozen
class BulkPage:
    """Page of bulk operations, latest first."""

    bulk: Annotated[list[BulkRecord], about("Bulk operations.")]
    next: Next


Chosen = JobFilter | Sequence[UUID]
"""Jobs of a bulk operation: those that match a filter, or those with these IDs."""


def check_act(change: Change, chosen: Chosen) -> None:
    """Raise `BadRequest` for an invalid operation, and for one on no job or on every job."""
    if change.force:
        raise BadRequest("force", "is not supported for bulk operations")
    if change.action == "set_priority":
        check_between("priority", change.priority, 0, MAX_INT)
    if isinstance(chosen, JobFilter):
        if chosen == EVERY_JOB:
            raise BadRequest(
                "filter", "must have a criterion, such as queue or status; an empty filter would match all jobs"
            )
    elif not 1 <= len(chosen) <= MAX_CHOSEN:
        raise BadRequest(
            "job_ids", f"must have 1 to {MAX_CHOSEN:,} IDs, not {len(chosen):,}; use a filter for more jobs"
        )

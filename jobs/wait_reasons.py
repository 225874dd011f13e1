"""Reasons why a job does not run now: a true sentence, and its parts for machines."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Final, Literal
from uuid import UUID

import attrs

from dataloader.jobs.model import Instant, about
from dataloader.jobs.secrets.record_masks import SENSITIVE, Public

Cause = Literal[
    "ended", "superseded", "running", "lease_ended", "canceling", "time", "after", "key", "foreign_lock", "key_free",
    "unknown_task", "queue_paused", "no_worker", "task_paused", "period", "max_running", "partition", "batch",
    "supplier_paused", "supplier_period", "budget", "limit_error", "slots", "next",
]  # fmt: skip
"""Reason why a job does not run.

ended, superseded, running, lease_ended: it does not wait. canceling: it will be canceled. time: it is not due. after:
jobs that it runs after have not ended. key: a job with its lock_key runs. foreign_lock: a session has locked its
lock_key. key_free: its lock_key has just become free. unknown_task: no worker of its queue knows its task.
queue_paused, no_worker, slots: its queue is paused, has no worker, or has no free slot. task_paused, period,
max_running, partition, batch: its task's limits. supplier_paused, supplier_period, budget: the limits of the task's
supplier. limit_error: the limits of its task or supplier cannot be evaluated. next: nothing delays it.
"""
MOST_NAMED: Final = 5
"""Maximum number of jobs that a reason names."""


@attrs.frozen(kw_only=True)
class LockingSession:
    """Database session that holds a key; fields that the database does not show us are null."""

    pid: Annotated[int, about("Process ID of its backend.")]
    application: Annotated[str | None, about("Application name."), SENSITIVE]
    user: Annotated[str | None, about("Role."), SENSITIVE]
    address: Annotated[str | None, about("Client address."), Public("an IP address")]
    connected_at: Annotated[Instant | None, about("Time of its connection.")]


@attrs.frozen(kw_only=True)
class WaitReason:
    """Reason why a job does not run now."""

    job_id: Annotated[UUID, about("ID of the job.")]
    cause: Annotated[Cause, about("Cause, for programs.")]
    text: Annotated[str, about("Cause, as a sentence."), SENSITIVE]
    since: Annotated[Instant | None, about("Time since which it applies; null if unknown.")] = None
    until: Annotated[Instant | None, about("Time until which it applies, if known.")] = None
    jobs: Annotated[list[UUID], about("Jobs that it waits for, at most five.")] = attrs.field(factory=list)
    ahead: Annotated[
        int | None, about("Number of jobs before it that wait for the same; 10,000 means at least 10,000.")
    ] = None
    session: Annotated[LockingSession | None, about("Database session that holds its key, if no job does.")] = None
    also: Annotated[list[str], about("Further causes, once this one is resolved."), SENSITIVE] = attrs.field(
        factory=list
    )


def at(instant: datetime) -> str:
    """Return a timestamp as text for a sentence."""
    return f"{instant.astimezone(UTC):%Y-%m-%d %H:%M:%S}Z"

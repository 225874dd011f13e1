"""Reasons why a job does not run now: a true sentence, and its parts for machines."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Final, Literal
from uuid import UUID

import attrs

from dataloader.jobs.model import Instant, about

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

    pid: Annotated[int, about("The number of its server process.")]
    application: Annotated[str | None, about("What it calls itself.")]
    user: Annotated[str | None, about("Its role.")]
    address: Annotated[str | None, about("Where it comes from.")]
    connected_at: Annotated[Instant | None, about("Since when it is connected.")]


@attrs.frozen(kw_only=True)
class WaitReason:
    """Reason why a job does not run now."""

    job_id: Annotated[UUID, about("The job's id.")]
    cause: Annotated[Cause, about("What keeps it, for machines.")]
    text: Annotated[str, about("The same as a sentence.")]
    since: Annotated[Instant | None, about("Since when that is so; null if nobody knows.")] = None
    until: Annotated[Instant | None, about("Until when, if that is known.")] = None
    jobs: Annotated[list[UUID], about("The jobs that keep it, five at most.")] = attrs.field(factory=list)
    ahead: Annotated[int | None, about("How many wait for the same and come before it; 10,000: so many, or more.")] = (
        None
    )
    session: Annotated[LockingSession | None, about("The session that holds its key, if no job of ours does.")] = None
    also: Annotated[list[str], about("What will keep it besides, once that is over.")] = attrs.field(factory=list)


def at(instant: datetime) -> str:
    """Return a timestamp as text for a sentence."""
    return f"{instant.astimezone(UTC):%Y-%m-%d %H:%M:%S}Z"

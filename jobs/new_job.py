"""Makes a `NewJob` of a task, its arguments and options: what every way to enqueue one job begins with."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, TypedDict, Unpack
from uuid import UUID

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.model import NewJob


class JobOptions(TypedDict, total=False):
    """What a request for a job may say besides its task and arguments; see `NewJob` for each."""

    queue: str
    priority: int
    lock_key: str
    partition_key: str
    idempotency_key: str
    available_at: datetime
    max_attempts: int
    lease_ttl_sec: int
    producer: str
    consumer_group: str
    job_id: UUID


def new_job(task: str, args: Mapping[str, Any] | None = None, **options: Unpack[JobOptions]) -> NewJob:
    """A request for a job of `task` with `args`. Raises `BadRequest`, which names the field that is not allowed."""
    if "queue" not in options:
        raise BadRequest("queue", "is missing")
    return NewJob(task=task, args=dict(args or {}), **options)

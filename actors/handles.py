"""Fields of a job's handle, of whatever class it is: from the claim, or from a message to a body's process."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from dataloader.jobs.job import HANDLE_FIELDS
from dataloader.jobs.model import ClaimedJob

_OF_SOME: Final = [name for name in HANDLE_FIELDS if name not in {"args", *ClaimedJob.__struct_fields__}]
"""Fields that only some jobs have."""


def fields_of(claimed: ClaimedJob) -> dict[str, Any]:
    """Return the fields that every handle has from a claimed job, without its args."""
    fields = {
        "job_id": claimed.job_id,
        "queue": claimed.queue,
        "task": claimed.task,
        "lock_key": claimed.lock_key,
        "partition_key": claimed.partition_key,
        "attempt": claimed.attempt,
        "max_attempts": claimed.max_attempts,
    }
    return fields if claimed.more is None else fields | _more(claimed.more)


def _more(more: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that only some jobs have."""
    planned_at = more.get("planned_at")
    return {
        **{name: more.get(name) for name in _OF_SOME},
        "planned_at": None if planned_at is None else datetime.fromisoformat(planned_at),
    }


def read_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the fields back after JSON."""
    planned_at = fields.get("planned_at")
    return {
        **fields,
        "job_id": UUID(fields["job_id"]),
        "planned_at": None if planned_at is None else datetime.fromisoformat(planned_at),
    }

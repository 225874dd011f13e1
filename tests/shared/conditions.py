"""Polling for a condition of another process or of the database."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar
from uuid import UUID

import broken
import trio

if TYPE_CHECKING:
    from dataloader import JobRecord, Supervisor

T = TypeVar("T")

IDLE_SESSIONS = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND application_name LIKE '% ' || $1 AND state = 'idle'
  AND state_change < clock_timestamp() - make_interval(secs => $2)
"""
"""Number of sessions of role $1 that have been idle for $2 seconds."""


def patience_s() -> float:
    """Return the timeout for an expected event: long, for a busy machine; short in a build without a guard."""
    return 10 if broken.VARIABLE in os.environ else 120


async def when_ended(supervisor: Supervisor, job_id: UUID, *, within_s: float | None = None) -> JobRecord:
    """Return the job when it has ended. Fails after `within_s`, by default `patience_s()`."""
    with trio.fail_after(patience_s() if within_s is None else within_s):
        return await supervisor.jobs.wait(job_id)


async def until(
    read: Callable[[], Awaitable[T]], holds: Callable[[T], object] = bool, *, within_s: float | None = None
) -> T:
    """Return the first value of `read` for which `holds` is true. Fails with the last value after `within_s`."""
    within_s = patience_s() if within_s is None else within_s
    value = await read()
    with trio.move_on_after(within_s):
        while not holds(value):
            await trio.sleep(0.02)
            value = await read()
    assert holds(value), f"still {value!r} after {within_s} s"
    return value

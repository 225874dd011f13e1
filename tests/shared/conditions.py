"""Waiting for what another process or the database will show: asked again and again, since nobody can tell us."""

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
"""Those of role $1 that have had nothing to do for $2 seconds."""


def patience_s() -> float:
    """How long to wait for what will come: long, for a busy machine; briefly for what a broken build never brings."""
    return 10 if broken.VARIABLE in os.environ else 120


async def when_ended(supervisor: Supervisor, job_id: UUID, *, within_s: float | None = None) -> JobRecord:
    """The job, as soon as it has ended; fails after `within_s`, by default `patience_s()`."""
    with trio.fail_after(patience_s() if within_s is None else within_s):
        return await supervisor.jobs.wait(job_id)


async def until(
    read: Callable[[], Awaitable[T]], holds: Callable[[T], object] = bool, *, within_s: float | None = None
) -> T:
    """What `read` gives as soon as `holds` is true of it; fails with the last reading after `within_s`."""
    within_s = patience_s() if within_s is None else within_s
    value = await read()
    with trio.move_on_after(within_s):
        while not holds(value):
            await trio.sleep(0.02)
            value = await read()
    assert holds(value), f"still {value!r} after {within_s} s"
    return value

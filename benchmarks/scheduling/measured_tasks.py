"""Tasks of the drains: one without limits, one with a limit that is never reached, one with a closed limit queue."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Final

from dataloader import Job, Tasks
from dataloader.jobs.work_periods import DAYS

QUEUE: Final = "bench"
UNUSED: Final = 8
"""Number of tasks that only have limits, and no jobs."""


def tasks_that(called: Callable[[], None], *, with_limits: bool = True) -> Tasks:
    """Return all tasks, or only those without limits; each of their runs calls `called`."""
    tasks = Tasks()

    async def work(_job: Job) -> None:
        called()

    tasks.task("free", queue=QUEUE)(work)
    tasks.task("keyed", queue=QUEUE, unique=True)(work)
    if with_limits:
        tasks.task("limited", queue=QUEUE, max_running=1_000_000)(work)
        tasks.task("closed", queue=QUEUE, work_periods=_far_period())(work)
        for number in range(UNUSED):
            tasks.task(f"unused-{number}", queue=QUEUE, max_running=number + 1)(work)
    return tasks


def _far_period() -> str:
    """Return a minute of the week that is three days away."""
    return f"{DAYS[(datetime.now(UTC) + timedelta(days=3)).weekday()]} 03:00-03:01"


tasks = tasks_that(lambda: None)

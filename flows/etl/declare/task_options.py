"""Options of a load, a flow or a set of dimensions that belong to its task: the queue and the schedule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.model import MAX_NAME, check_name
from dataloader.jobs.schedules import Schedule

QUEUE: Final = "default"


def check_task_options(queue: str, schedule: Mapping[str, Any] | None) -> None:
    """Raise `ValueError`, which names the field, for an invalid queue name or invalid fields of a schedule."""
    check_name("queue", queue, MAX_NAME)
    if schedule is None:
        return
    if not isinstance(schedule, Mapping):
        raise BadRequest("schedule", f"must be a dictionary, such as {{'cron': '30 3 * * *'}}, not {schedule!r:.80}")
    for name in ("name", "task"):
        if name in schedule:
            raise BadRequest(f"schedule.{name}", "is not allowed; it is the name of the declaration")
    try:
        Schedule.of_spec("name", {**schedule, "task": "task"})
    except BadRequest as error:
        raise BadRequest(f"schedule.{error.field}", error.message) from None

"""Files with the limits of many tasks: a JSON list, with our names or those of other schedulers' settings."""

from __future__ import annotations

from typing import Any, Final

import attrs
import msgspec

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.limits import TaskLimits
from dataloader.jobs.model import MAX_NAME, check_name

_NAMES: Final = {
    "task_type": "task",
    "object_type": "task",
    "task_max_batch_size": "batch_size",
    "next_task_batch_delay_ms": "batch_delay_s",
    "next_try_priority": "retry_priority",
    "next_try_delay_ms": "retry_delay_s",
    "max_try_count": "max_attempts",
}
_OURS: Final = ("task", *(field.name for field in attrs.fields(TaskLimits)))


def read_limits(text: str) -> dict[str, dict[str, Any]]:
    """Return the overrides of each task in a file; null restores the program's value.

    Raises `BadRequest` with the path of an invalid value, such as `[3].cost`.
    """
    try:
        entries = msgspec.json.decode(text, type=list[dict[str, Any]])
    except msgspec.DecodeError as error:
        raise BadRequest("file", f"must be a JSON list of objects: {error}") from error
    found: dict[str, dict[str, Any]] = {}
    for number, entry in enumerate(entries):
        try:
            task, limits = _read_entry_of_file(entry)
        except BadRequest as error:
            raise BadRequest(f"[{number}].{error.field}", error.message) from error
        if task in found:
            raise BadRequest(f"[{number}].task", f"is repeated: {task!r}; each task may have one entry")
        found[task] = limits
    return found


def _read_entry_of_file(entry: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    values: dict[str, Any] = {}
    for name, value in entry.items():
        ours = _NAMES.get(name, name)
        if ours not in _OURS:
            raise BadRequest(name, f"is not a limit of a task; the limits are {', '.join((*_OURS, *_NAMES))}")
        if ours in values:
            raise BadRequest(name, f"has the same meaning as {ours}; use one of them")
        values[ours] = _seconds_of_ms(name, value) if name.endswith("_ms") else value
    task = values.pop("task", None)
    if not isinstance(task, str):
        raise BadRequest("task", f"must be the name of a task, not {task!r:.60}")
    check_name("task", task, MAX_NAME)
    try:
        TaskLimits.of_spec(values)
    except (TypeError, AttributeError) as error:
        raise BadRequest("limits", f"must be strings and numbers: {error}") from error
    return task, values


def _seconds_of_ms(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadRequest(name, f"must be a number of milliseconds, not {value!r:.60}")
    return value / 1_000

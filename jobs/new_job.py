"""Creates a `NewJob` from a task, its arguments and options; the first step of every way to enqueue one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.model import JobOptions, NewJob
from dataloader.jobs.task import A, Task


def new_job(task: str | Task[A], args: A | Mapping[str, Any] | None = None, **options: Unpack[JobOptions]) -> NewJob:
    """Return a request for a job of `task`.

    Args:
        task: the task, or its name. Arguments are checked only if the task itself is given.
        args: an instance of the task's own type, or a JSON object.
        options: those of `NewJob`, such as `queue` and `lock_key`.

    Raises `BadRequest`, which names the invalid field.
    """
    if isinstance(task, Task) and task.args is not None:
        return NewJob(task=task.name, args=task.args.encode({} if args is None else args), **options)
    name: Any = task.name if isinstance(task, Task) else task  # `NewJob` refuses a name that is not a string
    if args is not None and not isinstance(args, Mapping):
        raise BadRequest("args", f"must be a mapping, because task {name!r} has no args type here, not {args!r:.200}")
    if isinstance(task, Task) and task.check is not None:
        task.check(args or {})
    return NewJob(task=name, args=dict(args or {}), **options)

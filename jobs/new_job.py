"""Makes a `NewJob` of a task, its arguments and options: what every way to enqueue one job begins with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.job import A
from dataloader.jobs.model import JobOptions, NewJob
from dataloader.jobs.tasks import Task


def new_job(task: str | Task[A], args: A | Mapping[str, Any] | None = None, **options: Unpack[JobOptions]) -> NewJob:
    """A request for a job of `task` with `args`: an instance of the task's own type, or a JSON object.

    A task with a type checks the object; for a task given by its name nothing is checked.
    Raises `BadRequest`, which names the invalid field.
    """
    if isinstance(task, Task) and task.args is not None:
        return NewJob(task=task.name, args=task.args.encode({} if args is None else args), **options)
    if args is not None and not isinstance(args, Mapping):
        name = task.name if isinstance(task, Task) else task
        raise BadRequest("args", f"must be a mapping, as task {name!r} has no type of args here, not {args!r:.200}")
    if isinstance(task, Task) and task.check is not None:
        task.check(args or {})
    return NewJob(task=task.name if isinstance(task, Task) else task, args=dict(args or {}), **options)

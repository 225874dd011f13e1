"""How a load, a flow or a set of dimensions is a task, and which of them a task is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol, TypeVar

from dataloader.jobs.tasks import Task, Tasks


class Declared(Protocol):
    """A load, a flow or a set of dimensions: its `name` is the task's."""

    @property
    def name(self) -> str:
        """The task's name."""

    @property
    def description(self) -> str:
        """What `dataloader tasks` shows of it."""


D = TypeVar("D", bound=Declared)


def add_etl_task(
    tasks: Tasks, run: Callable[..., Any], declared: D, description: str, *, timeout_s: float | None = None
) -> None:
    """Register `run(declared, job)` as a task; `description` is shown where the declaration has none.

    Raises `ValueError` for a name that is taken.
    """
    handler = partial(run, declared)
    handler.__doc__ = declared.description or description
    tasks.task(declared.name, timeout_s=timeout_s)(handler)


def declared_by(task: Task, kind: type[D]) -> D | None:
    """What was declared of the task, if that is a `kind`; else None."""
    handler = task.handler
    if isinstance(handler, partial) and handler.args and isinstance(handler.args[0], kind):
        return handler.args[0]
    return None


def names_of(tasks: Mapping[str, Task], kind: type[D]) -> list[str]:
    """The names of the tasks that are a `kind`, sorted."""
    return sorted(name for name, task in tasks.items() if declared_by(task, kind) is not None)

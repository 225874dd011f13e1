"""How a load, a flow or a set of dimensions is a task, and which of them a task is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

from dataloader.jobs.task import Task
from dataloader.jobs.tasks import Tasks


class Declared(Protocol):
    """A load, a flow or a set of dimensions: its `name` is the task's."""

    @property
    def name(self) -> str:
        """The task's name."""

    @property
    def description(self) -> str:
        """What `dataloader tasks` shows of it."""

    @property
    def queue(self) -> str:
        """The queue of its jobs."""

    @property
    def schedule(self) -> Mapping[str, Any] | None:
        """The fields of its schedule, those of `Tasks.schedule`."""


D = TypeVar("D", bound=Declared)


def add_etl_task(
    tasks: Tasks,
    run: Callable[..., Any],
    declared: D,
    description: str,
    *,
    kind: Literal["load", "flow"],
    read_args: Callable[[Mapping[str, Any]], object],
    timeout_s: float | None = None,
) -> None:
    """Register `run(declared, job)` as a task, and its schedule; `description` is shown where the declaration has none.

    `read_args` raises `BadRequest` for args that its jobs refuse; so a request for such a job is refused.

    Raises `ValueError` for a name that is taken, and for a schedule that is not valid.
    """
    handler = partial(run, declared)
    handler.__doc__ = declared.description or description
    # Runs wait for each other in the queue, without a slot. In flows, and under other keys, the run itself waits.
    # Braces stand for fields of args in a key.
    lock_key = None if {"{", "}"} & {*declared.name} else f"{kind}:{declared.name}"
    tasks.task(declared.name, timeout_s=timeout_s, queue=declared.queue, lock_key=lock_key)(handler)
    tasks.check_args(declared.name, read_args)
    if declared.schedule is not None:
        try:
            read_args(declared.schedule.get("args") or {})
        except ValueError as error:
            raise ValueError(f"{kind} {declared.name}: schedule.{error}") from None
        tasks.schedule(declared.name, task=declared.name, **declared.schedule)


def declared_by(task: Task, kind: type[D]) -> D | None:
    """What was declared of the task, if that is a `kind`; else None."""
    handler = task.handler
    if isinstance(handler, partial) and handler.args and isinstance(handler.args[0], kind):
        return handler.args[0]
    return None


def names_of(tasks: Mapping[str, Task], kind: type[D]) -> list[str]:
    """The names of the tasks that are a `kind`, sorted."""
    return sorted(name for name, task in tasks.items() if declared_by(task, kind) is not None)

"""Tasks of loads, flows and sets of dimensions, and the declaration of a given task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol, TypeVar

from dataloader.jobs.load_jobs import Kind, load_key
from dataloader.jobs.task import Task
from dataloader.jobs.tasks import Tasks


class LoadDeclaration(Protocol):
    """Load, flow or set of dimensions. Its `name` is the task's name."""

    @property
    def name(self) -> str:
        """Return the task's name."""

    @property
    def description(self) -> str:
        """Return the description that `dataloader tasks` shows."""

    @property
    def queue(self) -> str:
        """Return the queue of its jobs."""

    @property
    def schedule(self) -> Mapping[str, Any] | None:
        """Return the fields of its schedule, as for `Tasks.schedule`."""


D = TypeVar("D", bound=LoadDeclaration)


def add_etl_task(
    tasks: Tasks,
    run: Callable[..., Any],
    declared: D,
    description: str,
    *,
    kind: Kind,
    read_args: Callable[[Mapping[str, Any]], object],
    timeout_s: float | None = None,
    calls_asyncio: bool = False,
) -> None:
    """Register `run(declared, job)` as a task, with its schedule. `description` is used if the declaration has none.

    `read_args` raises `BadRequest` for invalid args, so that a request for such a job is refused. `calls_asyncio`: a
    function of it runs on asyncio.

    Raises `ValueError` if the name is taken, and for an invalid schedule.
    """
    handler = partial(run, declared)
    handler.__doc__ = declared.description or description
    # Runs wait for each other in the queue, without a slot. In flows, and with other keys, the run itself waits. Braces
    # mark fields of args in a key.
    lock_key = None if {"{", "}"} & {*declared.name} else load_key(kind, declared.name)
    tasks.task(declared.name, timeout_s=timeout_s, queue=declared.queue, lock_key=lock_key)(handler)
    tasks.check_args(declared.name, read_args)
    if calls_asyncio:
        tasks.call_asyncio(declared.name)
    if declared.schedule is not None:
        try:
            read_args(declared.schedule.get("args") or {})
        except ValueError as error:
            raise ValueError(f"{kind} {declared.name}: schedule.{error}") from None
        tasks.schedule(declared.name, task=declared.name, **declared.schedule)


def declared_by(task: Task, kind: type[D]) -> D | None:
    """Return the task's declaration if it is a `kind`, otherwise None."""
    handler = task.handler
    if isinstance(handler, partial) and handler.args and isinstance(handler.args[0], kind):
        return handler.args[0]
    return None


def names_of(tasks: Mapping[str, Task], kind: type[D]) -> list[str]:
    """Return the names of the tasks that are a `kind`, sorted."""
    return sorted(name for name, task in tasks.items() if declared_by(task, kind) is not None)

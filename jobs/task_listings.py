"""Task types as readers see them: what the processes have declared, last start wins (S2)."""

from __future__ import annotations

from typing import Annotated, Any

import attrs

from dataloader.jobs.errors import NotFound
from dataloader.jobs.model import Instant, about
from dataloader.jobs.page_cursor import Next


class TaskNotFound(NotFound):
    """No process has declared a task of this name."""


@attrs.frozen(kw_only=True)
class TaskRecord:
    """A task type: what its jobs get that their requests do not say, and what its arguments are."""

    task: Annotated[str, about("The task's name.")]
    description: Annotated[str | None, about("What it says of itself, in one line.")]
    queue: Annotated[str | None, about("The queue of its jobs; null: each request names one.")]
    priority: Annotated[int | None, about("The priority of its jobs; null: 100.")]
    args_schema: Annotated[Any, about("JSON Schema of its arguments; null: they are any object.")]
    uniqueness: Annotated[Any, about("How its jobs are unique; null: they are not.")]
    declared_by: Annotated[str, about("The process that declared it last.")]
    declared_at: Annotated[Instant, about("When it was declared last, or changed.")]

    @property
    def fields(self) -> frozenset[str]:
        """The names of its arguments, as far as they are declared."""
        return frozenset((self.args_schema or {}).get("properties", ()))


@attrs.frozen
class TaskPage:
    """A page of task types, by name."""

    tasks: Annotated[list[TaskRecord], about("The task types.")]
    next: Next

"""Readers' views of task types: the declarations of processes, of which the last start wins, and their limits now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import attrs

from dataloader.jobs.errors import NotFound
from dataloader.jobs.model import Instant, about
from dataloader.jobs.page_cursor import Next

Closed = Literal["paused", "period", "running", "batch", "supplier_paused", "supplier_period", "budget", "error"]
"""Reason why no job of a task may start now.

It is paused; no work period is open; the concurrency limit is reached; the batch is full, or the next one has not
begun; its supplier is paused, or has no open work period; a rate limit of its supplier is exhausted (`budget`); its
limits cannot be evaluated, and `error` says why.
"""
OpenJobs = Literal["keep", "cancel"]
"""Open jobs of a removed task: they wait until a process declares the task again, or are canceled."""


class TaskNotFound(NotFound):
    """No process has declared a task of this name."""


@attrs.frozen(kw_only=True)
class TaskRecord:
    """Task type: the defaults of its jobs, and the schema of its arguments."""

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
        """Names of its arguments, as far as they are declared."""
        return frozenset((self.args_schema or {}).get("properties", ()))


@attrs.frozen(kw_only=True)
class TaskState(TaskRecord):
    """Task type with its limits, and whether its jobs may start now."""

    declared: Annotated[Mapping[str, Any], about("The limits that its program declares.")]
    override: Annotated[Mapping[str, Any], about("The limits that operators have set in their place.")]
    limits: Annotated[Mapping[str, Any], about("The limits that hold: both together.")]
    paused: Annotated[bool, about("Whether it is paused: none of its jobs starts.")]
    waiting: Annotated[int, about("How many jobs wait for its limits; 10,000: so many, or more.")]
    running: Annotated[int, about("How many of its jobs run.")]
    closed: Annotated[Closed | None, about("Why none of its jobs may start now; null: they may.")]
    opens_at: Annotated[
        Instant | None, about("When they may start again; null: now, or when a job ends, or somebody resumes it.")
    ]
    left: Annotated[int | None, about("How many may start now; null: there is no bound.")]
    error: Annotated[str | None, about("Why its limits cannot be evaluated; null if they can.")] = None


@attrs.frozen
class TaskPage:
    """Page of task types, by name."""

    tasks: Annotated[list[TaskState], about("The task types.")]
    next: Next

"""Task types for readers: the declarations of processes, where the last start wins, and the current limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import attrs

from dataloader.jobs.errors import NotFound
from dataloader.jobs.model import Instant, about
from dataloader.jobs.page_cursor import Next
from dataloader.jobs.secrets.record_masks import SENSITIVE, Public

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

    task: Annotated[str, about("Name of the task."), SENSITIVE]
    description: Annotated[str | None, about("Description, in one line."), SENSITIVE]
    queue: Annotated[str | None, about("Queue of its jobs; null: given by each request."), SENSITIVE]
    priority: Annotated[int | None, about("Priority of its jobs; null: 100.")]
    args_schema: Annotated[
        Any, about("JSON Schema of its arguments; null: any object."), Public("a schema names secrets but has none")
    ]
    uniqueness: Annotated[
        Any, about("Uniqueness of its jobs; null: not unique."), Public("names of args, and words of ours")
    ]
    declared_by: Annotated[str, about("Process that declared it last."), SENSITIVE]
    declared_at: Annotated[Instant, about("Time of the last declaration or change.")]

    @property
    def fields(self) -> frozenset[str]:
        """Names of its arguments, as far as they are declared."""
        return frozenset((self.args_schema or {}).get("properties", ()))


@attrs.frozen(kw_only=True)
class TaskState(TaskRecord):
    """Task type with its limits, and whether its jobs may start now."""

    declared: Annotated[Mapping[str, Any], about("Limits that its program declares."), SENSITIVE]
    override: Annotated[Mapping[str, Any], about("Limits that operators have set instead."), SENSITIVE]
    limits: Annotated[Mapping[str, Any], about("Limits in effect."), SENSITIVE]
    paused: Annotated[bool, about("True if it is paused and none of its jobs start.")]
    waiting: Annotated[int, about("Number of jobs that wait for its limits; 10,000 means at least 10,000.")]
    running: Annotated[int, about("Number of its running jobs.")]
    closed: Annotated[Closed | None, about("Reason why none of its jobs may start now; null if they may.")]
    opens_at: Annotated[
        Instant | None, about("Time at which they may start again; null: now, or after the end of a job or a resume.")
    ]
    left: Annotated[int | None, about("Number of jobs that may start now; null: not limited.")]
    error: Annotated[
        str | None, about("Error in its limits, if they cannot be evaluated; otherwise null."), SENSITIVE
    ] = None


@attrs.frozen
class TaskPage:
    """Page of task types, by name."""

    tasks: Annotated[list[TaskState], about("Tasks.")]
    next: Next

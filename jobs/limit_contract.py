"""Operations on limits: `Limits`, which `supervisor.limits`, commands and HTTP views use."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Annotated, Any, Literal
from uuid import UUID

import attrs

from dataloader.jobs.errors import NotFound
from dataloader.jobs.model import Instant, about
from dataloader.jobs.page_cursor import After, Next
from dataloader.jobs.task_listings import TaskPage, TaskState

SupplierClosed = Literal["paused", "period", "error"]
"""Reason why a supplier is closed: paused; no work period is open; its limits cannot be evaluated."""
OpenJobs = Literal["keep", "cancel"]
"""Open jobs of a removed task: they wait until a process declares the task again, or are canceled."""


class SupplierNotFound(NotFound):
    """No supplier has this name."""


@attrs.frozen(kw_only=True)
class RateLimitState:
    """Rate limit of a supplier, and its current use."""

    requests: Annotated[int, about("At most so many units")]
    per_s: Annotated[float | None, about("in any span of so many seconds; null: in each day.")]
    per: Annotated[Literal["day"] | None, about("`day`: from midnight to midnight.")] = None
    zone: Annotated[str | None, about("The time zone whose midnight that is.")] = None
    used: Annotated[int, about("Units that count now; a start counts for the margin longer.")]
    left: Annotated[int, about("Units that may be taken now.")]
    free_at: Annotated[Instant | None, about("When the next unit is free; null: now.")]


@attrs.frozen
class RequestSlot:
    """Request of a load in progress."""

    job_id: Annotated[UUID | None, about("The load's job; null: it does not run any more.")]
    until: Annotated[Instant, about("When the slot ends by itself.")]


@attrs.frozen(kw_only=True)
class SupplierRecord:
    """Supplier: an external system with rate limits and work periods, which tasks and loads name."""

    supplier: Annotated[str, about("The supplier's name.")]
    declared: Annotated[Mapping[str, Any], about("The limits that programs declare.")]
    override: Annotated[Mapping[str, Any], about("The limits that operators have set in their place.")]
    limits: Annotated[Mapping[str, Any], about("The limits that hold: both together.")]
    margin_s: Annotated[float, about("Seconds in which a body begins after its claim; spans are longer by them.")]
    paused: Annotated[bool, about("Whether it is paused: no job of its tasks starts.")]
    tasks: Annotated[list[str], about("The tasks that name it.")]
    rate_limits: Annotated[list[RateLimitState], about("Its rate limits, with what is used.")]
    closed: Annotated[SupplierClosed | None, about("Why it may not be asked now; null: it may.")]
    opens_at: Annotated[Instant | None, about("When its next work period begins; null: it is open, or paused.")]
    slot: Annotated[RequestSlot | None, about("The load's request that is under way.")]
    error: Annotated[str | None, about("Why its limits cannot be evaluated; null if they can.")] = None


@attrs.frozen
class SupplierPage:
    """Page of suppliers, by name."""

    suppliers: Annotated[list[SupplierRecord], about("The suppliers.")]
    next: Next


class Limits(abc.ABC):
    """Limits of tasks and suppliers. A supervisor has them as `supervisor.limits`.

    Changes apply from the next claim on, in all processes. Running jobs continue, except at the end of a period for a
    task that stops them then. All methods raise `TaskNotFound` or `SupplierNotFound` for an unknown name, `BadRequest`
    for values that are not allowed, and `StoreUnavailable` if no answer came.
    """

    @abc.abstractmethod
    async def tasks(self, *, limit: int = 200, after: After = None) -> TaskPage:
        """Return a page of at most `limit` (1 to 1,000) tasks by name, after `after`, the previous page's `next`."""

    @abc.abstractmethod
    async def task(self, name: str) -> TaskState:
        """Return the task, with its limits and whether its jobs may start now."""

    @abc.abstractmethod
    async def set_tasks(self, changes: Mapping[str, Mapping[str, Any]]) -> list[TaskState]:
        """Override limits of tasks, all or none: fields of `TaskLimits` by name; None restores the program's value."""

    @abc.abstractmethod
    async def pause_task(self, name: str) -> TaskState:
        """Pause a task: none of its jobs starts, in any queue. Running jobs continue."""

    @abc.abstractmethod
    async def resume_task(self, name: str) -> TaskState:
        """End the pause of a task."""

    @abc.abstractmethod
    async def remove_task(self, name: str, *, jobs: OpenJobs | None = None) -> TaskState:
        """Forget a task and its limits until a process declares it again, and return it as it was.

        Running processes start no more jobs of it. `jobs` says what to do with its open jobs. Without it, `InUse` is
        raised if there are any.
        """

    @abc.abstractmethod
    async def suppliers(self, *, limit: int = 200, after: After = None) -> SupplierPage:
        """Return a page of suppliers, as `tasks` does."""

    @abc.abstractmethod
    async def supplier(self, name: str) -> SupplierRecord:
        """Return the supplier, with the current use of its rate limits."""

    @abc.abstractmethod
    async def set_supplier(self, name: str, changes: Mapping[str, Any]) -> SupplierRecord:
        """Override limits of a supplier: fields of `Supplier.spec`; None restores the program's value.

        An unknown supplier is created, so that tasks may name it.
        """

    @abc.abstractmethod
    async def pause_supplier(self, name: str) -> SupplierRecord:
        """Pause a supplier: no job of the tasks that name it starts."""

    @abc.abstractmethod
    async def resume_supplier(self, name: str) -> SupplierRecord:
        """End the pause of a supplier."""

    @abc.abstractmethod
    async def remove_supplier(self, name: str) -> SupplierRecord:
        """Forget a supplier until a process declares it again, and return it as it was.

        Raises `InUse` while a task names it, or while a load's request is in progress.
        """

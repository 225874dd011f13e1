"""Operations on the limits of tasks and suppliers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from dataloader.jobs.errors import BadRequest, InUse
from dataloader.jobs.former_names import renamed
from dataloader.jobs.limits import FORMER_LIMITS, MAX_DELAY_S, MAX_RATE_LIMITS, AtPeriodEnd
from dataloader.jobs.listings import MAX_PAGE
from dataloader.jobs.model import MAX_ATTEMPTS, MAX_INT, MAX_NAME, about, check_name, check_text
from dataloader.jobs.operations.fields import AfterPage, Limit, TaskName
from dataloader.jobs.operations.operation import Operation, Operations
from dataloader.jobs.retry import MAX_RETRY_DELAY_S
from dataloader.jobs.roles import Role
from dataloader.jobs.supplier_listings import SupplierNotFound, SupplierPage, SupplierRecord
from dataloader.jobs.task_listings import OpenJobs, TaskNotFound, TaskPage, TaskState

limits: Final = Operations()

_PeriodTexts = Annotated[
    list[Annotated[str, Meta(examples=["MON-FRI 00:00-06:00"])]] | UnsetType | None,
    about("Work periods, in which jobs may start; an empty list: always."),
]
_ZoneName = Annotated[str | UnsetType | None, about("Time zone of `work_periods`.")]
_AtLeastOne = Annotated[int, Meta(ge=1, le=MAX_INT)]


class LimitChanges(Struct, forbid_unknown_fields=True, kw_only=True):
    """Overrides of the limits of an `OWNER`; None restores the program's value, and `UNSET` changes nothing."""

    OWNER: ClassVar[str]
    FORMER_FIELDS: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def check_names(cls, changes: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the changes. Raises `BadRequest` for a name that no limit has. Values are not checked."""
        for name in changes:
            if name in cls.FORMER_FIELDS:
                raise BadRequest(name, renamed(cls.FORMER_FIELDS[name]))
            if name not in cls.__struct_fields__:
                names = ", ".join(sorted(cls.__struct_fields__))
                raise BadRequest(name, f"is not a limit of a {cls.OWNER}; the limits are {names}")
        return changes

    def given(self) -> dict[str, Any]:
        """Return the changes by name."""
        return {name: value for name, value in msgspec.to_builtins(self).items() if name != self.OWNER}


class NamedTask(Struct, forbid_unknown_fields=True):
    """Name of the task of an operation. Raises `BadRequest` for a name that no task can have."""

    task: str

    def __post_init__(self) -> None:
        """Check the name."""
        check_text("task", self.task, MAX_NAME)


@limits.declare("GET", "/tasks", role=Role.READ)
class ListTasks(Operation[TaskPage], kw_only=True):
    """List the task types that processes have declared, by name, with their limits."""

    limit: Limit = 200
    after: AfterPage | None = None


@limits.declare("GET", "/tasks/{task}", role=Role.READ, errors=(TaskNotFound,))
class GetTask(NamedTask, Operation[TaskState]):
    """Show a task: its limits, whether its jobs may start now, and if not, why and until when."""


class TaskChanges(LimitChanges, kw_only=True):
    """Overrides of a task's limits; null restores the program's value."""

    EXAMPLE: ClassVar[Any] = {"max_running": 3, "work_periods": ["MON-FRI 00:00-06:00"], "zone": "Europe/Berlin"}
    OWNER: ClassVar[str] = "task"

    work_periods: _PeriodTexts = UNSET
    zone: _ZoneName = UNSET
    at_period_end: Annotated[
        AtPeriodEnd | UnsetType | None,
        about("Running jobs at the end of a work period: `finish`, or `stop` and return to their limit queue."),
    ] = UNSET
    max_running: Annotated[
        _AtLeastOne | UnsetType | None, about("Maximum number of running jobs, over all processes.")
    ] = UNSET
    max_running_per_partition: Annotated[
        _AtLeastOne | UnsetType | None,
        about("Maximum number of running jobs per `partition_key`. Keys are served round-robin."),
    ] = UNSET
    batch_size: Annotated[_AtLeastOne | UnsetType | None, about("Number of jobs that start together.")] = UNSET
    batch_delay_s: Annotated[
        Annotated[float, Meta(ge=0, le=MAX_DELAY_S)] | UnsetType | None,
        about("Seconds between the end of a batch and the start of the next."),
    ] = UNSET
    supplier: Annotated[
        Annotated[str, Meta(min_length=1, max_length=MAX_NAME)] | UnsetType | None,
        about("Supplier whose rate limits and work periods also apply."),
    ] = UNSET
    cost: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_INT)] | UnsetType | None,
        about("Units of the supplier's rate limits per start."),
    ] = UNSET
    retry_priority: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_INT)] | UnsetType | None,
        about("Priority of a job whose last run failed or lost its worker."),
    ] = UNSET
    retry_delay_s: Annotated[
        Annotated[float, Meta(ge=0, le=MAX_RETRY_DELAY_S)] | UnsetType | None,
        about("Seconds between a failed run and the next, instead of the program's retry policy."),
    ] = UNSET
    max_attempts: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_ATTEMPTS)] | UnsetType | None,
        about("Maximum number of attempts of jobs enqueued from now on."),
    ] = UNSET


@limits.declare("PATCH", "/tasks/{task}", role=Role.ADMIN, errors=(TaskNotFound,))
class SetTask(TaskChanges, Operation[TaskState], kw_only=True):
    """Override limits of a task. Applies from the next claim on, in all processes, and survives deployments."""

    task: str


class NamedTaskChanges(TaskChanges, kw_only=True):
    """Overrides of a task's limits, with the task's name."""

    EXAMPLE: ClassVar[Any] = {"task": "employee", "max_running": 3}

    task: TaskName


class ManyTaskChanges(Struct, forbid_unknown_fields=True, kw_only=True):
    """Limits of several tasks."""

    EXAMPLE: ClassVar[Any] = {"tasks": [NamedTaskChanges.EXAMPLE]}

    tasks: Annotated[list[NamedTaskChanges], Meta(min_length=1, max_length=MAX_PAGE, description="Tasks, each once.")]


class ChangedTasks(Struct, frozen=True):
    """Changed tasks with their current limits."""

    tasks: Annotated[list[TaskState], about("Tasks, in the order of the request.")]


@limits.declare("PATCH", "/tasks", role=Role.ADMIN, errors=(TaskNotFound,))
class SetTasks(ManyTaskChanges, Operation[ChangedTasks]):
    """Override limits of several tasks, all or none. A task that no process has declared is a 404."""

    @classmethod
    def of(cls, changes: Mapping[str, Mapping[str, Any]]) -> SetTasks:
        """Return the operation for changes by task. Raises `BadRequest` for a name that no limit has."""
        return cls(tasks=[NamedTaskChanges(task=task, **TaskChanges.check_names(one)) for task, one in changes.items()])


@limits.declare("DELETE", "/tasks/{task}", role=Role.ADMIN, errors=(TaskNotFound, InUse))
class RemoveTask(NamedTask, Operation[TaskState]):
    """Forget a task until a process declares it again, and show it as it was. Processes start no jobs of it.

    409 while it has open jobs, unless `jobs` says what to do with them.
    """

    jobs: (
        Annotated[
            OpenJobs,
            about("Jobs that have not ended: `keep` (they wait until a process declares the task) or `cancel`."),
        ]
        | None
    ) = None


@limits.declare("POST", "/tasks/{task}/pause", role=Role.OPERATE, errors=(TaskNotFound,))
class PauseTask(NamedTask, Operation[TaskState]):
    """Pause a task: none of its jobs starts, in any queue. Running jobs continue."""


@limits.declare("POST", "/tasks/{task}/resume", role=Role.OPERATE, errors=(TaskNotFound,))
class ResumeTask(NamedTask, Operation[TaskState]):
    """End a task's pause."""


class NamedSupplier(Struct, forbid_unknown_fields=True):
    """Name of the supplier of an operation. Raises `BadRequest` for a name that no supplier can have."""

    supplier: str

    def __post_init__(self) -> None:
        """Check the name."""
        check_text("supplier", self.supplier, MAX_NAME)


@limits.declare("GET", "/suppliers", role=Role.READ)
class ListSuppliers(Operation[SupplierPage], kw_only=True):
    """List the suppliers of tasks and loads, by name."""

    limit: Limit = 200
    after: AfterPage | None = None


@limits.declare("GET", "/suppliers/{supplier}", role=Role.READ, errors=(SupplierNotFound,))
class GetSupplier(NamedSupplier, Operation[SupplierRecord]):
    """Show a supplier: its limits, the current use of each rate limit, and the load's request in progress."""


_Span = Annotated[
    list[float],
    Meta(
        min_length=2,
        max_length=2,
        description="Number of units, and seconds: at most this number in any period of this length.",
    ),
]


class DayRateLimit(Struct, forbid_unknown_fields=True, kw_only=True):
    """Rate limit by the calendar: from midnight to midnight."""

    EXAMPLE: ClassVar[Any] = {"requests": 10_000, "per": "day", "zone": "Europe/Berlin"}

    requests: Annotated[int, about("Maximum number of units per day.")]
    per: Annotated[Literal["day"], about("Period of the rate limit.")]
    zone: Annotated[str, about("Time zone of midnight.")] = "UTC"


_RateLimits = Annotated[list[_Span | DayRateLimit], Meta(max_length=MAX_RATE_LIMITS)]


class SupplierChanges(LimitChanges, kw_only=True):
    """Overrides of a supplier's limits; null restores the programs' value."""

    EXAMPLE: ClassVar[Any] = {"rate_limits": [[100, 60], DayRateLimit.EXAMPLE], "work_periods": ["MON-FRI 00:00-06:00"]}
    OWNER: ClassVar[str] = "supplier"
    FORMER_FIELDS: ClassVar[Mapping[str, str]] = FORMER_LIMITS

    rate_limits: Annotated[_RateLimits | UnsetType | None, about("Rate limits, all of which apply.")] = UNSET
    work_periods: _PeriodTexts = UNSET
    zone: _ZoneName = UNSET
    margin_s: Annotated[
        Annotated[float, Meta(ge=0.01, le=60)] | UnsetType | None,
        about("Maximum seconds between the claim and the start of a job."),
    ] = UNSET

    def given(self) -> dict[str, Any]:
        """Return the changes by name; the units of a rate limit are whole numbers."""
        values = super().given()
        if isinstance(values.get("rate_limits"), list):
            values["rate_limits"] = list(map(_with_whole_units, values["rate_limits"]))
        return values


def _with_whole_units(rate_limit: Any) -> Any:
    """Return a rate limit with an integer for a float such as 5.0: JSON does not distinguish it from 5."""
    match rate_limit:
        case [float(units), *rest] if units.is_integer():
            return [int(units), *rest]
        case _:
            return rate_limit


@limits.declare("PATCH", "/suppliers/{supplier}", role=Role.ADMIN)
class SetSupplier(SupplierChanges, Operation[SupplierRecord], kw_only=True):
    """Override limits of a supplier, or create an unknown one. Applies from the next claim on, in all processes."""

    supplier: str

    def __post_init__(self) -> None:
        """Check the name."""
        check_name("supplier", self.supplier, MAX_NAME)


@limits.declare("DELETE", "/suppliers/{supplier}", role=Role.ADMIN, errors=(SupplierNotFound, InUse))
class RemoveSupplier(NamedSupplier, Operation[SupplierRecord]):
    """Forget a supplier until a process declares it again, and show it as it was.

    409 while a task names it, or while a load's request is in progress.
    """


@limits.declare("POST", "/suppliers/{supplier}/pause", role=Role.OPERATE, errors=(SupplierNotFound,))
class PauseSupplier(NamedSupplier, Operation[SupplierRecord]):
    """Pause a supplier: no job of the tasks that name it starts. Running jobs continue."""


@limits.declare("POST", "/suppliers/{supplier}/resume", role=Role.OPERATE, errors=(SupplierNotFound,))
class ResumeSupplier(NamedSupplier, Operation[SupplierRecord]):
    """End a supplier's pause."""

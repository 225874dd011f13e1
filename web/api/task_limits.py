"""Limits of tasks over HTTP: effective values, reasons why no job starts, and operators' actions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.limits import MAX_DELAY_S, AtPeriodEnd
from dataloader.jobs.listings import MAX_PAGE
from dataloader.jobs.model import MAX_ATTEMPTS, MAX_INT, MAX_NAME, about
from dataloader.jobs.operations.fields import TaskName
from dataloader.jobs.retry import MAX_RETRY_DELAY_S
from dataloader.jobs.roles import Role
from dataloader.jobs.task_listings import TaskState
from dataloader.web import shown
from dataloader.web.routes import Answer, Call, Routes

routes: Final = Routes()

_ADDRESS: Final = "/api/v1/tasks/<path:task>"
PeriodTexts = Annotated[
    list[Annotated[str, Meta(examples=["MON-FRI 00:00-06:00"])]] | UnsetType | None,
    about("When jobs may start; an empty list: always."),
]
ZoneName = Annotated[str | UnsetType | None, about("The time zone of `work_periods`.")]
_AtLeastOne = Annotated[int, Meta(ge=1, le=MAX_INT)]


class TaskChanges(Struct, forbid_unknown_fields=True, kw_only=True):
    """Overrides of a task's limits; null restores the program's value."""

    EXAMPLE: ClassVar[Any] = {"max_running": 3, "work_periods": ["MON-FRI 00:00-06:00"], "zone": "Europe/Berlin"}

    work_periods: PeriodTexts = UNSET
    zone: ZoneName = UNSET
    at_period_end: Annotated[
        AtPeriodEnd | UnsetType | None,
        about(
            "What becomes of running jobs at the close of a period: they `finish`, or `stop` and go back to their lane."
        ),
    ] = UNSET
    max_running: Annotated[_AtLeastOne | UnsetType | None, about("How many run at once, over all processes.")] = UNSET
    max_running_per_partition: Annotated[
        _AtLeastOne | UnsetType | None, about("And how many of one `partition_key`; the keys have their turns.")
    ] = UNSET
    batch_size: Annotated[_AtLeastOne | UnsetType | None, about("How many start together.")] = UNSET
    batch_delay_s: Annotated[
        Annotated[float, Meta(ge=0, le=MAX_DELAY_S)] | UnsetType | None,
        about("From a batch's last end to the next batch."),
    ] = UNSET
    supplier: Annotated[
        Annotated[str, Meta(min_length=1, max_length=MAX_NAME)] | UnsetType | None,
        about("The supplier whose rate limits and periods hold, too."),
    ] = UNSET
    cost: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_INT)] | UnsetType | None,
        about("Units of the supplier's rate limits that a start takes."),
    ] = UNSET
    retry_priority: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_INT)] | UnsetType | None,
        about("The priority of a job whose run has failed, or has lost its worker."),
    ] = UNSET
    retry_delay_s: Annotated[
        Annotated[float, Meta(ge=0, le=MAX_RETRY_DELAY_S)] | UnsetType | None,
        about("From a run that failed to the next one, in place of the program's policy."),
    ] = UNSET
    max_attempts: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_ATTEMPTS)] | UnsetType | None,
        about("Runs before a job is failed or lost, for jobs that are added from now on."),
    ] = UNSET

    def given(self) -> dict[str, Any]:
        """Return the changes by name."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not UNSET}


class NamedTaskChanges(TaskChanges, kw_only=True):
    """Overrides of a task's limits, with the task's name."""

    EXAMPLE: ClassVar[Any] = {"task": "employee", "max_running": 3}

    task: TaskName

    def given(self) -> dict[str, Any]:
        """Return the changes by name."""
        return {name: value for name, value in super().given().items() if name != "task"}


class ManyTaskChanges(Struct, forbid_unknown_fields=True, kw_only=True):
    """Limits of several tasks."""

    EXAMPLE: ClassVar[Any] = {"tasks": [NamedTaskChanges.EXAMPLE]}

    tasks: Annotated[
        list[NamedTaskChanges], Meta(min_length=1, max_length=MAX_PAGE, description="The tasks, each once.")
    ]


class ChangedTasks(Struct, frozen=True):
    """Changed tasks with their current limits."""

    tasks: Annotated[list[TaskState], about("The tasks, in the order of the request.")]


class RemoveTaskQuery(Struct, forbid_unknown_fields=True, kw_only=True):
    """Action for the jobs that have not ended."""

    jobs: (
        Annotated[
            Literal["keep", "cancel"], about("`keep`: they wait until a process declares the task; `cancel`: they end.")
        ]
        | None
    ) = None


@routes.add("GET", _ADDRESS, role=Role.READ, answers={200: TaskState})
async def get_task(call: Call, task: str) -> Answer:
    """Show a task: its limits, whether its jobs may start now, and if not, why and until when."""
    return Answer(value=shown.task(await call.limits.task(task)))


@routes.add("PATCH", _ADDRESS, role=Role.ADMIN, body=TaskChanges, answers={200: TaskState})
async def set_task(call: Call, task: str, body: TaskChanges) -> Answer:
    """Override limits of a task. Applies from the next claim on, in all processes, and survives deployments."""
    [found] = await call.limits.set_tasks({task: body.given()})
    return Answer(value=shown.task(found))


@routes.add("PATCH", "/api/v1/tasks", role=Role.ADMIN, body=ManyTaskChanges, answers={200: ChangedTasks}, names=True)
async def set_tasks(call: Call, body: ManyTaskChanges) -> Answer:
    """Override limits of several tasks, all or none. A task that no process has declared is a 404."""
    changes = {one.task: one.given() for one in body.tasks}
    if len(changes) < len(body.tasks):
        raise BadRequest("tasks", "must have each task once")
    return Answer(value=ChangedTasks(list(map(shown.task, await call.limits.set_tasks(changes)))))


@routes.add("DELETE", _ADDRESS, role=Role.ADMIN, query=RemoveTaskQuery, answers={200: TaskState}, conflicts=True)
async def remove_task(call: Call, task: str, query: RemoveTaskQuery) -> Answer:
    """Forget a task until a process declares it again, and show it as it was. Processes start no jobs of it.

    409 while it has open jobs, unless `jobs` says what to do with them.
    """
    return Answer(value=shown.task(await call.limits.remove_task(task, jobs=query.jobs)))


@routes.add("POST", f"{_ADDRESS}/pause", role=Role.OPERATE, answers={200: TaskState})
async def pause_task(call: Call, task: str) -> Answer:
    """Pause a task: none of its jobs starts, in any queue. Running jobs continue."""
    return Answer(value=shown.task(await call.limits.pause_task(task)))


@routes.add("POST", f"{_ADDRESS}/resume", role=Role.OPERATE, answers={200: TaskState})
async def resume_task(call: Call, task: str) -> Answer:
    """End a task's pause."""
    return Answer(value=shown.task(await call.limits.resume_task(task)))

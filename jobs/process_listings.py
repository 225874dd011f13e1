"""Readers' views of durable processes: one process, pages of them, their events and tasks, groups of errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal
from uuid import UUID

import attrs

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.failures import GroupId, group_key
from dataloader.jobs.model import Instant, about
from dataloader.jobs.page_cursor import Next
from dataloader.jobs.processes import check_metadata, check_process_id, check_type
from dataloader.jobs.secrets.record_masks import FIXED_WORD, SENSITIVE, Public

ProcessStatus = Literal["init", "running", "error"]
PROCESS_STATUSES: Final[tuple[ProcessStatus, ...]] = ("init", "running", "error")
TaskKind = Literal["init", "call", "repair", "timeout", "remove"]
TaskStatus = Literal["waiting", "blocked", "running", "finished", "error", "cancelled"]
ENDED: Final = frozenset({"finished", "error", "cancelled"})
"""Statuses of a task that has its answer."""


@attrs.frozen(kw_only=True)
class ProcessTimer:
    """Only timer of a process."""

    task_id: Annotated[int, about("ID of the task that will run.")]
    kind: Annotated[Literal["timeout", "remove"], about("Kind of the task.")]
    at: Annotated[Instant, about("Due time.")]
    attempt: Annotated[int, about("Number of earlier tries.")]
    context: Annotated[Any, about("Context that was set with the timer."), SENSITIVE]


@attrs.frozen(kw_only=True)
class RunningStep:
    """Running step."""

    task_id: Annotated[int, about("Task.")]
    kind: Annotated[TaskKind, about("Kind of the task.")]
    since: Annotated[Instant, about("Start time.")]


@attrs.frozen(kw_only=True)
class ProcessVersion:
    """Version of a type, with its processes by status, each counted up to 10,000."""

    type: Annotated[str, about("Name of the type."), SENSITIVE]
    version: Annotated[int, about("Version of the type.")]
    served: Annotated[bool, about("True if a running worker serves it. Otherwise its processes wait.")]
    init: Annotated[int, about("Processes whose first step is not complete.")]
    running: Annotated[int, about("Processes with a state.")]
    error: Annotated[int, about("Processes in error.")]


@attrs.frozen
class VersionList:
    """Versions of types of processes."""

    versions: Annotated[list[ProcessVersion], about("Versions, the newest of each type first.")]


@attrs.frozen(kw_only=True)
class ProcessRecord:
    """Process and its current state."""

    type: Annotated[str, about("Name of the type."), SENSITIVE]
    process_id: Annotated[str, about("ID of the process, unique in its type."), SENSITIVE]
    version: Annotated[int, about("Version of the type that stored its state.")]
    status: Annotated[ProcessStatus, about("`init` until the first step is complete, `running`, or `error`.")]
    previous_status: Annotated[str | None, about("Previous status."), FIXED_WORD]
    status_changed_at: Annotated[Instant, about("Time of the last change of the status.")]
    created_at: Annotated[Instant, about("Creation time.")]
    detail: Annotated[str | None, about("Processes in error: the error."), SENSITIVE]
    error_group: Annotated[GroupId | None, about("Processes in error: ID of the error group.")]
    corrupted_by: Annotated[int | None, about("Processes in error: task of the failed timeout or step.")]
    state: Annotated[Any, about("State."), SENSITIVE]
    metadata: Annotated[Mapping[str, Any], about("Metadata for searches."), SENSITIVE]
    last_event_id: Annotated[int, about("Number of the last event; 0 if there is none.")]
    timer: Annotated[ProcessTimer | None, about("Timer, if there is one.")]
    running: Annotated[RunningStep | None, about("Running step, if there is one.")]


@attrs.frozen
class ProcessPage:
    """Page of processes, newest first."""

    processes: Annotated[list[ProcessRecord], about("Processes.")]
    next: Next


@attrs.frozen(kw_only=True)
class ProcessEvent:
    """Event of a process."""

    event_id: Annotated[int, about("Number in the process, from 1.")]
    task_id: Annotated[int, about("Task whose step caused it.")]
    at: Annotated[Instant, about("Timestamp.")]
    payload: Annotated[Any, about("Payload."), SENSITIVE]


@attrs.frozen
class ProcessEventPage:
    """Page of a process's events."""

    events: Annotated[list[ProcessEvent], about("Events.")]
    next: Next


_IDENT: Final = "Unique identifier, since another task may have the same number after a restore; null: unknown."


@attrs.frozen(kw_only=True)
class ProcessTask:
    """Request to a process, or one of its own timers."""

    task_id: Annotated[int, about("Number of the task, in ascending order of time.")]
    type: Annotated[str, about("Type of the process."), SENSITIVE]
    process_id: Annotated[str, about("ID of the process."), SENSITIVE]
    kind: Annotated[TaskKind, about("Kind of the task.")]
    method: Annotated[str | None, about("Calls: the method."), SENSITIVE]
    status: Annotated[
        TaskStatus,
        about(
            "`waiting`: not started yet; `blocked`: a timer while a call waits or runs; `running`; `finished`:"
            " completed, or refused if it has an `error`; `error`: failed; `cancelled`: never runs."
        ),
    ]
    args: Annotated[Any, about("Arguments of the call."), SENSITIVE]
    context: Annotated[Any, about("Context from the caller, or from the step that set the timer."), SENSITIVE]
    idempotency_key: Annotated[str | None, about("Idempotency key of the request."), SENSITIVE]
    response: Annotated[Any, about("Answer of a finished task."), SENSITIVE]
    error: Annotated[str | None, about("Reason why it was refused, failed or cancelled."), SENSITIVE]
    attempt: Annotated[int, about("Timeouts: number of earlier tries.")]
    first_task: Annotated[int | None, about("Repeated timeouts: task of the first try.")]
    created_at: Annotated[Instant, about("Time of the request; timers: due time.")]
    scheduled_at: Annotated[Instant | None, about("Timers: due time.")]
    started_at: Annotated[Instant | None, about("Start of the step.")]
    finished_at: Annotated[Instant | None, about("Time of the answer.")]
    expires_at: Annotated[Instant | None, about("Latest start. After it, the task never runs.")]
    ident: Annotated[
        UUID | None,
        about("Unique identifier, since another task may have the same number after a restore; null: unknown."),
    ] = None

    @property
    def answer(self) -> ProcessAnswer:
        """Answer of the task, with its status."""
        return ProcessAnswer(
            task_id=self.task_id, status=self.status, response=self.response, error=self.error, ident=self.ident
        )


@attrs.frozen(kw_only=True)
class ProcessAnswer:
    """Answer of a task, or only its status if it has none yet."""

    task_id: Annotated[int, about("Name of the task.")]
    status: Annotated[
        TaskStatus,
        about(
            "`finished`: completed, or refused if there is an `error`; `error` or `cancelled`: `error` has the reason."
        ),
    ]
    response: Annotated[Any, about("Answer of the step."), SENSITIVE] = None
    error: Annotated[str | None, about("Reason why it was refused, failed or cancelled."), SENSITIVE] = None
    ident: Annotated[
        UUID | None,
        about("Unique identifier, since another task may have the same number after a restore; null: unknown."),
    ] = None

    @property
    def is_answered(self) -> bool:
        """True if there is an answer."""
        return self.status in ENDED


@attrs.frozen
class ProcessTaskPage:
    """Page of a process's tasks, oldest first."""

    tasks: Annotated[list[ProcessTask], about("Tasks.")]
    next: Next


@attrs.frozen(kw_only=True)
class ProcessErrorGroup:
    """Processes of one type that are in error for the same reason."""

    group: GroupId
    type: Annotated[str, about("Type of the processes."), SENSITIVE]
    error: Annotated[
        str, about("Common first line of the errors, with … for quoted texts and # for words with digits."), SENSITIVE
    ]
    processes: Annotated[int, about("Number of processes.")]
    example: Annotated[str, about("ID of the newest process."), SENSITIVE]
    since: Annotated[Instant, about("Time since which this process is in error.")]


@attrs.frozen
class ProcessErrorPage:
    """Page of the groups of errors, those with the most processes first."""

    groups: Annotated[list[ProcessErrorGroup], about("Groups.")]
    next: Next


@attrs.frozen
class ProcessesChanged:
    """Number of processes that were repaired or resumed, and the cursor for the next request."""

    changed: Annotated[int, about("Number of processes.")]
    next: Annotated[
        str | None,
        about("Pass it as `after` to continue with the remaining processes; null after the last."),
        Public("a cursor has the place of a row"),
    ]


@attrs.frozen(kw_only=True)
class ProcessFilter:
    """Filter of processes; a field that is None matches all.

    `metadata` matches processes whose metadata have at least these entries. `error_group` is the ID of a group of
    errors. Raises `BadRequest` for a value that no process can have.
    """

    type: str | None = None
    process_id: str | None = None
    status: ProcessStatus | None = None
    metadata: Mapping[str, Any] | None = None
    error_group: str | None = None

    def __attrs_post_init__(self) -> None:
        """Refuse values that no process can have."""
        if self.type is not None:
            check_type("type", self.type)
        if self.process_id is not None:
            check_process_id("process_id", self.process_id)
        if self.status is not None and self.status not in PROCESS_STATUSES:
            raise BadRequest("status", f"must be {', '.join(PROCESS_STATUSES)}, not {self.status!r:.60}")
        if self.metadata is not None:
            check_metadata("metadata", self.metadata)
        if self.error_group is not None:
            group_key("error_group", self.error_group)

    def criteria(self) -> dict[str, Any]:
        """Return the given criteria, by name."""
        return {name: value for name, value in attrs.asdict(self, recurse=False).items() if value is not None}


EVERY_PROCESS: Final = ProcessFilter()


def check_wanted(wanted: ProcessFilter) -> None:
    """Raise `BadRequest` for a filter that would match every process."""
    if wanted == EVERY_PROCESS:
        raise BadRequest(
            "which", "must have a criterion, such as type or error_group; an empty filter would match all processes"
        )
    if wanted.status not in {None, "error"}:
        raise BadRequest("status", f"must be error or omitted, not {wanted.status}")

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

ProcessStatus = Literal["init", "running", "error"]
PROCESS_STATUSES: Final[tuple[ProcessStatus, ...]] = ("init", "running", "error")
TaskKind = Literal["init", "call", "repair", "timeout", "remove"]
TaskStatus = Literal["waiting", "blocked", "running", "finished", "error", "cancelled"]
ENDED: Final = frozenset({"finished", "error", "cancelled"})
"""Statuses of a task that has its answer."""


@attrs.frozen(kw_only=True)
class ProcessTimer:
    """Only timer of a process."""

    task_id: Annotated[int, about("The task that will run.")]
    kind: Annotated[Literal["timeout", "remove"], about("What it will do.")]
    at: Annotated[Instant, about("When it is due.")]
    attempt: Annotated[int, about("How often it was tried before.")]
    context: Annotated[Any, about("What the step that set it gives to it.")]


@attrs.frozen(kw_only=True)
class RunningStep:
    """Running step."""

    task_id: Annotated[int, about("Its task.")]
    kind: Annotated[TaskKind, about("What it is.")]
    since: Annotated[Instant, about("When it began.")]


@attrs.frozen(kw_only=True)
class ProcessVersion:
    """Version of a type, with its processes by status, each counted up to 10,000."""

    type: Annotated[str, about("The name of the type.")]
    version: Annotated[int, about("The version.")]
    served: Annotated[bool, about("Whether a running worker serves it; without one its processes wait.")]
    init: Annotated[int, about("Processes whose first step is not done.")]
    running: Annotated[int, about("Processes that have a state.")]
    error: Annotated[int, about("Processes in error.")]


@attrs.frozen
class VersionList:
    """Versions of types of processes."""

    versions: Annotated[list[ProcessVersion], about("The versions, the newest of a type first.")]


@attrs.frozen(kw_only=True)
class ProcessRecord:
    """Process and its current state."""

    type: Annotated[str, about("The name of its type.")]
    process_id: Annotated[str, about("Its id, unique in its type.")]
    version: Annotated[int, about("The version of its type that its state is of.")]
    status: Annotated[ProcessStatus, about("`init` until its first step is done, `running`, or `error`.")]
    previous_status: Annotated[str | None, about("The status before.")]
    status_changed_at: Annotated[Instant, about("Since when it has its status.")]
    created_at: Annotated[Instant, about("When it was started.")]
    detail: Annotated[str | None, about("Of a process in error: why.")]
    error_group: Annotated[GroupId | None, about("Of a process in error: the group of its error.")]
    corrupted_by: Annotated[int | None, about("Of a process in error: the timeout or the step that has failed.")]
    state: Annotated[Any, about("Its state.")]
    metadata: Annotated[Mapping[str, Any], about("What it is found by.")]
    last_event_id: Annotated[int, about("The number of its last event; 0: there is none.")]
    timer: Annotated[ProcessTimer | None, about("Its timer, if it has one.")]
    running: Annotated[RunningStep | None, about("The step that runs now, if one does.")]


@attrs.frozen
class ProcessPage:
    """Page of processes, newest first."""

    processes: Annotated[list[ProcessRecord], about("The processes.")]
    next: Next


@attrs.frozen(kw_only=True)
class ProcessEvent:
    """Event of a process."""

    event_id: Annotated[int, about("Its number in the process, from 1.")]
    task_id: Annotated[int, about("The task whose step it came of.")]
    at: Annotated[Instant, about("When it was stored.")]
    payload: Annotated[Any, about("What its author wrote.")]


@attrs.frozen
class ProcessEventPage:
    """Page of a process's events."""

    events: Annotated[list[ProcessEvent], about("The events.")]
    next: Next


_IDENT: Final = "Tells it from another task that has its number after a restore of the database; null: unknown."


@attrs.frozen(kw_only=True)
class ProcessTask:
    """Request to a process, or one of its own timers."""

    task_id: Annotated[int, about("Its number; older tasks have smaller ones.")]
    type: Annotated[str, about("The type of its process.")]
    process_id: Annotated[str, about("Its process.")]
    kind: Annotated[TaskKind, about("What it is.")]
    method: Annotated[str | None, about("Of a call: the method.")]
    status: Annotated[
        TaskStatus,
        about(
            "`waiting` for its turn or its time; `blocked`: a timer while a call waits or runs; `running`; `finished`:"
            " done, or refused if it has an `error`; `error`: it has failed; `cancelled`: it never runs."
        ),
    ]
    args: Annotated[Any, about("What its caller gave.")]
    context: Annotated[Any, about("What its caller, or the step that set the timer, gave beside.")]
    idempotency_key: Annotated[str | None, about("The key of the request.")]
    response: Annotated[Any, about("The answer of one that is done.")]
    error: Annotated[str | None, about("Why it was refused, failed or cancelled.")]
    attempt: Annotated[int, about("Of a timeout: how often it was tried before.")]
    first_task: Annotated[int | None, about("Of a timeout that is tried again: the first try.")]
    created_at: Annotated[Instant, about("When it was asked for; of a timer: when it is due.")]
    scheduled_at: Annotated[Instant | None, about("Of a timer: when it is due.")]
    started_at: Annotated[Instant | None, about("When its step began.")]
    finished_at: Annotated[Instant | None, about("When it got its answer.")]
    expires_at: Annotated[Instant | None, about("If it has not begun by then, it never runs.")]
    ident: Annotated[
        UUID | None,
        about("Tells it from another task that has its number after a restore of the database; null: unknown."),
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

    task_id: Annotated[int, about("The task.")]
    status: Annotated[
        TaskStatus,
        about("`finished`: done, or refused if there is an `error`; `error` or `cancelled`: why is in `error`."),
    ]
    response: Annotated[Any, about("What the step has answered.")] = None
    error: Annotated[str | None, about("Why it was refused, failed or cancelled.")] = None
    ident: Annotated[
        UUID | None,
        about("Tells it from another task that has its number after a restore of the database; null: unknown."),
    ] = None

    @property
    def is_answered(self) -> bool:
        """True if there is an answer."""
        return self.status in ENDED


@attrs.frozen
class ProcessTaskPage:
    """Page of a process's tasks, oldest first."""

    tasks: Annotated[list[ProcessTask], about("The tasks.")]
    next: Next


@attrs.frozen(kw_only=True)
class ProcessErrorGroup:
    """Processes of one type that are in error for the same reason."""

    group: GroupId
    type: Annotated[str, about("Their type.")]
    error: Annotated[
        str, about("What they have in common: the first line, with quoted texts as … and words with digits as #.")
    ]
    processes: Annotated[int, about("How many processes there are.")]
    example: Annotated[str, about("The id of the newest of them.")]
    since: Annotated[Instant, about("Since when that one is in error.")]


@attrs.frozen
class ProcessErrorPage:
    """Page of the groups of errors, those with the most processes first."""

    groups: Annotated[list[ProcessErrorGroup], about("The groups.")]
    next: Next


@attrs.frozen
class ProcessesChanged:
    """Number of processes that were repaired or resumed, and the cursor for the next request."""

    changed: Annotated[int, about("How many processes there were.")]
    next: Annotated[str | None, about("Send it as `after` to go on with the others; null after the last.")]


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
            "which", "must have a criterion, such as type or error_group: an empty filter means every process"
        )
    if wanted.status not in {None, "error"}:
        raise BadRequest("status", f"must be error, or be left out, not {wanted.status}")

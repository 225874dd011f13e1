"""The operations on durable processes: reading them, changing one or all that match a filter, and their deliveries.

Requests to processes are methods of `Performer` instead (`ask`, `start_many`, `put`): their values are the caller's
own, which are checked and encoded before they are sent, and their answers are waited for.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final
from uuid import UUID

import msgspec
from msgspec import Meta, Struct

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.model import about
from dataloader.jobs.operations.fields import HELD_REQUEST_S, MAX_WAIT_S, AfterPage, Limit, field_meta
from dataloader.jobs.operations.operation import Operation, Operations
from dataloader.jobs.process_listings import (
    ProcessAnswer,
    ProcessErrorPage,
    ProcessesChanged,
    ProcessEventPage,
    ProcessFilter,
    ProcessPage,
    ProcessRecord,
    ProcessStatus,
    ProcessTask,
    ProcessTaskPage,
    VersionList,
)
from dataloader.jobs.process_outbox import HeldDeliveryPage, HeldFilter, Released, SinkList
from dataloader.jobs.process_requests import BATCH
from dataloader.jobs.processes import (
    MAX_PROCESS_ID,
    MAX_TYPE,
    ProcessConflict,
    ProcessNotFound,
    check_process_id,
    check_type,
)
from dataloader.jobs.roles import Role

processes: Final = Operations()

ONE: Final = "/processes/{process_type}/{process_id}"
TASK: Final = "/processes/tasks/{task_id}"

ProcessId = Annotated[
    str, field_meta("ID of the process, unique in its type.", "order-77", minLength=1, maxLength=MAX_PROCESS_ID)
]
ProcessType = Annotated[str, field_meta("Name of the type.", "payment", minLength=1, maxLength=MAX_TYPE)]
StepArgs = Annotated[Any, field_meta("Arguments of the step: any JSON value.", 5)]
Wait = Annotated[
    float, Meta(ge=0, le=MAX_WAIT_S, description="Seconds to wait for the answer. Returns as soon as there is one.")
]
AfterRow = Annotated[AfterPage, Meta(description="`next` of the previous page, or the number of a row.")]
NewestFirst = Annotated[bool, about("True for the latest first.")]
ErrorGroupName = Annotated[str, about("ID of an error group.")]
Ident = Annotated[
    UUID | None, Meta(description="`ident` of the task. The status is 404 if another task has the number.")
]
SinkName = Annotated[
    str, field_meta("Name of the sink; `messages`: messages to other processes.", "books", minLength=1, maxLength=100)
]
OnlyHeld = Annotated[bool, about("Only held deliveries, which wait for an operator.")]


class OneProcess(Struct, forbid_unknown_fields=True):
    """One process, by its address."""

    process_type: str
    process_id: str

    def __post_init__(self) -> None:
        """Refuse names that no process can have: some of them would change the address."""
        check_type("type", self.process_type)
        check_process_id("process_id", self.process_id)


@processes.declare("GET", "/processes", role=Role.READ)
class ListProcesses(Operation[ProcessPage], kw_only=True):
    """List processes, newest first. A page of long states has fewer than `limit`."""

    limit: Limit = 50
    after: AfterPage | None = None
    type: ProcessType | None = None
    process_id: ProcessId | None = None
    status: ProcessStatus | None = None
    metadata: (
        Annotated[str, Meta(description="JSON object that the metadata contain.", examples=['{"tenant":"a"}'])] | None
    ) = None
    error_group: ErrorGroupName | None = None

    def wanted(self) -> ProcessFilter:
        """Return the filter of the domain. Raises `BadRequest`."""
        metadata = None
        if self.metadata is not None:
            try:
                metadata = msgspec.json.decode(self.metadata, type=dict[str, Any])
            except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
                raise BadRequest("metadata", f"is not a JSON object: {error}") from error
        return ProcessFilter(
            type=self.type,
            process_id=self.process_id,
            status=self.status,
            metadata=metadata,
            error_group=self.error_group,
        )


@processes.declare("GET", ONE, role=Role.READ, errors=(ProcessNotFound,), deadline_s=HELD_REQUEST_S)
class ShowProcess(OneProcess, Operation[ProcessRecord]):
    """Show a process. With `wait`, return when its first step has finished, or after `wait` seconds."""

    wait: Wait = 0.0

    @staticmethod
    def is_awaited(process: ProcessRecord) -> bool:
        """Return whether the wait continues."""
        return process.status == "init"


@processes.declare("GET", f"{ONE}/events", role=Role.READ, errors=(ProcessNotFound,))
class ListProcessEvents(OneProcess, Operation[ProcessEventPage]):
    """List a process's events, oldest first. To follow them, send the last `event_id` as `after`."""

    limit: Limit = 200
    after: AfterRow | None = None
    newest_first: NewestFirst = False


@processes.declare("GET", f"{ONE}/tasks", role=Role.READ, errors=(ProcessNotFound,))
class ListProcessTasks(OneProcess, Operation[ProcessTaskPage]):
    """List a process's requests and timers, oldest first."""

    limit: Limit = 200
    after: AfterRow | None = None
    newest_first: NewestFirst = False


@processes.declare("GET", TASK, role=Role.READ, errors=(ProcessNotFound,), deadline_s=HELD_REQUEST_S)
class ShowProcessTask(Operation[ProcessTask]):
    """Show a task. With `wait`, return when it has its answer, or after `wait` seconds."""

    task_id: int
    wait: Wait = 0.0
    ident: Ident = None

    @staticmethod
    def is_awaited(task: ProcessTask) -> bool:
        """Return whether the wait continues."""
        return not task.answer.is_answered


@processes.declare("GET", "/processes/errors", role=Role.READ)
class ListProcessErrors(Operation[ProcessErrorPage], kw_only=True):
    """Count the processes in error by type and error, the most processes first. Each page counts again."""

    limit: Limit = 50
    after: AfterPage | None = None
    type: ProcessType | None = None


@processes.declare("GET", "/processes/versions", role=Role.READ)
class ListProcessVersions(Operation[VersionList]):
    """List the versions of types that have processes or are served, with their processes by status."""

    type: ProcessType | None = None


@processes.declare("POST", f"{ONE}/resume", role=Role.OPERATE, errors=(ProcessNotFound, ProcessConflict))
class ResumeProcess(OneProcess, Operation[ProcessRecord]):
    """Let a process in error continue without changes: the failed timeout is tried again."""


@processes.declare("POST", f"{ONE}/stop", role=Role.OPERATE, errors=(ProcessNotFound, ProcessConflict))
class StopProcess(OneProcess, Operation[ProcessRecord]):
    """Stop the running step. Its process is then in error. 409 if no step runs."""


@processes.declare("POST", f"{ONE}/remove", role=Role.OPERATE, errors=(ProcessNotFound,))
class RemoveProcess(OneProcess, Operation[ProcessRecord]):
    """Remove a process, and show it as it was. A running step is stopped, waiting calls are cancelled."""


class ChangeManyRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Filter of processes in error, with at least one criterion, and the number of processes per request."""

    EXAMPLE: ClassVar[Any] = {"error_group": "00c8f1de4a91b37e", "limit": 1000}

    type: ProcessType | None = None
    process_id: ProcessId | None = None
    status: Annotated[ProcessStatus, about("`error`, or omitted.")] | None = None
    metadata: Annotated[dict[str, Any], about("Object that the metadata contain.")] | None = None
    error_group: ErrorGroupName | None = None
    limit: Annotated[int, Meta(ge=1, le=BATCH, description="Maximum number of processes that one request handles.")] = (
        BATCH
    )
    after: AfterPage | None = None

    def wanted(self) -> ProcessFilter:
        """Return the filter of the domain. Raises `BadRequest`."""
        return ProcessFilter(
            type=self.type,
            process_id=self.process_id,
            status=self.status,
            metadata=self.metadata,
            error_group=self.error_group,
        )


class RepairManyRequest(ChangeManyRequest, kw_only=True):
    """Filter of processes in error, and the args of their repairs."""

    args: StepArgs = None


@processes.declare("POST", "/processes/repair", role=Role.ADMIN)
class RepairProcesses(RepairManyRequest, Operation[ProcessesChanged]):
    """Repair the processes in error that match a filter, up to its limit; repeat with `next` as `after` until null."""


@processes.declare("POST", "/processes/resume", role=Role.ADMIN)
class ResumeProcesses(ChangeManyRequest, Operation[ProcessesChanged]):
    """Resume the processes in error that match a filter, up to its limit; repeat with `next` as `after` until null."""


@processes.declare("POST", f"{TASK}/withdraw", role=Role.OPERATE, errors=(ProcessNotFound,), in_query=True)
class WithdrawCall(Operation[ProcessAnswer]):
    """Withdraw a call if it has not begun: it is `cancelled` then. Otherwise it continues unchanged."""

    task_id: int
    ident: Ident = None


@processes.declare("GET", "/processes/sinks", role=Role.READ)
class ListSinks(Operation[SinkList]):
    """List the sinks of process events, and messages to processes, with the number and age of waiting deliveries."""


@processes.declare("GET", "/processes/deliveries", role=Role.READ)
class ListDeliveries(Operation[HeldDeliveryPage], kw_only=True):
    """List the processes whose deliveries have failed, by sink: they are retried, or held."""

    limit: Limit = 50
    after: AfterPage | None = None
    sink: SinkName | None = None
    type: ProcessType | None = None
    process_id: ProcessId | None = None
    held: OnlyHeld = False


class ReleaseRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Filter of held-up deliveries, with at least one criterion."""

    EXAMPLE: ClassVar[Any] = {"sink": "books"}

    sink: SinkName | None = None
    type: ProcessType | None = None
    process_id: ProcessId | None = None
    held: OnlyHeld = False


@processes.declare("POST", "/processes/deliveries/release", role=Role.OPERATE)
class ReleaseDeliveries(ReleaseRequest, Operation[Released]):
    """Retry the matching held-up deliveries now, as if they had not failed; at most 10,000 processes."""


def held_filter(request: ListDeliveries | ReleaseDeliveries) -> HeldFilter:
    """Return the filter of the domain."""
    return HeldFilter(sink=request.sink, type=request.type, process_id=request.process_id, held=request.held)

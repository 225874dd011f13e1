"""`ProcessClient`: durable processes, as programs, commands, pages and HTTP views use them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final
from uuid import UUID

import attrs

from dataloader.jobs.client.client_part import ClientPart
from dataloader.jobs.errors import BadRequest
from dataloader.jobs.operations import processes as operations
from dataloader.jobs.page_cursor import After, cursor_text
from dataloader.jobs.process_listings import (
    EVERY_PROCESS,
    ProcessAnswer,
    ProcessErrorPage,
    ProcessesChanged,
    ProcessEventPage,
    ProcessFilter,
    ProcessPage,
    ProcessRecord,
    ProcessTask,
    ProcessTaskPage,
    ProcessVersion,
)
from dataloader.jobs.process_outbox import EVERY_DELIVERY, HeldDeliveryPage, HeldFilter, SinkRecord
from dataloader.jobs.process_requests import (
    BATCH,
    MAX_STARTS,
    NO_START,
    NoStart,
    ProcessChange,
    ProcessImport,
    ProcessRequest,
    ProcessStarted,
)
from dataloader.jobs.processes import MAX_VALUE, CallTimeout, ProcessFailed, Refused, check_metadata
from dataloader.jobs.text import exact_json

ANSWER_S: Final = 60.0
"""Default time to wait for an answer, in seconds."""
WITHDRAWN: Final = "withdrawn"
"""Error of a call that was withdrawn."""


@attrs.frozen
class ProcessClient(ClientPart):
    """Durable processes: `client.processes` of `dataloader.open_client`, or `supervisor.processes`.

    All methods raise `BadRequest` for values that are not allowed, and `StoreUnavailable` if no answer came: the
    request may or may not have been accepted, and is safe to repeat if it has a `key`.
    """

    async def start(
        self,
        process_type: str,
        process_id: str,
        args: Any = None,
        *,
        key: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        timeout_s: float = ANSWER_S,
    ) -> Any:
        """Start a process, and return its first step's answer.

        Args:
            process_type: the name of its type.
            process_id: its ID, unique in the type, 1 to 256 characters.
            args: arguments of the first step.
            key: an idempotency key, unique in the type: a repeated request gets the first one's answer.
            metadata: a flat JSON object of at most 16 KiB, by which the process can be found.
            timeout_s: how long to wait for the answer, in seconds.

        Raises:
            ProcessConflict: a process with this ID exists.
            IdempotencyConflict: the key belongs to another request.
            Refused: the step has refused it, and there is no process.
            ProcessFailed: the step has failed; the process is in error.
            CallTimeout: no answer came in time; the process is started nevertheless.
            Draining: this process, or the service, is shutting down.
        """
        request = ProcessRequest(
            type=process_type, process_id=process_id, kind="init", args=args, key=key, metadata=metadata
        )
        return _response_of(await self.ask(request, wait_s=timeout_s))

    async def call(
        self,
        process_type: str,
        process_id: str,
        method: str,
        args: Any = None,
        *,
        key: str | None = None,
        context: Any = None,
        timeout_s: float = ANSWER_S,
        expires_at: datetime | None = None,
        withdraw: bool = False,
        start: Any = NO_START,
        metadata: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a method of a process, and return its answer.

        Calls of one process run one at a time, the oldest first, before its timer. Abandoning the wait does not cancel
        the call.

        Args:
            process_type: the name of its type.
            process_id: its ID.
            method: the method's name.
            args: arguments of the method.
            key: an idempotency key, unique in the type: a repeated request gets the first one's answer.
            context: an additional value, passed as `p.context`.
            timeout_s: how long to wait for the answer, in seconds.
            expires_at: a call that has not begun by then never runs, and raises `ProcessFailed`.
            withdraw: if the wait ends without an answer, or is cancelled, withdraw the call if it has not begun.
            start: start the process if it is missing, with this as the args of its first step.
            metadata: metadata of the process that it starts.

        Raises:
            ProcessNotFound: there is no such process.
            ProcessConflict: the process is in error, or its first step has not finished.
            IdempotencyConflict: the key belongs to another request.
            Refused: the step has refused it; nothing has changed.
            ProcessFailed: the step has failed, or the call was cancelled, or has expired.
            CallTimeout: no answer came in time.
            Draining: this process, or the service, is shutting down.
        """
        may_start = not isinstance(start, NoStart)
        request = ProcessRequest(
            type=process_type,
            process_id=process_id,
            kind="call",
            method=method,
            args=args,
            context=context,
            key=key,
            expires_at=expires_at,
            may_start=may_start,
            start=start if may_start else None,
            metadata=metadata,
        )
        answer = await self.ask(request, wait_s=timeout_s, withdraw=withdraw)
        if withdraw and answer.status == "cancelled" and answer.error == WITHDRAWN:
            raise CallTimeout(answer.task_id, withdrawn=True, ident=answer.ident)
        return _response_of(answer)

    async def repair(
        self,
        process_type: str,
        process_id: str,
        args: Any = None,
        *,
        key: str | None = None,
        timeout_s: float = ANSWER_S,
    ) -> Any:
        """Repair a process that is in error with the repair step of its type, and return the step's answer.

        If it succeeds, the process runs again, and the failed timeout is tried again unless the step says otherwise. If
        it fails, the process does not change. Raises the errors of `call`; `ProcessConflict` for a process that is not
        in error.
        """
        request = ProcessRequest(type=process_type, process_id=process_id, kind="repair", args=args, key=key)
        return _response_of(await self.ask(request, wait_s=timeout_s))

    async def wait(self, task_id: int, *, timeout_s: float = ANSWER_S, ident: UUID | None = None) -> Any:
        """Wait for the answer of a task, such as that of a `CallTimeout`. Raises the errors of `call`.

        `ident` is the task's, from the `CallTimeout`. Raises `HistoryChanged` if the task has another one.
        """
        return _response_of((await self.task(task_id, wait_s=timeout_s, ident=ident)).answer)

    async def ask(self, request: ProcessRequest, *, wait_s: float = 0.0, withdraw: bool = False) -> ProcessAnswer:
        """Send a request, and return its answer, or the task's status after `wait_s` seconds without one.

        With `withdraw`, a call without an answer by then, or whose caller is cancelled, is withdrawn if it has not
        begun.

        Raises `ProcessNotFound`, `ProcessConflict`, `IdempotencyConflict`, `Draining`.
        """
        if withdraw and request.kind != "call":
            raise BadRequest("withdraw", "is only allowed for calls")
        request.check_key()
        return await self.performer.ask(request, wait_s=_checked(wait_s), withdraw=withdraw)

    async def task(self, task_id: int, *, wait_s: float = 0.0, ident: UUID | None = None) -> ProcessTask:
        """Return a task when it has its answer, or after `wait_s` seconds.

        Raises `ProcessNotFound`, and `HistoryChanged` if the task's ident is not `ident`.
        """
        return await self.performer.perform(operations.ShowProcessTask(task_id, _checked(wait_s), ident))

    async def withdraw(self, task_id: int, *, ident: UUID | None = None) -> ProcessAnswer:
        """Withdraw a call if it has not begun, and return its status. Raises the errors of `task`."""
        return await self.performer.perform(operations.WithdrawCall(task_id, ident))

    async def start_many(self, requests: Sequence[ProcessRequest]) -> list[ProcessStarted]:
        """Start at most 1,000 processes in one transaction, without waiting. Answers are in the order of requests.

        Each request's kind is `init`. Through a service all are of one type. If a process exists already, nothing is
        done for it. Raises `IdempotencyConflict` if a key belongs to another request, and then starts none.
        """
        if len(requests) > MAX_STARTS:
            raise BadRequest("processes", f"must have at most {MAX_STARTS:,} items, not {len(requests):,}")
        for number, request in enumerate(requests):
            if request.kind != "init":
                raise BadRequest(f"processes[{number}].kind", f"must be init, not {request.kind}")
            request.check_key(f"processes[{number}].key")
        return await self.performer.start_many(requests) if requests else []

    async def put(self, process: ProcessImport) -> ProcessRecord:
        """Import a process of another system, ready to run. No step runs.

        Raises `ProcessConflict` if a process with its ID exists.
        """
        return await self.performer.put(process)

    async def get(self, process_type: str, process_id: str, *, wait_s: float = 0.0) -> ProcessRecord:
        """Return a process. If its first step has not finished, wait for it for at most `wait_s` seconds.

        Raises `ProcessNotFound`.
        """
        return await self.performer.perform(operations.ShowProcess(process_type, process_id, _checked(wait_s)))

    async def events(
        self,
        process_type: str,
        process_id: str,
        *,
        limit: int = 200,
        after: After = None,
        newest_first: bool = False,
    ) -> ProcessEventPage:
        """Return a page of at most `limit` (1 to 1,000) events, after `after`, a page's `next` or an `event_id`.

        A page of long events has fewer. Raises `ProcessNotFound`.
        """
        page = limit, cursor_text(after), newest_first
        return await self.performer.perform(operations.ListProcessEvents(process_type, process_id, *page))

    async def tasks(
        self, process_type: str, process_id: str, *, limit: int = 200, after: After = None, newest_first: bool = False
    ) -> ProcessTaskPage:
        """Return a page of a process's tasks, its timer included, as `events` does."""
        page = limit, cursor_text(after), newest_first
        return await self.performer.perform(operations.ListProcessTasks(process_type, process_id, *page))

    async def find(self, wanted: ProcessFilter = EVERY_PROCESS, *, limit: int = 50, after: After = None) -> ProcessPage:
        """Return a page of at most `limit` (1 to 1,000) processes, newest first. A page of long states has fewer."""
        criteria = wanted.criteria()
        if wanted.metadata is not None:
            criteria["metadata"] = check_metadata("metadata", wanted.metadata)
        return await self.performer.perform(operations.ListProcesses(**criteria, limit=limit, after=cursor_text(after)))

    async def errors(
        self, *, process_type: str | None = None, limit: int = 50, after: After = None
    ) -> ProcessErrorPage:
        """Count the processes in error by type and error, the most processes first. Each page counts again."""
        wanted = operations.ListProcessErrors(type=process_type, limit=limit, after=cursor_text(after))
        return await self.performer.perform(wanted)

    async def versions(self, process_type: str | None = None) -> list[ProcessVersion]:
        """Return the versions of a type, or of all types, the newest of a type first.

        A version is in the list if it has processes or a running worker serves it.
        """
        return (await self.performer.perform(operations.ListProcessVersions(process_type))).versions

    async def resume(self, process_type: str, process_id: str) -> ProcessRecord:
        """Let a process in error continue without changes: the failed timeout is tried again.

        Raises `ProcessNotFound`; `ProcessConflict` for a process that is not in error, or whose repair is in progress.
        """
        return await self.performer.perform(operations.ResumeProcess(process_type, process_id))

    async def stop(self, process_type: str, process_id: str) -> ProcessRecord:
        """Stop the running step. Its process is then in error.

        Raises `ProcessNotFound`; `ProcessConflict` if no step runs.
        """
        return await self.performer.perform(operations.StopProcess(process_type, process_id))

    async def remove(self, process_type: str, process_id: str) -> ProcessRecord:
        """Remove a process, and return it as it was. A running step is stopped, and waiting calls are cancelled.

        Raises `ProcessNotFound`.
        """
        return await self.performer.perform(operations.RemoveProcess(process_type, process_id))

    async def sinks(self) -> list[SinkRecord]:
        """Return the state of the deliveries to each sink, and of messages to other processes, by name."""
        return (await self.performer.perform(operations.ListSinks())).sinks

    async def deliveries(
        self, wanted: HeldFilter = EVERY_DELIVERY, *, limit: int = 50, after: After = None
    ) -> HeldDeliveryPage:
        """Return a page of at most `limit` (1 to 1,000) processes with held-up deliveries, by sink."""
        criteria = attrs.asdict(wanted)
        return await self.performer.perform(
            operations.ListDeliveries(**criteria, limit=limit, after=cursor_text(after))
        )

    async def release(self, wanted: HeldFilter) -> int:
        """Retry the matching held-up deliveries now, as if they had not failed. Return the number of processes.

        At most 10,000 are retried in one call. Raises `BadRequest` for a filter without a criterion.
        """
        return (await self.performer.perform(operations.ReleaseDeliveries(**attrs.asdict(wanted)))).released

    async def repair_many(self, wanted: ProcessFilter, args: Any = None, *, limit: int | None = None) -> int:
        """Repair the processes in error that match a filter, without waiting. Return their number.

        Processes whose repair is in progress are skipped. `limit` (1 to 10,000) bounds the number of processes checked;
        None means all. Raises `BadRequest` for a filter without a criterion.
        """
        return await self._change(ProcessChange(action="repair", args=args), wanted, limit)

    async def resume_many(self, wanted: ProcessFilter, *, limit: int | None = None) -> int:
        """Resume the processes in error that match a filter, as `repair_many` does."""
        return await self._change(ProcessChange(action="resume"), wanted, limit)

    async def _change(self, change: ProcessChange, wanted: ProcessFilter, limit: int | None) -> int:
        count, after, left = 0, None, limit
        while left is None or left > 0:
            part = BATCH if left is None else min(left, BATCH)
            changed = await self.change_some(change, wanted, limit=part, after=after)
            count, after = count + changed.changed, changed.next
            if after is None:
                break
            left = None if left is None else left - part
        return count

    async def change_some(
        self, change: ProcessChange, wanted: ProcessFilter, *, limit: int = BATCH, after: After = None
    ) -> ProcessesChanged:
        """Change at most `limit` (1 to 1,000) processes in one transaction, oldest first, after `after`."""
        which = wanted.criteria() | {"limit": limit, "after": cursor_text(after)}
        if change.action == "resume":
            return await self.performer.perform(operations.ResumeProcesses(**which))
        exact_json("args", change.args, MAX_VALUE)
        return await self.performer.perform(operations.RepairProcesses(**which, args=change.args))


def _response_of(answer: ProcessAnswer) -> Any:
    """Return a step's response. Raises `Refused`, `ProcessFailed`, and `CallTimeout` if there is no answer."""
    if not answer.is_answered:
        raise CallTimeout(answer.task_id, ident=answer.ident)
    if answer.status == "finished":
        if answer.error is not None:
            raise Refused(answer.error, answer.task_id)
        return answer.response
    raise ProcessFailed(answer.error or answer.status, answer.task_id)


def _checked(wait_s: float) -> float:
    if math.isnan(wait_s) or wait_s < 0:
        raise BadRequest("wait_s", f"must be a number of seconds, at least 0, not {wait_s}")
    return wait_s

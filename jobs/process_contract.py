"""The operations on durable processes: `ProcessClient`, which programs, commands and HTTP views use (P1, P2).

`store.processes.database_processes.DatabaseProcesses` does it over the database, `web.http_processes.HttpProcesses`
through a running service; one suite of tests runs on both. Both raise the same errors.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Literal
from uuid import UUID

import attrs

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.page_cursor import After
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
from dataloader.jobs.process_requests import ProcessImport, ProcessRequest, ProcessStarted
from dataloader.jobs.processes import CallTimeout, ProcessFailed, Refused

ANSWER_S: Final = 60.0
"""How long an answer is waited for, in seconds, where the caller does not say."""
BATCH: Final = 1_000
"""Processes that one transaction changes."""


class NoStart:
    """Stands for a call that starts no process."""


NO_START: Final = NoStart()


@attrs.frozen(kw_only=True)
class ProcessChange:
    """What is done to the processes in error that match a filter; `args` belong to `repair`."""

    action: Literal["repair", "resume"]
    args: Any = None


class ProcessClient(abc.ABC):
    """Durable processes: `client.processes` of `dataloader.open_client`, or `supervisor.processes`.

    All raise `BadRequest` for values that are not allowed, and `StoreUnavailable` when no answer came: a request may
    have been taken or not, and is safe to repeat if it has a `key`.
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
        """Start a process; return what its first step answers.

        Args:
            process_type: the name of its type.
            process_id: its id, which no other process of the type has, 1 to 256 characters.
            args: what the first step is given.
            key: an idempotency key, unique in the type: the same request again has the first one's answer.
            metadata: by which it is found, a flat JSON object of at most 16 KiB.
            timeout_s: how long to wait for the answer, in seconds.

        Raises:
            ProcessConflict: there is a process of this id.
            IdempotencyConflict: the key belongs to another request.
            Refused: the step has refused it, and there is no process.
            ProcessFailed: the step has failed; the process is in error.
            CallTimeout: no answer came in time; the process is started all the same.
            Draining: this process, or the service, is shutting down.
        """
        request = ProcessRequest(
            type=process_type, process_id=process_id, kind="init", args=args, key=key, metadata=metadata
        )
        return response_of(await self.ask(request, wait_s=timeout_s))

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
        """Call a method of a process; return its answer.

        Calls of one process run one at a time, the oldest first, before its timer. A caller that leaves leaves its
        call: it runs all the same.

        Args:
            process_type: the name of its type.
            process_id: its id.
            method: the method's name.
            args: what it is given.
            key: an idempotency key, unique in the type: the same request again has the first one's answer.
            context: what it is given beside, as `p.context`.
            timeout_s: how long to wait for the answer, in seconds.
            expires_at: a call that has not begun by then never runs: `ProcessFailed`.
            withdraw: when the wait ends without an answer, or is cancelled, the call is taken back if it has not begun.
            start: starts the process if it is missing, with this as the args of its first step.
            metadata: of the process that it starts.

        Raises:
            ProcessNotFound: there is no such process.
            ProcessConflict: the process is in error, or its first step is not done.
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
        return response_of(answer)

    async def repair(
        self,
        process_type: str,
        process_id: str,
        args: Any = None,
        *,
        key: str | None = None,
        timeout_s: float = ANSWER_S,
    ) -> Any:
        """Mend a process that is in error by the repair of its type; return what that answers.

        If it succeeds, the process runs again, and the timeout that had failed is tried again unless it says otherwise.
        If it fails, the process stays as it was. Raises as `call`; `ProcessConflict` for one that is not in error.
        """
        request = ProcessRequest(type=process_type, process_id=process_id, kind="repair", args=args, key=key)
        return response_of(await self.ask(request, wait_s=timeout_s))

    async def wait(self, task_id: int, *, timeout_s: float = ANSWER_S, ident: UUID | None = None) -> Any:
        """Wait for the answer of a task, such as that of a `CallTimeout`. Raises as `call`.

        `ident`: the task's, as the `CallTimeout` has it. Raises `HistoryChanged` if the task has another one.
        """
        return response_of((await self.task(task_id, wait_s=timeout_s, ident=ident)).answer)

    @abc.abstractmethod
    async def ask(self, request: ProcessRequest, *, wait_s: float = 0.0, withdraw: bool = False) -> ProcessAnswer:
        """Ask, and return the answer as soon as there is one, or how the task stands after `wait_s` seconds.

        With `withdraw` a call that has no answer by then, or whose caller is cancelled, is taken back if it has not
        begun. Raises `ProcessNotFound`, `ProcessConflict`, `IdempotencyConflict`, `Draining`.
        """

    @abc.abstractmethod
    async def task(self, task_id: int, *, wait_s: float = 0.0, ident: UUID | None = None) -> ProcessTask:
        """Return a task: when it has its answer, or as it stands after `wait_s` seconds.

        Raises `ProcessNotFound`; `HistoryChanged` if the task's ident is another than `ident`.
        """

    @abc.abstractmethod
    async def withdraw(self, task_id: int, *, ident: UUID | None = None) -> ProcessAnswer:
        """Take a call back if it has not begun; return how it stands then. Raises as `task`."""

    @abc.abstractmethod
    async def start_many(self, requests: Sequence[ProcessRequest]) -> list[ProcessStarted]:
        """Start at most 1,000 processes in one transaction, without waiting; the answers come in their order.

        Each request's kind is `init`. Where there is a process already nothing is done. Raises `IdempotencyConflict`
        if a key belongs to another request, and starts none then.
        """

    @abc.abstractmethod
    async def put(self, process: ProcessImport) -> ProcessRecord:
        """Store a process that another system has begun, ready to run. No step runs.

        Raises `ProcessConflict` if there is a process of its id.
        """

    @abc.abstractmethod
    async def get(self, process_type: str, process_id: str, *, wait_s: float = 0.0) -> ProcessRecord:
        """Return a process as it stands; one whose first step is not done after `wait_s` seconds at most.

        Raises `ProcessNotFound`.
        """

    @abc.abstractmethod
    async def events(
        self,
        process_type: str,
        process_id: str,
        *,
        limit: int = 200,
        after: After = None,
        newest_first: bool = False,
    ) -> ProcessEventPage:
        """Return a page of its events: at most `limit` (1 to 1,000), from `after`, a page's `next` or an `event_id`.

        A page of long ones has fewer. Raises `ProcessNotFound`.
        """

    @abc.abstractmethod
    async def tasks(
        self, process_type: str, process_id: str, *, limit: int = 200, after: After = None, newest_first: bool = False
    ) -> ProcessTaskPage:
        """Return a page of its tasks, as `events` does, its timer included."""

    @abc.abstractmethod
    async def find(self, wanted: ProcessFilter = EVERY_PROCESS, *, limit: int = 50, after: After = None) -> ProcessPage:
        """Return a page of at most `limit` (1 to 1,000) processes, newest first; a page of long states has fewer."""

    @abc.abstractmethod
    async def errors(
        self, *, process_type: str | None = None, limit: int = 50, after: After = None
    ) -> ProcessErrorPage:
        """Count the processes in error by type and error, the most processes first; each page is counted anew."""

    @abc.abstractmethod
    async def versions(self, process_type: str | None = None) -> list[ProcessVersion]:
        """Return the versions of a type, or of all types, the newest of a type first.

        A version is in the list if it has processes or a running worker serves it.
        """

    @abc.abstractmethod
    async def resume(self, process_type: str, process_id: str) -> ProcessRecord:
        """Let a process in error go on as it is: the timeout that had failed is tried again.

        Raises `ProcessNotFound`; `ProcessConflict` for one that is not in error, or is being mended.
        """

    @abc.abstractmethod
    async def stop(self, process_type: str, process_id: str) -> ProcessRecord:
        """Stop the step that runs now, which is an error of its process then.

        Raises `ProcessNotFound`; `ProcessConflict` when none runs.
        """

    @abc.abstractmethod
    async def remove(self, process_type: str, process_id: str) -> ProcessRecord:
        """Remove a process, and return it as it was; a step that runs is stopped, and calls that wait are cancelled.

        Raises `ProcessNotFound`.
        """

    @abc.abstractmethod
    async def sinks(self) -> list[SinkRecord]:
        """Return how the deliveries to each sink stand, and those of messages to other processes, by name."""

    @abc.abstractmethod
    async def deliveries(
        self, wanted: HeldFilter = EVERY_DELIVERY, *, limit: int = 50, after: After = None
    ) -> HeldDeliveryPage:
        """Return a page of at most `limit` (1 to 1,000) processes whose deliveries are held up, by sink."""

    @abc.abstractmethod
    async def release(self, wanted: HeldFilter) -> int:
        """Try the held-up deliveries that match again now, as if they had not failed; return how many processes.

        At most 10,000 at a time. Raises `BadRequest` for a filter without a criterion.
        """

    async def repair_many(self, wanted: ProcessFilter, args: Any = None, *, limit: int | None = None) -> int:
        """Repair the processes in error that match a filter, without waiting; return how many there were.

        Those that are being mended already are left. `limit` (1 to 10,000) looks at so many at most; None: all.
        Raises `BadRequest` for a filter without a criterion.
        """
        return await self._change(ProcessChange(action="repair", args=args), wanted, limit)

    async def resume_many(self, wanted: ProcessFilter, *, limit: int | None = None) -> int:
        """Resume the processes in error that match a filter, as `repair_many`."""
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

    @abc.abstractmethod
    async def change_some(
        self, change: ProcessChange, wanted: ProcessFilter, *, limit: int = BATCH, after: After = None
    ) -> ProcessesChanged:
        """Do it to at most `limit` (1 to 1,000) processes in one transaction, oldest first, from behind `after`."""


WITHDRAWN: Final = "withdrawn"
"""The error of a call that was taken back."""


def response_of(answer: ProcessAnswer) -> Any:
    """What a step has answered. Raises `Refused`, `ProcessFailed`, and `CallTimeout` where there is no answer."""
    if not answer.is_answered:
        raise CallTimeout(answer.task_id, ident=answer.ident)
    if answer.status == "finished":
        if answer.error is not None:
            raise Refused(answer.error, answer.task_id)
        return answer.response
    raise ProcessFailed(answer.error or answer.status, answer.task_id)


def check_wanted(wanted: ProcessFilter) -> None:
    """Raise `BadRequest` for a filter that would mean every process."""
    if wanted == EVERY_PROCESS:
        raise BadRequest(
            "which", "must have a criterion, such as type or error_group: an empty filter means every process"
        )
    if wanted.status not in {None, "error"}:
        raise BadRequest("status", f"must be error, or be left out, not {wanted.status}")

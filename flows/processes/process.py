"""The first parameter of each step: the process as it was when the step began."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, Protocol, TypeVar

import attrs

from dataloader.jobs.model import check_between
from dataloader.jobs.process_listings import ProcessEvent
from dataloader.jobs.process_requests import NO_START, NoStart, ProcessRequest

S = TypeVar("S")


class NamedType(Protocol):
    """Process type, as `Processes.define` returns it."""

    name: str


@attrs.frozen(eq=False, kw_only=True)
class Process(Generic[S]):
    """Process during one of its steps."""

    type: str
    """Name of the process type."""
    process_id: str
    """ID of the process, unique in its type."""
    state: S
    """State, of the type's `state=`; None before the first step has stored one."""
    status: str
    """`init` before the first step is done, `error` in a repair, otherwise `running`."""
    metadata: Mapping[str, Any]
    """Metadata of the process."""
    last_event_id: int
    """Number of the last event; 0 if there is none."""
    task_id: int
    """ID of the current task."""
    kind: str
    """Kind of the current task: init, call, repair or timeout."""
    context: Any
    """Context of the task: from the step that set the timer, or from the caller."""
    attempt: int
    """Number of this try, from 1."""
    step_key: str
    """Idempotency key for effects outside the database: the same in every try of this step."""
    corrupted_by: int | None
    """ID of the failed task, in a repair."""
    _events: Callable[..., Awaitable[list[ProcessEvent]]] = attrs.field(repr=False)
    _transaction: Callable[[], AbstractAsyncContextManager[Any]] = attrs.field(repr=False)
    _send: Callable[[ProcessRequest], None] = attrs.field(repr=False)

    async def events(
        self, *, after: int = 0, before: int | None = None, limit: int = 100, newest_first: bool = False
    ) -> list[ProcessEvent]:
        """Read a page of the process's events as they were before this step.

        Args:
            after: only events with a greater number; for the next page, the number of the last event read.
            before: only events with a smaller number; for the next page with `newest_first`, the number of the last
                event read.
            limit: maximum number of events, 1 to 1,000.
            newest_first: order from the last event backward.

        Raises:
            BadRequest: a number is out of range.
            StoreError: the database cannot be read.
        """
        check_between("limit", limit, 1, 1_000)
        return await self._events(after=after, before=before, limit=limit, newest_first=newest_first)

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        """Open a transaction on the queue's database that stores your rows and this step's outcome together.

            async with p.transaction() as t:
                await t.execute("INSERT INTO ledger VALUES ($1)", p.process_id)
                t.done = Done(state=...)

        It has the methods of `job.transaction()`. The value of `t.done` at the end of the block is the outcome, and the
        step's return value is ignored. An error in the block rolls back the transaction, and the step fails.

        Raises:
            RuntimeError: the step has already stored its outcome.
            LeaseLost: the process belongs to another run; nothing was stored.
        """
        return self._transaction()

    def start(
        self,
        process_type: NamedType | str,
        process_id: str,
        args: Any = None,
        *,
        metadata: Mapping[str, Any] | None = None,
        context: Any = None,
    ) -> None:
        """Start another process when this step is done. The message is stored with the step and delivered once.

        If a process with this ID exists, nothing happens. A step that does not end in `Done` sends nothing.

        Args:
            process_type: type of the other process, or the type's name.
            process_id: its ID.
            args: argument of its first step.
            metadata: metadata to find it by, a flat JSON object.
            context: context of its first step, as `p.context`.

        Raises:
            BadRequest: an argument is not allowed.
            RuntimeError: the step has already stored its outcome with `p.transaction()`.
        """
        self._send(
            ProcessRequest(
                type=_name_of_type(process_type),
                process_id=process_id,
                kind="init",
                args=args,
                metadata=metadata,
                context=context,
            )
        )

    def call(
        self,
        process_type: NamedType | str,
        process_id: str,
        method: str,
        args: Any = None,
        *,
        start: Any = NO_START,
        metadata: Mapping[str, Any] | None = None,
        context: Any = None,
    ) -> None:
        """Call a method of another process when this step is done, like `start`. The answer is discarded.

        Messages of one process are delivered in the order in which it sent them. While a message cannot be delivered,
        for example because the other process is missing or in error, it is tried again, and the messages after it wait.

        Args:
            process_type: type of the other process, or the type's name.
            process_id: its ID.
            method: name of the method.
            args: argument of the method.
            start: if given, a missing process is started with this value as the argument of its first step.
            metadata: metadata of the process if it is started.
            context: context of the call, as `p.context`.
        """
        may_start = not isinstance(start, NoStart)
        self._send(
            ProcessRequest(
                type=_name_of_type(process_type),
                process_id=process_id,
                kind="call",
                method=method,
                args=args,
                context=context,
                may_start=may_start,
                start=start if may_start else None,
                metadata=metadata,
            )
        )


def _name_of_type(process_type: NamedType | str) -> str:
    return process_type if isinstance(process_type, str) else process_type.name

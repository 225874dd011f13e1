"""What a step is given: the process as it was when the step began."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, Protocol, TypeVar

import attrs

from dataloader.jobs.model import check_between
from dataloader.jobs.process_contract import NO_START, NoStart
from dataloader.jobs.process_listings import ProcessEvent
from dataloader.jobs.process_requests import ProcessRequest

S = TypeVar("S")


class Named(Protocol):
    """A type of processes, as `Processes.define` gives it."""

    name: str


@attrs.frozen(eq=False, kw_only=True)
class Process(Generic[S]):
    """A process in one of its steps."""

    type: str
    """The name of its type."""
    process_id: str
    """Its id, unique in its type."""
    state: S
    """Its state, as the type's `state=` has it; None before the first."""
    status: str
    """`init` before its first step is done, then `running`, or `error` in a repair."""
    metadata: Mapping[str, Any]
    """Its metadata."""
    last_event_id: int
    """The number of its last event; 0: there is none."""
    task_id: int
    """The task that runs now."""
    kind: str
    """What it is: init, call, repair or timeout."""
    context: Any
    """What the timer was given by the step that set it, or the call by its caller."""
    attempt: int
    """The number of this try, from 1."""
    step_key: str
    """The same in every try of this step: an idempotency key for what it does outside."""
    corrupted_by: int | None
    """In a repair: the task that has failed."""
    _events: Callable[..., Awaitable[list[ProcessEvent]]] = attrs.field(repr=False)
    _transaction: Callable[[], AbstractAsyncContextManager[Any]] = attrs.field(repr=False)
    _send: Callable[[ProcessRequest], None] = attrs.field(repr=False)

    async def events(
        self, *, after: int = 0, before: int | None = None, limit: int = 100, newest_first: bool = False
    ) -> list[ProcessEvent]:
        """Read a page of its events as they were before this step.

        Args:
            after: only those with a greater number; for the next page that of the last one.
            before: only those with a smaller number; with `newest_first` for the next page that of the last one.
            limit: how many at most, 1 to 1,000.
            newest_first: from the last one backward.

        Raises:
            BadRequest: a number is out of range.
            StoreError: the database can't be read.
        """
        check_between("limit", limit, 1, 1_000)
        return await self._events(after=after, before=before, limit=limit, newest_first=newest_first)

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        """A transaction on the queue's database, in which your rows and this step's outcome are stored together.

            async with p.transaction() as t:
                await t.execute("INSERT INTO ledger VALUES ($1)", p.process_id)
                t.done = Done(state=...)

        It has the methods of `job.transaction()`. What stands in `t.done` when the block ends is the outcome; what the
        step returns then is left aside. An error in the block undoes all of it, and the step fails.

        Raises:
            RuntimeError: the step has stored its outcome already.
            LeaseLost: the process belongs to another run; nothing was stored.
        """
        return self._transaction()

    def start(
        self,
        process_type: Named | str,
        process_id: str,
        args: Any = None,
        *,
        metadata: Mapping[str, Any] | None = None,
        context: Any = None,
    ) -> None:
        """Start another process when this step is done: the message is stored with it, and is delivered once.

        Where there is a process of this id nothing is done. A step that does not end in `Done` sends nothing.

        Args:
            process_type: its type, or the type's name.
            process_id: its id.
            args: what its first step is given.
            metadata: by which it is found, a flat JSON object.
            context: what its first step is given beside, as `p.context`.

        Raises:
            BadRequest: one of them is not allowed.
            RuntimeError: the step has stored its outcome already, by `p.transaction()`.
        """
        self._send(
            ProcessRequest(
                type=_name(process_type),
                process_id=process_id,
                kind="init",
                args=args,
                metadata=metadata,
                context=context,
            )
        )

    def call(
        self,
        process_type: Named | str,
        process_id: str,
        method: str,
        args: Any = None,
        *,
        start: Any = NO_START,
        metadata: Mapping[str, Any] | None = None,
        context: Any = None,
    ) -> None:
        """Call a method of another process when this step is done, as `start`. Its answer comes to nobody.

        Messages of one process are delivered in the order in which it sent them. While one can't be delivered, such as
        a call of a process that is missing or in error, it is tried again, and those after it wait.

        Args:
            process_type: the other's type, or the type's name.
            process_id: its id.
            method: the method's name.
            args: what it is given.
            start: starts the process if it is missing, with this as the args of its first step.
            metadata: of the process that it starts.
            context: what it is given beside, as `p.context`.
        """
        may_start = not isinstance(start, NoStart)
        self._send(
            ProcessRequest(
                type=_name(process_type),
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


def _name(process_type: Named | str) -> str:
    return process_type if isinstance(process_type, str) else process_type.name

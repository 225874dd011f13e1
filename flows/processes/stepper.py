"""Sends the beginnings and ends of steps to the database, in batches.

Steps that arrive while a statement is in progress share the next one. A single step is sent immediately. Dedicated
connections avoid waits for the pool. The steps of a batch that cannot be stored are sent again one by one. A locked row
never delays the other steps of a batch: after repeated lock failures, a step waits for its row on a separate
connection.

Rejected: the gatherer of single requests (store/connection/gatherer.py). Its callers wait for their answers even if
they are canceled. A run whose lease has ended must leave immediately, and its unsent step must not be sent any more.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, Generic, TypeVar

import attrs
import outcome
import trio

from dataloader.jobs.errors import StoreUnavailable
from dataloader.jobs.logger import get_logger
from dataloader.store.connection.bridge import Database, Session
from dataloader.store.processes.steps import (
    BegunStep,
    Committed,
    StepOutcome,
    Wakeup,
    aio_begin,
    aio_begin_in_turn,
    aio_commit,
    aio_commit_in_turn,
)

log = get_logger(__name__)

Q = TypeVar("Q")
A = TypeVar("A")

MOST: Final = 64
"""Maximum number of steps in one statement."""
LOG_EVERY_S: Final = 60.0


@attrs.define(eq=False)
class _WaitingQuestion(Generic[Q, A]):
    asked: Q
    answered: trio.Event = attrs.field(factory=trio.Event, init=False)
    answer: outcome.Outcome[A] | None = attrs.field(default=None, init=False)

    async def wait(self) -> A:
        await self.answered.wait()
        assert self.answer is not None  # noqa: S101 - it is set before the event
        return self.answer.unwrap()

    def set(self, answer: outcome.Outcome[A]) -> None:
        self.answer = answer
        self.answered.set()


@attrs.define(eq=False)
class _Line(Generic[Q, A]):
    """Steps that wait for one kind of statement."""

    send: Callable[[Any, Sequence[Q]], Awaitable[list[A]]]
    session: Session
    waiting: list[_WaitingQuestion[Q, A]] = attrs.field(factory=list, init=False)
    something: trio.Event = attrs.field(factory=trio.Event, init=False)

    async def ask(self, asked: Q) -> A:
        one: _WaitingQuestion[Q, A] = _WaitingQuestion(asked)
        self.waiting.append(one)
        self.something.set()
        try:
            return await one.wait()
        except trio.Cancelled:
            if one in self.waiting:
                self.waiting.remove(one)
            raise

    async def run(self) -> None:
        while True:
            await self.something.wait()
            # Steps that end in one iteration of the event loop share a statement.
            await trio.lowlevel.checkpoint()
            batch, self.waiting = self.waiting[:MOST], self.waiting[MOST:]
            if not self.waiting:
                self.something = trio.Event()
            if batch:
                await self._send(batch)

    async def _send(self, batch: Sequence[_WaitingQuestion[Q, A]]) -> None:
        try:
            answers = await self.session.write(self.send, [one.asked for one in batch])
        except StoreUnavailable as error:  # another try would find the same database
            for one in batch:
                one.set(outcome.Error(StoreUnavailable(str(error))))
            return
        except Exception as error:  # noqa: BLE001 - each step gets the error, or is sent separately
            if len(batch) == 1:
                batch[0].set(outcome.Error(error))
                return
            for one in batch:
                await self._send([one])
            return
        for one, answer in zip(batch, answers, strict=True):
            one.set(outcome.Value(answer))


@attrs.define(eq=False)
class Stepper:
    """Batches the step writes of this OS process."""

    _nursery: trio.Nursery
    _sessions: list[Session] = attrs.field(factory=list, init=False)
    _logged_at: float = attrs.field(default=-math.inf, init=False)
    _lines: dict[bool, tuple[_Line[Wakeup, BegunStep], _Line[StepOutcome, Committed]]] = attrs.field(
        factory=dict, init=False
    )

    async def begin(self, database: Database, wakeup: Wakeup, *, in_turn: bool = False) -> BegunStep:
        """Begin the step of a wake-up job. `in_turn`: wait for the lock of the process's row. Raises `StoreError`."""
        return await self._open(database, in_turn=in_turn)[0].ask(wakeup)

    async def commit(self, database: Database, step: StepOutcome, *, in_turn: bool = False) -> Committed:
        """Write the outcome of a step. With `in_turn`, wait for the lock of the process's row.

        Raises `StoreError`; it is then unknown whether the outcome was written.
        """
        return await self._open(database, in_turn=in_turn)[1].ask(step)

    def log_wait(self, error: str) -> None:
        """Log that steps wait for the database, at most once a minute for all steps together."""
        now = trio.current_time()
        if now - self._logged_at >= LOG_EVERY_S:
            self._logged_at = now
            log.warning("a step waits for the database", error=error)

    def _open(
        self, database: Database, *, in_turn: bool
    ) -> tuple[_Line[Wakeup, BegunStep], _Line[StepOutcome, Committed]]:
        if in_turn not in self._lines:
            if in_turn:
                session = Session(database, "process steps in turn")
                self._sessions.append(session)
                lines = _Line(aio_begin_in_turn, session), _Line(aio_commit_in_turn, session)
            else:
                sessions = Session(database, "process begins"), Session(database, "process commits")
                self._sessions += sessions
                lines = _Line(aio_begin, sessions[0]), _Line(aio_commit, sessions[1])
            self._lines[in_turn] = lines
            for line in lines:
                self._nursery.start_soon(line.run)
        return self._lines[in_turn]

    async def close(self) -> None:
        """Close the connections."""
        for session in self._sessions:
            await session.close()


@asynccontextmanager
async def open_stepper() -> AsyncIterator[Stepper]:
    """Open a stepper, with two connections from the first step on, and a third one for contended rows."""
    async with trio.open_nursery() as nursery:
        stepper = Stepper(nursery)
        try:
            yield stepper
        finally:
            nursery.cancel_scope.cancel()
            with trio.move_on_after(2, shield=True):
                await stepper.close()

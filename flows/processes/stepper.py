"""Sends the beginnings and ends of steps to the database, in batches.

Steps that arrive while a statement is in progress share the next one. A single step is sent immediately. Dedicated
connections avoid waits for the pool. The steps of a batch that cannot be stored are sent again one by one. A locked row
never delays the other steps of a batch: after repeated lock failures, a step waits for its row on a separate
connection.

A run whose lease has ended leaves immediately. Its step is no longer sent, unless the statement is in progress.
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
from dataloader.store.connection.gatherer import Gatherer
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
CLOSED: Final = "the connections for steps were closed"


@attrs.define(eq=False)
class _UnsentStep(Generic[Q]):
    asked: Q
    is_withdrawn: bool = False


class _Line(Generic[Q, A]):
    """Steps that wait for one kind of statement."""

    def __init__(
        self, nursery: trio.Nursery, session: Session, statement: Callable[[Any, Sequence[Q]], Awaitable[list[A]]]
    ) -> None:
        self._session = session
        self._statement = statement
        self._together = Gatherer(self._send, math.inf, CLOSED, nursery=nursery, max_group=MOST)
        self._alone = Gatherer(self._send, math.inf, CLOSED, nursery=nursery, max_group=1)

    async def ask(self, asked: Q) -> A:
        step = _UnsentStep(asked)
        try:
            answer = await self._together.ask(step)
            if answer is None:
                answer = await self._alone.ask(step)
        except trio.Cancelled:
            step.is_withdrawn = True
            raise
        assert answer is not None  # noqa: S101 - its caller waits, so the step was sent
        return answer.unwrap()

    async def _send(self, steps: Sequence[_UnsentStep[Q]]) -> dict[int, outcome.Outcome[A]]:
        """Return the answers by the positions of the steps. There are none if one of several steps cannot be stored."""
        sent = {place: step.asked for place, step in enumerate(steps) if not step.is_withdrawn}
        if not sent:
            return {}
        try:
            answers = await self._session.write(self._statement, [*sent.values()])
        except StoreUnavailable:
            raise
        except Exception as error:  # noqa: BLE001 - it is the step's own error
            return {} if len(sent) > 1 else {place: outcome.Error(error) for place in sent}
        return {place: outcome.Value(answer) for place, answer in zip(sent, answers, strict=True)}


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
                begins = _Line(self._nursery, session, aio_begin_in_turn)
                commits = _Line(self._nursery, session, aio_commit_in_turn)
            else:
                sessions = Session(database, "process begins"), Session(database, "process commits")
                self._sessions += sessions
                begins = _Line(self._nursery, sessions[0], aio_begin)
                commits = _Line(self._nursery, sessions[1], aio_commit)
            self._lines[in_turn] = begins, commits
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

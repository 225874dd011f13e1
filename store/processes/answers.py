"""Waiting for the answers of tasks: by notification, or in one process from memory (P2).

Who runs a step in this process tells its answer here; for what runs elsewhere the listener calls `told`. Should a
notification get lost with its connection, a look every two seconds finds the answer. All whose look is due, or soon
will be, share one: the first of them reads for all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Final, Protocol
from uuid import UUID

import attrs
import trio

from dataloader.jobs.process_listings import ProcessAnswer
from dataloader.store.connection.bridge import Database
from dataloader.store.processes.reads import aio_answers, check_ident, no_task
from dataloader.store.processes.requests import aio_take_back

FIRST_LOOK_S: Final = 0.05
"""After a request the first look: what is told before somebody waits for it is not heard."""
REREAD_S: Final = 2.0
"""The longest time without a look at the row, whatever the notifications say."""
EXPIRED_S: Final = 0.5
"""Between two looks at a task that has expired and may have begun before."""
MOST: Final = 500
"""Tasks of one look."""

_WATCH: Final = """
UPDATE dl_process_tasks SET watched = true
WHERE task_id IN (
  SELECT task_id FROM dl_process_tasks
  WHERE task_id = ANY ($1::bigint[]) AND (NOT watched AND status = 'waiting') IS TRUE FOR NO KEY UPDATE SKIP LOCKED)
"""


@attrs.define(eq=False)
class _Watch:
    """One task that somebody waits for. `look_at`: when it is read, by Trio's clock, unless it is told of before."""

    task_id: int
    look_at: float
    ident: UUID | None = None
    waiters: int = 0
    answer: ProcessAnswer | None = None
    is_gone: bool = False
    woken: trio.Event = attrs.field(factory=trio.Event)

    def wake(self) -> None:
        self.woken.set()
        self.woken = trio.Event()


class Waiter(Protocol):
    """What waits for answers, and is told of them."""

    async def wait(
        self, task_id: int, *, timeout_s: float, is_new: bool = False, ident: UUID | None = None
    ) -> ProcessAnswer:
        """See `Answers.wait`."""

    def told(self, task_id: int, answer: ProcessAnswer | None = None) -> None:
        """See `Answers.told`."""


class Answers:
    """All who wait for tasks in this process. Owner of the watches; used from one Trio thread."""

    def __init__(self, database: Database, *, first_look_s: float = FIRST_LOOK_S, reread_s: float = REREAD_S) -> None:
        """A new task is first read after `first_look_s` seconds, and each watched task at least every `reread_s`.

        `begun` is set by the first wait, so that a listener for waits alone need not connect earlier.
        """
        self.begun = trio.Event()
        self._database = database
        self.first_look_s = first_look_s
        self.reread_s = reread_s
        self._watches: dict[int, _Watch] = {}
        self._turn = trio.Lock()

    async def wait(
        self, task_id: int, *, timeout_s: float, is_new: bool = False, ident: UUID | None = None
    ) -> ProcessAnswer:
        """The answer as soon as there is one, or how the task stands after `timeout_s`.

        Args:
            task_id: which task.
            timeout_s: after so many seconds the wait ends.
            is_new: it was added just now, so that nothing has to be read at once.
            ident: that of the task, if it is known.

        Raises:
            ProcessNotFound: there is no such task.
            HistoryChanged: the number is another task's.
            StoreUnavailable: the database can't be read now.
        """
        until = trio.current_time() + timeout_s
        with self._watching(task_id, self.first_look_s if is_new else 0.0, ident) as watch:
            while not (watch.answer is not None and watch.answer.is_answered):
                if watch.is_gone:
                    raise no_task(task_id)
                now = trio.current_time()
                if watch.look_at <= now or (until <= now and watch.answer is None):
                    await self._look(watch)
                elif until <= now:
                    await self._look(watch)
                    break
                else:
                    woken = watch.woken
                    with trio.move_on_at(min(watch.look_at, until)):
                        await woken.wait()
            assert watch.answer is not None  # noqa: S101 - it was told, or read
            check_ident(task_id, watch.answer.ident, ident)
            return watch.answer

    def told(self, task_id: int, answer: ProcessAnswer | None = None) -> None:
        """A task has its answer: `answer`, if it is known here; else it is read."""
        watch = self._watches.get(task_id)
        if watch is not None:
            watch.answer = answer or watch.answer
            watch.look_at = -math.inf
            watch.wake()

    def is_awaited(self, task_id: int) -> bool:
        """Whether somebody in this process waits for the task."""
        return task_id in self._watches

    def all_told(self) -> None:
        """Notifications may have been missed: the listener's connection is new."""
        for watch in self._watches.values():
            watch.look_at = -math.inf
            watch.wake()

    @contextmanager
    def _watching(self, task_id: int, look_in_s: float, ident: UUID | None) -> Iterator[_Watch]:
        look_at = trio.current_time() + look_in_s
        watch = self._watches.get(task_id)
        if watch is None or (ident is not None and watch.ident not in {None, ident}):
            # After a restore another task has the number: those who wait for the former one find that out themselves.
            watch = self._watches[task_id] = _Watch(task_id, look_at, ident)
        watch.look_at = min(watch.look_at, look_at)
        watch.waiters += 1
        self.begun.set()
        try:
            yield watch
        finally:
            watch.waiters -= 1
            if not watch.waiters and self._watches.get(task_id) is watch:
                del self._watches[task_id]

    async def _look(self, watch: _Watch) -> None:
        """Read the task, and all others whose look is due."""
        seen = watch.woken
        async with self._turn:
            if watch.woken is not seen and watch.answer is not None:
                return  # somebody has read it, or it was told of
            now = trio.current_time()
            # Those whose look comes soon share it: who began to wait one after the other look together from then on.
            soon = now + self.reread_s / 10
            due = [one for one in self._watches.values() if one.look_at <= soon and one is not watch][: MOST - 1]
            due.append(watch)
            for one in due:
                one.look_at = now + self.reread_s
            try:
                # Not shielded: a lost mark is set again, and a caller who has left must not hold a connection.
                found = await self._database.run(_aio_look, [one.task_id for one in due])
            except BaseException:
                for one in due:
                    one.look_at = now
                raise
        for one in due:
            one.is_gone = one.task_id not in found
            if not one.is_gone and (one.answer is None or not one.answer.is_answered):
                one.answer, expires_at = found[one.task_id]
                if expires_at is not None:
                    left_s = (expires_at - datetime.now(UTC)).total_seconds()
                    one.look_at = min(one.look_at, trio.current_time() + max(left_s + 0.01, EXPIRED_S))
            one.wake()


async def _aio_look(connection: Any, task_ids: list[int]) -> dict[int, tuple[ProcessAnswer, datetime | None]]:
    # Several statements, several snapshots: the reading must see what was committed before the marks were.
    await connection.execute(_WATCH, task_ids)
    found = await aio_answers(connection, task_ids)
    now = datetime.now(UTC)
    late = {
        one: answer.ident
        for one, (answer, at) in found.items()
        if not answer.is_answered and at is not None and at <= now
    }
    # One that has begun is none of those that are taken back.
    if late and (taken := await aio_take_back(connection, late, expired=True)):
        found |= await aio_answers(connection, taken)
    return found

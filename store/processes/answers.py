"""Waiting for the answers of tasks, by notification or, in one process, from memory.

A run of a step in this process passes its answer here. For steps in other processes the listener calls `told`. If a
notification is lost with its connection, a check every two seconds finds the answer. All waiting callers whose check is
due, or soon will be, share one read.
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
"""Seconds from a request to the first check: notifications sent before the wait are lost."""
REREAD_S: Final = 2.0
"""Maximum seconds between two checks of the row, independent of notifications."""
EXPIRED_S: Final = 0.5
"""Seconds between two checks of a task that has expired but may have begun before."""
MOST: Final = 500
"""Maximum tasks of one check."""

_WATCH: Final = """
UPDATE dl_process_tasks SET watched = true
WHERE task_id IN (
  SELECT task_id FROM dl_process_tasks
  WHERE task_id = ANY ($1::bigint[]) AND (NOT watched AND status = 'waiting') IS TRUE FOR NO KEY UPDATE SKIP LOCKED)
"""


@attrs.define(eq=False)
class _AwaitedTask:
    """One awaited task. `look_at`: time of the next check, by Trio's clock, unless a notification comes earlier."""

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
    """Waits for answers, and receives them."""

    async def wait(
        self, task_id: int, *, timeout_s: float, is_new: bool = False, ident: UUID | None = None
    ) -> ProcessAnswer:
        """See `Answers.wait`."""

    def told(self, task_id: int, answer: ProcessAnswer | None = None) -> None:
        """See `Answers.told`."""


class Answers:
    """All waits for tasks in this process. Owns the watches; used from one Trio thread."""

    def __init__(self, database: Database, *, first_look_s: float = FIRST_LOOK_S, reread_s: float = REREAD_S) -> None:
        """Check a new task first after `first_look_s` seconds, and each watched task at least every `reread_s` seconds.

        The first wait sets `begun`, so that a listener only for waits need not connect earlier.
        """
        self.begun = trio.Event()
        self._database = database
        self.first_look_s = first_look_s
        self.reread_s = reread_s
        self._watches: dict[int, _AwaitedTask] = {}
        self._turn = trio.Lock()

    async def wait(
        self, task_id: int, *, timeout_s: float, is_new: bool = False, ident: UUID | None = None
    ) -> ProcessAnswer:
        """Return the answer as soon as it exists, or the state of the task after `timeout_s`.

        Args:
            task_id: ID of the task.
            timeout_s: maximum seconds of the wait.
            is_new: true if the task was just added, so that no immediate check is needed.
            ident: ident of the task, if known.

        Raises:
            ProcessNotFound: there is no such task.
            HistoryChanged: another task has this ID.
            StoreUnavailable: the database cannot be read now.
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
            assert watch.answer is not None  # noqa: S101 - it was received or read
            check_ident(task_id, watch.answer.ident, ident)
            return watch.answer

    def told(self, task_id: int, answer: ProcessAnswer | None = None) -> None:
        """Note that a task has its answer: `answer`, if known in this process; otherwise it is read."""
        watch = self._watches.get(task_id)
        if watch is not None:
            watch.answer = answer or watch.answer
            watch.look_at = -math.inf
            watch.wake()

    def is_awaited(self, task_id: int) -> bool:
        """Return whether a caller in this process waits for the task."""
        return task_id in self._watches

    def all_told(self) -> None:
        """Check all watched tasks: the listener has a new connection and may have missed notifications."""
        for watch in self._watches.values():
            watch.look_at = -math.inf
            watch.wake()

    @contextmanager
    def _watching(self, task_id: int, look_in_s: float, ident: UUID | None) -> Iterator[_AwaitedTask]:
        look_at = trio.current_time() + look_in_s
        watch = self._watches.get(task_id)
        if watch is None or (ident is not None and watch.ident not in {None, ident}):
            # After a restore, another task has this ID. Waits for the former task find that out themselves.
            watch = self._watches[task_id] = _AwaitedTask(task_id, look_at, ident)
        watch.look_at = min(watch.look_at, look_at)
        watch.waiters += 1
        self.begun.set()
        try:
            yield watch
        finally:
            watch.waiters -= 1
            if not watch.waiters and self._watches.get(task_id) is watch:
                del self._watches[task_id]

    async def _look(self, watch: _AwaitedTask) -> None:
        """Read the task, and all others whose check is due."""
        seen = watch.woken
        async with self._turn:
            if watch.woken is not seen and watch.answer is not None:
                return  # another caller has read it, or its answer was received
            now = trio.current_time()
            # Tasks whose check is due soon share it: waits that began at different times are checked together from then
            # on.
            soon = now + self.reread_s / 10
            due = [one for one in self._watches.values() if one.look_at <= soon and one is not watch][: MOST - 1]
            due.append(watch)
            for one in due:
                one.look_at = now + self.reread_s
            try:
                # Not shielded: a lost mark is set again, and an abandoned call must not keep a connection.
                found = await self._database.run(_aio_look_at_tasks, [one.task_id for one in due])
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


async def _aio_look_at_tasks(connection: Any, task_ids: list[int]) -> dict[int, tuple[ProcessAnswer, datetime | None]]:
    # Several statements with separate snapshots: the read must see the commits before the marks.
    await connection.execute(_WATCH, task_ids)
    found = await aio_answers(connection, task_ids)
    now = datetime.now(UTC)
    late = {
        one: answer.ident
        for one, (answer, at) in found.items()
        if not answer.is_answered and at is not None and at <= now
    }
    # Requests that have begun cannot be withdrawn.
    if late and (taken := await aio_take_back(connection, late, expired=True)):
        found |= await aio_answers(connection, taken)
    return found

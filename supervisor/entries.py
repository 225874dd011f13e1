"""Entries of WORKERS_JSON that this process serves, each with its dispatcher; they may change while it runs.

An entry serves a queue: all tasks of the process, or only the tasks that it names. A queue may have several entries
with named tasks. Code that needs the queues or tasks of the process asks here: free slots, notifications, the stager,
and the worker's row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from dataloader.actors.dispatcher import Dispatcher
from dataloader.actors.slots import Slots
from dataloader.actors.wake import Wake
from dataloader.jobs.errors import ConfigError
from dataloader.jobs.task import Task
from dataloader.store.queue.lock_session import LockSession
from dataloader.supervisor.setting_lists import Worker
from dataloader.web.services import QueueLoad


def check_tasks(entries: Sequence[Worker], tasks: Iterable[str]) -> None:
    """Raise `ConfigError` if an entry names a task that the process does not have."""
    known = sorted(tasks)
    for index, entry in enumerate(entries):
        for name in entry.tasks or ():
            if name not in known:
                has = f"its tasks: {', '.join(known)}" if known else "it has no tasks"
                raise ConfigError(
                    f"WORKERS_JSON: [{index}].tasks must be names of tasks of the program, not {name!r}; {has}"
                )


def check_capacity(locks: LockSession, slots: int) -> None:
    """Raise `ConfigError` if there are more slots than the server's lock table can hold."""
    if slots > locks.capacity // 2:
        message = (
            f"WORKERS_JSON: {slots} slots are too many, because each may hold a lock; half of the server's lock table "
            f"has room for {locks.capacity // 2} (max_locks_per_transaction × max_connections ÷ 2). "
            "Use fewer slots, or raise these two settings of PostgreSQL"
        )
        raise ConfigError(message)


@attrs.define(eq=False, kw_only=True)
class Entries:
    """Entries with their dispatchers. `make` creates a dispatcher for an entry and its tasks.

    By queue: `wakes` are set when a job became ready. `direct` has the dispatchers of entries that take all tasks:
    their jobs may start without a claim. `slots`, and `only_tasks` for queues whose entries name their tasks, are shown
    in the worker's row.
    """

    tasks: Mapping[str, Task[Any]]
    make: Callable[[Worker, Mapping[str, Task[Any]]], Dispatcher]
    dispatchers: list[Dispatcher] = attrs.field(factory=list)
    wakes: dict[str, Sequence[Wake]] = attrs.field(factory=dict)
    direct: dict[str, Dispatcher] = attrs.field(factory=dict)
    slots: dict[str, int] = attrs.field(factory=dict)
    only_tasks: dict[str, list[str]] = attrs.field(factory=dict)

    def add(self, entry: Worker) -> Dispatcher:
        """Add an entry and return its dispatcher, which the caller must run."""
        tasks = self.tasks if entry.tasks is None else {name: self.tasks[name] for name in entry.tasks}
        dispatcher = self.make(entry, tasks)
        self.dispatchers.append(dispatcher)
        self._changed(entry.queue)
        return dispatcher

    def remove(self, dispatchers: Iterable[Dispatcher]) -> None:
        """Remove dispatchers whose runs have all ended."""
        for one in dispatchers:
            self.dispatchers.remove(one)
            self._changed(one.queue)

    def of(self, queue: str) -> list[Dispatcher]:
        """Return the dispatchers of a queue."""
        return [one for one in self.dispatchers if one.queue == queue]

    def hide(self, queue: str) -> None:
        """Stop showing the queue as served: no more jobs are claimed from it."""
        self.slots.pop(queue, None)
        self.only_tasks.pop(queue, None)

    def told(self, lane: str) -> None:
        """Note that a limit queue has changed or, with an empty name, that limits have changed."""
        for dispatcher in self.dispatchers:
            dispatcher.lane_told(lane)

    def loads(self) -> dict[str, QueueLoad]:
        """Return the number of slots of each queue, and how many of them are in use."""
        slots: dict[str, list[Slots]] = {}
        for one in self.dispatchers:
            slots.setdefault(one.queue, []).append(one.slots)
        return {queue: QueueLoad(sum(s.count for s in own), sum(s.used for s in own)) for queue, own in slots.items()}

    def _changed(self, queue: str) -> None:
        self.wakes.pop(queue, None)
        self.direct.pop(queue, None)
        self.hide(queue)
        if dispatchers := self.of(queue):
            self.wakes[queue] = [wake for one in dispatchers for wake in one.wakes]
            self.slots[queue] = sum(one.slots.count for one in dispatchers)
            if dispatchers[0].by_lanes:
                self.only_tasks[queue] = [name for one in dispatchers for name in one.tasks]
            else:
                [self.direct[queue]] = dispatchers

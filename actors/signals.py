"""Test signals, for tests that wait for an action of a supervisor (`dataloader.testing`).

Each actor emits its signals where the action happens. Without `Signals` it only checks one attribute, once for a claim
or a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, Generic, TypeVar
from uuid import UUID

import attrs
import trio

from dataloader.store.queue.notifications import Notification

T = TypeVar("T")

PATIENCE_S: Final = 60.0
"""Default timeout of a wait in seconds: long, for a busy machine."""


@attrs.frozen(kw_only=True)
class Claimed:
    """An answer to a claim.

    Attributes:
        queue: the queue of the claim.
        tasks: the tasks whose ready jobs were claimed; None if only limit queues were looked at.
        lanes: the limit queues that were looked at, by the names of their tasks.
        look: the number of jobs that the claim could read, if more than its free slots; otherwise 0.
        after: the job behind which the claim began; None if it began at the front of the queue.
        jobs: the ids of the claimed jobs.
    """

    queue: str
    tasks: tuple[str, ...] | None
    lanes: tuple[str, ...]
    look: int
    after: UUID | None
    jobs: tuple[UUID, ...]


@attrs.frozen(kw_only=True)
class KnownTasks:
    """The tasks whose jobs a queue of this process claims, as it has just read them from the database."""

    queue: str
    tasks: tuple[str, ...]


@attrs.frozen(kw_only=True)
class Recorded:
    """Recorded end of a run. `token` tells apart the runs of one job."""

    job_id: UUID
    token: int


class Signal(Generic[T]):
    """One kind of event in a supervisor. `values` has one value for each event, the oldest first."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.values: list[T] = []
        self._emitted = trio.Event()

    @property
    def count(self) -> int:
        """The number of events."""
        return len(self.values)

    @property
    def last(self) -> T | None:
        """The value of the newest event; None if there was no event."""
        return self.values[-1] if self.values else None

    def emit(self, value: T) -> None:
        """Report an event. Actors call this, in the Trio thread."""
        self.values.append(value)
        self._emitted.set()
        self._emitted = trio.Event()

    async def wait(self, count: int = 1, *, timeout_s: float = PATIENCE_S) -> T:
        """Return the value of event number `count`, counted from 1; immediately if it has occurred.

        Use `signal.wait(signal.count + 1)` for the next event. Raises `AssertionError` after `timeout_s` seconds.
        """
        await self._wait(lambda: self.count >= count, timeout_s, f"{count} expected")
        return self.values[count - 1]

    async def wait_until(self, holds: Callable[[T], object], *, timeout_s: float = PATIENCE_S) -> T:
        """Return the value of the newest event as soon as `holds` is true of it; immediately if it is.

        Raises `AssertionError` after `timeout_s` seconds.
        """
        await self._wait(lambda: self.values and holds(self.values[-1]), timeout_s, "no newest value was accepted")
        return self.values[-1]

    async def _wait(self, is_over: Callable[[], object], timeout_s: float, expected: str) -> None:
        with trio.move_on_after(timeout_s):
            while not is_over():
                await self._emitted.wait()
        # No checkpoint from here on: what the signal says is still true when the caller continues.
        if not is_over():
            last = f", the last one with {self.last!r}" if self.values else ""
            raise AssertionError(
                f"signal {self.name!r}: {self.count} events in {timeout_s:g} s of waiting{last}; {expected}"
            )


@attrs.frozen(eq=False)
class Signals:
    """The signals of one supervisor: `open_supervisor(settings, tasks, signals=Signals())`.

    They keep all values, so they are for tests only.

    Attributes:
        listening: the listener is connected, and has woken all actors once; with Trio's time.
        notified: a notification was received and passed on; with the notification.
        heartbeat: the leases of all runs were renewed, or there was no run; with Trio's time when that began.
        resting: claims of a queue wait until a job becomes ready, or no longer do; with the queues that wait.
        claimed: the database has answered a claim. A job that starts when it is enqueued has none.
        recorded: the end of a run is recorded.
        cancel_requested: a cancel request was read, and the run is stopped; with the job's id.
        keys_safe: the lock session has answered and is repaired; with the time, by the clock of leases, until which
            the keys are safe.
        known_tasks: a queue has read which tasks its claims take.
        retry_delays: the retry delays that operators have set were read; with the seconds by task.
        period_ends: the work periods that end runs were read; with the tasks that have some.
        history_read: the watch has checked whether the database was restored; with the id of its history.
    """

    listening: Signal[float] = attrs.field(factory=partial(Signal, "listening"), init=False)
    notified: Signal[Notification] = attrs.field(factory=partial(Signal, "notified"), init=False)
    heartbeat: Signal[float] = attrs.field(factory=partial(Signal, "heartbeat"), init=False)
    resting: Signal[tuple[str, ...]] = attrs.field(factory=partial(Signal, "resting"), init=False)
    claimed: Signal[Claimed] = attrs.field(factory=partial(Signal, "claimed"), init=False)
    recorded: Signal[Recorded] = attrs.field(factory=partial(Signal, "recorded"), init=False)
    cancel_requested: Signal[UUID] = attrs.field(factory=partial(Signal, "cancel_requested"), init=False)
    keys_safe: Signal[float] = attrs.field(factory=partial(Signal, "keys_safe"), init=False)
    known_tasks: Signal[KnownTasks] = attrs.field(factory=partial(Signal, "known_tasks"), init=False)
    retry_delays: Signal[Mapping[str, float]] = attrs.field(factory=partial(Signal, "retry_delays"), init=False)
    period_ends: Signal[tuple[str, ...]] = attrs.field(factory=partial(Signal, "period_ends"), init=False)
    history_read: Signal[UUID] = attrs.field(factory=partial(Signal, "history_read"), init=False)

    def rests(self, queue: str) -> None:
        """Report that a queue has nothing to claim."""
        self.resting.emit((*(self.resting.last or ()), queue))

    def rests_no_more(self, queue: str) -> None:
        """Report that a queue no longer waits for a ready job."""
        queues = list(self.resting.last or ())
        queues.remove(queue)
        self.resting.emit(tuple(queues))

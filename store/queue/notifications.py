"""Channels of NOTIFY, and a connection that listens to them and delivers typed messages.

Every role that may connect to the database may send any number of notifications, and the thread that reads this
connection also reads the heartbeats. So a connection that receives too many notifications is ended immediately, before
they take the time that leases need. Reading more slowly was rejected: the server keeps unread notifications, for all
databases, until its space is full.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, Final
from uuid import UUID

import attrs
import trio

from dataloader.jobs.errors import NotificationFlood, StoreUnavailable
from dataloader.store.connection.bridge import Crossing, Database
from dataloader.store.connection.connect import connect


@attrs.frozen
class QueueReady:
    """Job of this queue that became ready."""

    queue: str


@attrs.frozen
class JobDue:
    """Added job that falls due at this second (Unix time by the database's clock)."""

    due_at: float


@attrs.frozen
class CancelRequested:
    """Cancel request for the run with this token."""

    token: int


@attrs.frozen
class JobChanged:
    """New status or progress of a watched job."""

    job_id: UUID


@attrs.frozen
class TaskAnswered:
    """Answer of a durable process's task that a caller waits for."""

    task_id: int


@attrs.frozen
class JobToJudge:
    """Need to check a job that runs after others: a predecessor has `ended`, or the job was added."""

    ended: bool


@attrs.frozen
class LaneTold:
    """Job of this lane that waits or has ended; without a name, a change of limits."""

    lane: str


@attrs.frozen
class SchedulesChanged:
    """Schedules were stored, resumed or removed: one may be due earlier than known."""


@attrs.frozen
class SomethingFailed:
    """Failure of a job or a schedule that operators must be notified of."""


@attrs.frozen
class BulkBegun:
    """Start of a bulk operation."""


Notification = (
    QueueReady
    | JobDue
    | JobToJudge
    | CancelRequested
    | JobChanged
    | TaskAnswered
    | LaneTold
    | SchedulesChanged
    | SomethingFailed
    | BulkBegun
)

FLOOD: Final = 5_000
"""Maximum number of notifications in `FLOOD_S` seconds; reading them takes about 10 % of that time."""
FLOOD_S: Final = 0.5

_CHANNELS: Final[dict[str, Callable[[str], Notification]]] = {
    "dl_jobs": QueueReady,
    "dl_due": lambda payload: JobDue(float(payload)),
    "dl_after": lambda payload: JobToJudge(ended=payload == "ended"),
    "dl_stop": lambda payload: CancelRequested(int(payload)),
    "dl_lane": LaneTold,
    "dl_changed": lambda payload: JobChanged(UUID(payload)),
    "dl_answered": lambda payload: TaskAnswered(int(payload)),
    "dl_schedule": lambda _payload: SchedulesChanged(),
    "dl_notice": lambda _payload: SomethingFailed(),
    "dl_bulk": lambda _payload: BulkBegun(),
}
CHANNELS: Final = frozenset(_CHANNELS)
OF_RUNNING: Final = frozenset({"dl_jobs", "dl_stop", "dl_lane"})
"""Channels that a process needs to run jobs."""
OF_WAITING: Final = frozenset({"dl_changed"})
"""Channels that a process needs to wait for jobs."""
OF_ANSWERS: Final = frozenset({"dl_answered"})
"""Channels that a process needs to wait for durable processes."""


class Listening:
    """Open listener. `lost` is set when its connection ends; `ping` checks that it is alive."""

    def __init__(self, crossing: Crossing, connection: Any, deliver: Callable[[Notification], None]) -> None:
        """Do not call this directly; use `open_listener`."""
        self.lost = trio.Event()
        self.flooded = False
        self._crossing = crossing
        self._connection = connection
        self._deliver = deliver
        self._channels: set[str] = set()
        self._turn = trio.Lock()
        self._heard = 0
        self._heard_since = trio.current_time()

    def notified(self, _connection: object, _pid: int, channel: str, payload: object) -> None:
        """Deliver notifications of our channels, unless there are too many."""
        if self.flooded:
            return  # read before the connection ended
        now = trio.current_time()
        if now - self._heard_since >= FLOOD_S:
            self._heard, self._heard_since = 0, now
        self._heard += 1
        if self._heard > FLOOD:
            self.flooded = True
            self._connection.terminate()  # a polite close would wait behind all unread notifications
            return
        # Any role may send NOTIFY, so invalid payloads are ignored.
        with contextlib.suppress(ValueError):
            self._deliver(_CHANNELS[channel](str(payload)))

    async def listen(self, channels: Iterable[str]) -> bool:
        """Listen to these channels, too; return whether some of them are new. Raises `StoreUnavailable`."""
        async with self._turn:
            new = sorted(set(channels) - self._channels)
            for channel in new:
                await self._crossing.run(self._connection.add_listener, channel, self.notified)
                self._channels.add(channel)
            return bool(new)

    async def ping(self, timeout_s: float) -> None:
        """Wait for an answer of the server.

        Raises `StoreUnavailable` if none arrives within `timeout_s`: the peer is dead.
        """
        with trio.move_on_after(timeout_s):
            # This statement also removes notifications that all listeners have read. Once the queue was full, the
            # server otherwise removes them only at the next notification, which it refuses.
            usage = "SELECT pg_notification_queue_usage()"
            async with self._turn:
                await self._crossing.run(self._connection.fetchval, usage, timeout=timeout_s)
                return
        raise StoreUnavailable("the listener's connection is silent")


@asynccontextmanager
async def open_listener(
    database: Database, deliver: Callable[[Notification], None], channels: Iterable[str]
) -> AsyncIterator[Listening]:
    """Listen to `channels` for the duration of a block.

    The driver calls `deliver` as soon as a notification arrives: it must neither block nor raise.

    Raises:
        NotificationFlood: more than `FLOOD` notifications arrived within `FLOOD_S` seconds; the connection is ended.
        StoreUnavailable: the connection cannot be opened, or was lost before it listened.
    """
    crossing = database.crossing
    connection = await crossing.run(connect, database.options, direct=True, role="listener")
    listening = Listening(crossing, connection, deliver)
    connection.add_termination_listener(lambda _connection: listening.lost.set())
    try:
        await listening.listen(channels)
        yield listening
    except StoreUnavailable as error:
        if listening.flooded:
            raise NotificationFlood(
                f"more than {FLOOD} notifications arrived within {FLOOD_S:g} s; until there are fewer, jobs and cancel"
                " requests are found by polling; revoke CONNECT from the role that sends them"
            ) from error
        raise
    finally:
        with trio.move_on_after(2, shield=True):
            await crossing.run(_aio_close, connection)


async def _aio_close(connection: Any) -> None:  # noqa: ASYNC124 - terminate needs the loop that a crossing brings
    connection.terminate()

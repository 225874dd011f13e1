"""The channels of NOTIFY, and a connection that listens to them: what it hears comes as typed messages.

Whoever may connect to the database may notify, as often as he likes, and what reads this connection also reads the
heartbeats': a connection on which too many notifications come is ended at once, before they take the time that leases
need. Rejected: to read it more slowly; the server keeps what is unread, for all databases, until its space is full.
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
    """A job of this queue became ready."""

    queue: str


@attrs.frozen
class JobDue:
    """A job was added that falls due at this second (Unix time by the database's clock)."""

    due_at: float


@attrs.frozen
class CancelRequested:
    """The run that has this token is to be canceled."""

    token: int


@attrs.frozen
class JobChanged:
    """A job that somebody watches has another status or progress."""

    job_id: UUID


@attrs.frozen
class TaskAnswered:
    """A task of a durable process, which somebody waits for, has its answer."""

    task_id: int


@attrs.frozen
class JobToJudge:
    """A job that runs after others is to be looked at: one that it waits for has `ended`, or else it was added."""

    ended: bool


@attrs.frozen
class LaneTold:
    """A job of this lane waits or has ended; if it has no name, limits have changed."""

    lane: str


@attrs.frozen
class SchedulesChanged:
    """Schedules were stored, resumed or removed: one may be due earlier than was known."""


@attrs.frozen
class SomethingFailed:
    """A job or a schedule has failed, and operators are to be told of it."""


@attrs.frozen
class BulkBegun:
    """An act on many jobs has begun."""


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
"""More notifications than this in `FLOOD_S` seconds are a flood: to read them takes about a tenth of that time."""
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
"""Those that matter to a process which runs jobs."""
OF_WAITING: Final = frozenset({"dl_changed"})
"""Those that matter to a process which waits for jobs."""
OF_ANSWERS: Final = frozenset({"dl_answered"})
"""Those that matter to a process which waits for durable processes."""


class Listening:
    """An open listener. `lost` is set when its connection ends; `ping` proves that it lives."""

    def __init__(self, crossing: Crossing, connection: Any, deliver: Callable[[Notification], None]) -> None:
        """Use `open_listener`."""
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
        """Deliver what is ours, unless too much comes."""
        if self.flooded:
            return  # what was read before the connection ended
        now = trio.current_time()
        if now - self._heard_since >= FLOOD_S:
            self._heard, self._heard_since = 0, now
        self._heard += 1
        if self._heard > FLOOD:
            self.flooded = True
            self._connection.terminate()  # without a word, which would wait behind all that is unread
            return
        # A payload that is none of ours (anybody may NOTIFY) costs nothing.
        with contextlib.suppress(ValueError):
            self._deliver(_CHANNELS[channel](str(payload)))

    async def listen(self, channels: Iterable[str]) -> bool:
        """Listen to these, too; whether some of them are new. Raises `StoreUnavailable`."""
        async with self._turn:
            new = sorted(set(channels) - self._channels)
            for channel in new:
                await self._crossing.run(self._connection.add_listener, channel, self.notified)
                self._channels.add(channel)
            return bool(new)

    async def ping(self, timeout_s: float) -> None:
        """Ask the server for an answer; `StoreUnavailable` if none comes within `timeout_s`: a dead peer is silent."""
        with trio.move_on_after(timeout_s):
            # Of all statements this one: it also lets go of notifications that all have read. After the queue was full
            # the server does so at the next notification only, which it refuses.
            usage = "SELECT pg_notification_queue_usage()"
            async with self._turn:
                await self._crossing.run(self._connection.fetchval, usage, timeout=timeout_s)
                return
        raise StoreUnavailable("the listener's connection is silent")


@asynccontextmanager
async def open_listener(
    database: Database, deliver: Callable[[Notification], None], channels: Iterable[str]
) -> AsyncIterator[Listening]:
    """Listen to `channels` for the length of a block.

    `deliver` is called within the driver, in the turn in which a notification comes: it neither blocks nor raises.

    Raises:
        NotificationFlood: more than `FLOOD` notifications came within `FLOOD_S` seconds; the connection is ended.
        StoreUnavailable: it can't be opened, or was lost before it listened.
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
                f"more than {FLOOD} notifications came within {FLOOD_S:g} s; until fewer come, jobs and cancel requests"
                " are found by polling: take CONNECT from the role that sends them"
            ) from error
        raise
    finally:
        with trio.move_on_after(2, shield=True):
            await crossing.run(_aio_close, connection)


async def _aio_close(connection: Any) -> None:  # noqa: ASYNC124 - terminate needs the loop that a crossing brings
    connection.terminate()

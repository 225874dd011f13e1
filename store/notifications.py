"""The channels of NOTIFY, and a connection that listens to them: what it hears comes as typed messages."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final
from uuid import UUID

import attrs
import trio

from dataloader.jobs.errors import StoreUnavailable
from dataloader.store.connection import connect
from dataloader.store.database import Crossing, Database


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
    """A running job is to be canceled."""

    job_id: UUID


@attrs.frozen
class JobChanged:
    """A job that somebody watches has another status or progress."""

    job_id: UUID


Notification = QueueReady | JobDue | CancelRequested | JobChanged

_CHANNELS: Final[dict[str, Callable[[str], Notification]]] = {
    "dl_jobs": QueueReady,
    "dl_due": lambda payload: JobDue(float(payload)),
    "dl_cancel": lambda payload: CancelRequested(UUID(payload)),
    "dl_changed": lambda payload: JobChanged(UUID(payload)),
}
_OF_JOBS: Final = {"dl_jobs", "dl_cancel"}


class Listening:
    """An open listener. `lost` is set when its connection ends; `ping` proves that it lives."""

    def __init__(self, crossing: Crossing, connection: Any) -> None:
        """Use `open_listener`."""
        self.lost = trio.Event()
        self._crossing = crossing
        self._connection = connection

    async def ping(self, timeout_s: float) -> None:
        """Ask the server for an answer; `StoreUnavailable` if none comes within `timeout_s`: a dead peer is silent."""
        with trio.move_on_after(timeout_s):
            # Of all statements this one: it also lets go of notifications that all have read. After the queue was full
            # the server does so at the next notification only, which it refuses.
            usage = "SELECT pg_notification_queue_usage()"
            await self._crossing.run(self._connection.fetchval, usage, timeout=timeout_s)
            return
        raise StoreUnavailable("the listener's connection is silent")


@asynccontextmanager
async def open_listener(
    database: Database, deliver: Callable[[Notification], None], *, of_jobs: bool
) -> AsyncIterator[Listening]:
    """Listen for the length of a block; `of_jobs` says whether the process runs any, and has to hear of those.

    `deliver` is called within the driver, in the turn in which a notification comes: it neither blocks nor raises.
    """
    crossing = database.crossing
    connection = await crossing.run(connect, database.options, direct=True, role="listener")
    listening = Listening(crossing, connection)

    def notified(_connection: object, _pid: int, channel: str, payload: object) -> None:
        # A payload that is none of ours (anybody may NOTIFY) costs nothing.
        with contextlib.suppress(ValueError):
            deliver(_CHANNELS[channel](str(payload)))

    connection.add_termination_listener(lambda _connection: listening.lost.set())
    try:
        for channel in _CHANNELS if of_jobs else _CHANNELS.keys() - _OF_JOBS:
            await crossing.run(connection.add_listener, channel, notified)
        yield listening
    finally:
        with trio.move_on_after(2, shield=True):
            await crossing.run(_aio_close, connection)


async def _aio_close(connection: Any) -> None:  # noqa: ASYNC124 - terminate needs the loop that a crossing brings
    connection.terminate()

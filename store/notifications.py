"""The channels of NOTIFY, and a connection that listens to them on an asyncio loop of its own.

A loop of its own, because an error in a callback, which asyncpg calls outside any task, ends the loop it happens on:
then only the listener falls and is started again. Callbacks neither block nor raise: they put a typed message into a
memory channel; when that is full the notification is dropped and `overflowed` says so, since a look at the database
mends it.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final
from uuid import UUID

import attrs
import trio

from dataloader.jobs.errors import StoreUnavailable
from dataloader.store.database import Crossing, DatabaseOptions, connect
from dataloader.store.loop import open_loop

BUFFER: Final = 10_000


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


class Listening:
    """An open listener: iterate over `notifications`; `ping` proves that the connection lives."""

    def __init__(
        self, crossing: Crossing, connection: Any, notifications: trio.MemoryReceiveChannel[Notification]
    ) -> None:
        """Use `open_listener`."""
        self.notifications = notifications
        self._crossing = crossing
        self._connection = connection

    async def ping(self, timeout_s: float) -> None:
        """Ask the server for an answer; `StoreUnavailable` if none comes within `timeout_s`: a dead peer is silent."""
        with trio.move_on_after(timeout_s):
            await self._crossing.run(self._connection.fetchval, "SELECT 1", timeout=timeout_s)
            return
        raise StoreUnavailable("the listener's connection is silent")


@asynccontextmanager
async def open_listener(options: DatabaseOptions) -> AsyncIterator[Listening]:
    """Listen on all channels for the length of a block. The stream ends when the connection is lost."""
    send, receive = trio.open_memory_channel[Notification](BUFFER)
    async with open_loop() as loop:
        crossing = Crossing(loop)
        connection = await crossing.run(connect, options, direct=True, role="listener")

        def notified(_connection: object, _pid: int, channel: str, payload: object) -> None:
            # A payload that is none of ours (anybody may NOTIFY) and a full buffer cost latency, never work.
            with contextlib.suppress(ValueError, trio.WouldBlock, trio.ClosedResourceError, trio.BrokenResourceError):
                send.send_nowait(_CHANNELS[channel](str(payload)))

        def terminated(_connection: object) -> None:
            send.close()

        connection.add_termination_listener(terminated)
        try:
            for channel in _CHANNELS:
                await crossing.run(connection.add_listener, channel, notified)
            with receive:
                yield Listening(crossing, connection, receive)
        finally:
            send.close()
            with trio.move_on_after(2, shield=True):
                await crossing.run(_aio_close, connection)


async def _aio_close(connection: Any) -> None:  # noqa: ASYNC124 - terminate needs the loop that a crossing brings
    connection.terminate()

"""Dedicated listener for a program that runs no jobs. It connects at the first wait."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import trio

from dataloader.jobs.errors import StoreError, StoreUnavailable
from dataloader.jobs.growing_pauses import Pauses
from dataloader.jobs.logger import get_logger
from dataloader.store.connection.bridge import Database
from dataloader.store.queue.notifications import Notification, open_listener

log = get_logger(__name__)

PING_S: Final = 5.0
"""Seconds between two pings of the listener's connection, and the timeout of each: a dead peer sends nothing."""
FIRST_PAUSE_S: Final = 0.1
MAX_PAUSE_S: Final = 60.0
"""Longest pause before a lost connection is opened again. Meanwhile, waits poll."""


async def listen_from(
    begun: trio.Event,
    database: Database,
    hear: Callable[[Notification], None],
    channels: Iterable[str],
    missed: Callable[[], None],
) -> None:
    """Receive notifications from `begun` on, until cancelled. Without this, waits poll every few seconds.

    `missed` is called on each new connection, since notifications may have been lost before it.
    """
    await begun.wait()
    pauses = Pauses(FIRST_PAUSE_S, MAX_PAUSE_S)
    while True:
        try:
            async with open_listener(database, hear, channels) as listening:
                missed()
                while True:
                    await listening.ping(PING_S)
                    with trio.move_on_after(PING_S):
                        await listening.lost.wait()
                        raise StoreUnavailable("the listener's connection was lost")
                    pauses.reset()
        except StoreError as error:
            # Debug only: the wait itself raises if the database cannot be used.
            log.debug("cannot listen for changes of awaited jobs", error=str(error))
        await trio.sleep(pauses.next())

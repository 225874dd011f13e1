"""The queue by its database, for a program that runs no jobs. From its first `wait` on it has a listener of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import trio

from dataloader.jobs.contract import Operator
from dataloader.jobs.errors import StoreError, StoreUnavailable
from dataloader.jobs.growing_pauses import Pauses
from dataloader.jobs.logger import get_logger
from dataloader.store.connection.bridge import Database, DatabaseOptions, open_database
from dataloader.store.queue.database_jobs import DatabaseJobs
from dataloader.store.queue.enqueuer import Enqueuer
from dataloader.store.queue.notifications import OF_WAITING, JobChanged, Notification, open_listener
from dataloader.store.queue.queue_states import ServedQueues
from dataloader.store.queue.waits import Waits

log = get_logger(__name__)

PING_S: Final = 5.0
"""The seconds between two pings of the listener's connection, and the timeout of each: a dead peer is silent."""
FIRST_PAUSE_S: Final = 0.1
MAX_PAUSE_S: Final = 60.0
"""The pause before a lost connection is opened again grows up to this; waits poll their jobs meanwhile."""


@asynccontextmanager
async def open_database_jobs(
    options: DatabaseOptions, operator: Operator, *, default_lease_s: int = 60
) -> AsyncIterator[DatabaseJobs]:
    """The queue of a database for the length of a block, on Trio. It connects at the first call, not before."""
    failure: BaseException | None = None
    async with open_database(options) as database:
        waits = Waits(database)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_listen, database, waits)
            try:
                yield DatabaseJobs(
                    database=database,
                    operator=operator,
                    enqueuer=Enqueuer(database, default_lease_s=default_lease_s),
                    served=ServedQueues(database),
                    waits=waits,
                )
            except trio.Cancelled:
                raise
            except BaseException as error:  # noqa: BLE001 - raised again below, without this nursery's group around it
                failure = error
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure


async def _listen(database: Database, waits: Waits) -> None:
    """Wake the waits for a job when it changes, until cancelled. Without this they poll every few seconds."""

    def hear(notification: Notification) -> None:
        if isinstance(notification, JobChanged):
            waits.changed(notification.job_id)

    await waits.begun.wait()
    pauses = Pauses(FIRST_PAUSE_S, MAX_PAUSE_S)
    while True:
        try:
            async with open_listener(database, hear, OF_WAITING) as listening:
                waits.all_changed()
                while True:
                    await listening.ping(PING_S)
                    with trio.move_on_after(PING_S):
                        await listening.lost.wait()
                        raise StoreUnavailable("the listener's connection was lost")
                    pauses.reset()
        except StoreError as error:
            # Debug only: the wait itself raises when the database can't be used.
            log.debug("no connection listens for changes of jobs", error=str(error))
        await trio.sleep(pauses.next())

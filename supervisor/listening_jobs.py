"""The queue by its database, for a program that runs no jobs. From its first `wait` on it has a listener of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from dataloader.jobs.client.jobs import Jobs
from dataloader.jobs.contract import Operator
from dataloader.store.connection.bridge import open_database
from dataloader.store.connection.options import DatabaseOptions
from dataloader.store.performer import DatabasePerformer
from dataloader.store.queue.enqueuer import Enqueuer
from dataloader.store.queue.notifications import OF_WAITING, JobChanged, Notification
from dataloader.store.queue.queue_states import ServedQueues
from dataloader.store.queue.waits import REREAD_S, Waits
from dataloader.supervisor.listening import listen_from


@asynccontextmanager
async def open_database_jobs(
    options: DatabaseOptions, operator: Operator, *, default_lease_s: int = 60, reread_s: float = REREAD_S
) -> AsyncIterator[Jobs]:
    """The queue of a database for the length of a block, on Trio. It connects at the first call, not before.

    A job that is waited for is read at least every `reread_s` seconds.
    """
    failure: BaseException | None = None
    async with open_database(options) as database:
        waits = Waits(database, reread_s=reread_s)
        async with trio.open_nursery() as nursery:

            def hear(notification: Notification) -> None:
                if isinstance(notification, JobChanged):
                    waits.changed(notification.job_id)

            nursery.start_soon(listen_from, waits.begun, database, hear, OF_WAITING, waits.all_changed)
            try:
                performer = DatabasePerformer(
                    database=database,
                    operator=operator,
                    enqueuer=Enqueuer(database, default_lease_s=default_lease_s),
                    served=ServedQueues(database),
                    waits=waits,
                )
                yield Jobs(performer)
            except trio.Cancelled:
                raise
            except BaseException as error:  # noqa: BLE001 - raised again below, without this nursery's group around it
                failure = error
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure

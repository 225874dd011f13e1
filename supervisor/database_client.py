"""Client over the database, for programs that run no jobs. It opens one listener at its first wait."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from dataloader.jobs.client.client import Client
from dataloader.jobs.contract import Operator
from dataloader.jobs.model import DEFAULT_LEASE_S
from dataloader.store.connection.bridge import Database, open_database
from dataloader.store.connection.options import DatabaseOptions
from dataloader.store.performer import DatabasePerformer
from dataloader.store.processes.answers import Answers
from dataloader.store.queue.enqueuer import Enqueuer
from dataloader.store.queue.notifications import OF_ANSWERS, OF_WAITING, JobChanged, Notification, TaskAnswered
from dataloader.store.queue.queue_states import ServedQueues
from dataloader.store.queue.waits import REREAD_S, Waits
from dataloader.supervisor.listening import listen_from


@asynccontextmanager
async def open_database_client(
    options: DatabaseOptions, operator: Operator, *, default_lease_s: int = DEFAULT_LEASE_S, reread_s: float = REREAD_S
) -> AsyncIterator[Client]:
    """Open a client of a database for the duration of a block, on Trio. It connects at its first use.

    While a caller waits for a job, the job is read at least every `reread_s` seconds.
    """
    failure: BaseException | None = None
    async with open_database(options) as database:
        waits, answers = Waits(database, reread_s=reread_s), Answers(database)
        answers.begun = waits.begun  # one listener for both
        async with trio.open_nursery() as nursery:

            def hear(notification: Notification) -> None:
                if isinstance(notification, JobChanged):
                    waits.changed(notification.job_id)
                elif isinstance(notification, TaskAnswered):
                    answers.told(notification.task_id)

            def missed() -> None:
                waits.all_changed()
                answers.all_told()

            nursery.start_soon(listen_from, waits.begun, database, hear, OF_WAITING | OF_ANSWERS, missed)
            try:
                yield _client_over(database, operator, waits, answers, default_lease_s)
            except trio.Cancelled:
                raise
            except BaseException as error:  # noqa: BLE001 - raised again below, outside this nursery's exception group
                failure = error
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure


def _client_over(
    database: Database, operator: Operator, waits: Waits, answers: Answers, default_lease_s: int
) -> Client:
    performer = DatabasePerformer(
        database=database,
        operator=operator,
        enqueuer=Enqueuer(database, default_lease_s=default_lease_s),
        served=ServedQueues(database),
        waits=waits,
        answers=answers,
    )
    return Client.over(performer)

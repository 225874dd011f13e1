"""Durable processes by their database, for a program that runs none. From its first wait on it has a listener."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from dataloader.jobs.contract import Operator
from dataloader.store.connection.bridge import open_database
from dataloader.store.connection.options import DatabaseOptions
from dataloader.store.processes.answers import Answers
from dataloader.store.processes.database_processes import DatabaseProcesses
from dataloader.store.queue.notifications import OF_ANSWERS, Notification, TaskAnswered
from dataloader.supervisor.listening import listen_from


@asynccontextmanager
async def open_database_processes(
    options: DatabaseOptions, operator: Operator, *, default_lease_s: int = 60
) -> AsyncIterator[DatabaseProcesses]:
    """The processes of a database for the length of a block, on Trio. It connects at the first call, not before."""
    failure: BaseException | None = None
    async with open_database(options) as database:
        answers = Answers(database)
        async with trio.open_nursery() as nursery:

            def hear(notification: Notification) -> None:
                if isinstance(notification, TaskAnswered):
                    answers.told(notification.task_id)

            nursery.start_soon(listen_from, answers.begun, database, hear, OF_ANSWERS, answers.all_told)
            try:
                yield DatabaseProcesses(
                    database=database, operator=operator, answers=answers, default_lease_s=default_lease_s
                )
            except trio.Cancelled:
                raise
            except BaseException as error:  # noqa: BLE001 - raised again below, without this nursery's group around it
                failure = error
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure

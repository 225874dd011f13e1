"""The client that speaks with the database itself: the command line's way when no service is named.

Waiting is reading again: a command has no listener, and one row by its key twice a second costs the database nothing.
Operators' actions are signed with the account and the host they come from.
"""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Final
from uuid import UUID

import attrs
import trio

from dataloader.jobs.contract import Operator
from dataloader.jobs.errors import ConfigError
from dataloader.jobs.listings import AuditRecord, JobFilter, JobPage, Level, LogPage
from dataloader.jobs.model import Enqueued, JobEvent, JobRecord, NewJob, QueueRecord, WorkerRecord
from dataloader.jobs.page_cursor import After
from dataloader.jobs.states import Status
from dataloader.store.connection.bridge import Database, DatabaseOptions, open_database
from dataloader.store.etl import run_records
from dataloader.store.etl.run_records import FailureLine, LoadPage, LoadRecord
from dataloader.store.queue import control, reads
from dataloader.store.queue.enqueue import enqueue
from dataloader.store.queue.job_logs import list_log
from dataloader.store.queue.queue_states import read_served
from dataloader.supervisor.client import BULK, MANY_AGAIN, Client, repeat_bulk
from dataloader.supervisor.settings import Settings

READ_AGAIN_S: Final = 0.5


@asynccontextmanager
async def open_store_client(settings: Settings) -> AsyncIterator[Client]:
    """A client of the settings' database for the length of a block. Nothing is connected before the first question."""
    async with open_database(database_options(settings)) as database:
        yield StoreClient(database, Operator(account()), settings)


def database_options(settings: Settings) -> DatabaseOptions:
    """How a command connects: as the settings say, with one connection. `ConfigError` when they name no database."""
    if settings.db_dsn is None:
        raise ConfigError("DL_DB_DSN: is not set; the address of a database")
    return DatabaseOptions(
        dsn=settings.db_dsn,
        lock_dsn=settings.lock_dsn,
        pool_size=1,
        connect_timeout_s=settings.connect_timeout_s,
        statement_timeout_s=settings.statement_timeout_s,
        name="dataloader command",
    )


def account() -> str:
    """Who runs this command, and where, as the audit has it."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a user id without a name, as containers have it
        user = str(os.geteuid())
    return f"{user}@{socket.gethostname()}"


@attrs.frozen
class StoreClient(Client):
    """A queue, by its tables."""

    database: Database
    actor: Operator
    settings: Settings

    async def trigger(self, job: NewJob) -> Enqueued:
        (enqueued,) = await enqueue(self.database, [job], default_lease_s=self.settings.default_lease_s)
        if enqueued.status is not Status.QUEUED:
            return enqueued
        served = await read_served(self.database)
        return attrs.evolve(enqueued, queue_state=None if served is None else served.state_of(enqueued.queue, job.task))

    async def job(self, job_id: UUID) -> JobRecord:
        return await reads.get_job(self.database, job_id)

    async def change(self, seen: JobRecord) -> JobRecord:
        await trio.sleep(READ_AGAIN_S)
        return await reads.get_job(self.database, seen.job_id)

    async def jobs(self, wanted: JobFilter, *, limit: int, after: str | None) -> JobPage:
        return await reads.list_jobs(self.database, wanted, limit=limit, after=after)

    async def events(self, job_id: UUID, *, after: int, limit: int) -> list[JobEvent]:
        return (await reads.list_events(self.database, job_id, after=after, limit=limit)).events

    async def logs(
        self, job_id: UUID, *, after: After, limit: int, level: Level | None = None, load: str | None = None
    ) -> LogPage:
        return await list_log(self.database, job_id, after=after, limit=limit, level=level, load=load)

    async def cancel(self, job_id: UUID) -> JobRecord:
        return await control.cancel(self.database, job_id, self.actor)

    async def retry(self, job_id: UUID, *, force: bool = False) -> JobRecord:
        return await control.retry(self.database, job_id, self.actor, force=force)

    async def cancel_many(self, wanted: JobFilter) -> int:
        return await repeat_bulk(partial(control.cancel_many, self.database, wanted, self.actor, limit=BULK), least=1)

    async def retry_many(self, wanted: JobFilter) -> int:
        change = partial(control.retry_many, self.database, wanted, self.actor, limit=BULK)
        return await repeat_bulk(change, least=MANY_AGAIN)

    async def queues(self) -> list[QueueRecord]:
        return await reads.list_queues(self.database)

    async def pause(self, queue: str) -> None:
        await control.pause(self.database, queue, self.actor)

    async def resume(self, queue: str) -> None:
        await control.resume(self.database, queue, self.actor)

    async def workers(self) -> list[WorkerRecord]:
        return await reads.list_workers(self.database)

    async def audit(self, *, limit: int, before: int | None) -> list[AuditRecord]:
        return (await reads.list_audit(self.database, limit=limit, after=before)).audit

    async def loads(self, *, limit: int, after: str | None) -> LoadPage:
        return await run_records.list_loads(self.database, limit=limit, after=after)

    async def load(self, name: str) -> LoadRecord:
        return await run_records.get_load(self.database, name)

    async def failures_of_run(self, run_id: UUID, *, after: int, limit: int) -> list[FailureLine]:
        return (await run_records.list_failures_of_run(self.database, run_id, after=after, limit=limit)).failures

    async def failures_of_load(self, name: str, *, after: int, limit: int) -> list[FailureLine]:
        return (await run_records.list_failures_of_load(self.database, name, after=after, limit=limit)).failures

"""Databases of one server, with our tables and with jobs in them."""

from __future__ import annotations

from collections.abc import Sequence

import psycopg
import trio

from dataloader import NewJob
from dataloader.store.connection.bridge import open_database
from dataloader.store.connection.options import DatabaseOptions
from dataloader.store.embedded.postgres import EmbeddedPostgres
from dataloader.store.migrations import migrate
from dataloader.store.queue.enqueue import enqueue

BATCH = 1_000


def migrated(server: EmbeddedPostgres, name: str) -> str:
    """Create a database with our tables, and return its address."""
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
    dsn = server.dsn_of(name)
    trio.run(_migrate, dsn)
    return dsn


def enqueued(dsn: str, jobs: Sequence[NewJob]) -> None:
    """Add the jobs, in batches."""
    trio.run(_enqueue, dsn, jobs)


async def _migrate(dsn: str) -> None:
    async with open_database(DatabaseOptions(dsn=dsn)) as database:
        await migrate(database)


async def _enqueue(dsn: str, jobs: Sequence[NewJob]) -> None:
    async with open_database(DatabaseOptions(dsn=dsn)) as database:
        for begin in range(0, len(jobs), BATCH):
            await enqueue(database, jobs[begin : begin + BATCH])

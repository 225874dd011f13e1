"""What the store's tests share: our store on the test's database, another service's connection to it, and rows."""

from __future__ import annotations

import pytest
import trio
from databases import raw_connection

from dataloader.jobs.ids import uuid7
from dataloader.store.database import DatabaseOptions, open_database


@pytest.fixture
async def store(database):
    """Our store, open on the test's database."""
    async with open_database(DatabaseOptions(dsn=database.dsn, statement_timeout_s=10)) as store:
        yield store


@pytest.fixture
async def raw(database):
    """A connection past our store."""
    async with raw_connection(database.dsn) as connection:
        yield connection


@pytest.fixture
async def until(raw):
    """Waits for a condition in the database, an SQL expression."""

    async def until(condition, *args):
        with trio.fail_after(10):
            while not await raw.fetchval(f"SELECT {condition}", *args):  # noqa: ASYNC110 - the database has no event
                await trio.sleep(0.01)

    return until


@pytest.fixture
async def until_blocked(until):
    """Waits until another connection waits for a lock that `raw` holds."""

    async def until_blocked():
        # Not from pg_stat_activity, which stands still within a transaction.
        await until(
            "EXISTS (SELECT FROM pg_locks WHERE NOT granted AND pg_backend_pid() = ANY (pg_blocking_pids(pid)))"
        )

    return until_blocked


@pytest.fixture
async def add_job(raw):
    """Adds one row to dl_jobs; its columns by name, each as an SQL expression. Gives its id."""

    async def add(**columns):
        job_id = uuid7()
        values = {"job_id": f"'{job_id}'", "queue": "'q'", "task": "'t'", "lock_key": f"'{job_id}'"} | columns
        await raw.execute(f"INSERT INTO dl_jobs ({', '.join(values)}) VALUES ({', '.join(values.values())})")
        return job_id

    return add

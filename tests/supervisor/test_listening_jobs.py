"""How a program that runs no jobs waits by the database: it is told. What all ways promise: test_jobs_contract.py."""

from __future__ import annotations

import math

import pytest
import trio
from conditions import until
from databases import raw_connection

from dataloader import Status, open_jobs
from dataloader.jobs.contract import Operator
from dataloader.store.connection.options import DatabaseOptions
from dataloader.supervisor.listening_jobs import open_database_jobs

LISTENERS = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE '% listener' AND state = 'idle'"
END = "UPDATE dl_jobs SET status = 'succeeded', finished_at = now() WHERE job_id = $1"
CUT = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE '% listener'"


def open_waiting(dsn):
    """The queue, of which a wait reads its job only when it is notified, or when the listener connects."""
    return open_database_jobs(DatabaseOptions(dsn=dsn), Operator("test"), reread_s=math.inf)


async def test_a_wait_by_the_database_is_told_of_the_end_and_nothing_listens_before_it(database):
    ended = []
    async with raw_connection(database.dsn) as raw, open_waiting(database.dsn) as jobs:

        async def wait(job_id):
            ended.append(await jobs.wait(job_id))

        first, second = [(await jobs.enqueue("t", queue="q")).job_id for _ in range(2)]
        assert await raw.fetchval(LISTENERS) == 0
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait, first)
                await until(lambda: raw.fetchval(LISTENERS))
                await raw.execute(END, first)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait, second)
                # What ends while nobody listens is found by the look that follows on the next connection.
                await raw.execute(CUT)
                await raw.execute(END, second)
    assert [job.status for job in ended] == [Status.SUCCEEDED] * 2


async def test_open_jobs_raises_an_exception_of_its_block_unchanged(database):
    with pytest.raises(SystemExit, match="3"):
        async with open_jobs(database.dsn):
            raise SystemExit(3)

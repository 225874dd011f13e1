"""The client by the database: its waits, and its members. test_jobs_contract.py has the promises of all ways."""

from __future__ import annotations

import math
from contextlib import AsyncExitStack
from functools import partial

import pytest
import trio
from conditions import patience_s, until
from databases import raw_connection
from web_server import open_server

import dataloader
from dataloader import Client, ProcessRequest, Status, open_client
from dataloader.jobs.contract import Operator
from dataloader.store.connection.options import DatabaseOptions
from dataloader.supervisor.database_client import open_database_client

LISTENERS = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE '% listener' AND state = 'idle'"
WATCHED = """
SELECT (SELECT count(*) FROM dl_jobs WHERE watched) + (SELECT count(*) FROM dl_process_tasks WHERE watched)
"""
END = "UPDATE dl_jobs SET status = 'succeeded', finished_at = now() WHERE job_id = $1"
CUT = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE '% listener'"


def open_waiting(dsn):
    """Open a client whose waits read their jobs only after a notification, or when the listener connects."""
    return open_database_client(DatabaseOptions(dsn=dsn), Operator("test"), reread_s=math.inf)


async def test_a_wait_by_the_database_is_told_of_the_end_and_nothing_listens_before_it(database):
    ended = []
    async with raw_connection(database.dsn) as raw, open_waiting(database.dsn) as client:
        jobs = client.jobs

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
                # An end during a lost connection is found by the read after the next connect.
                await raw.execute(CUT)
                await raw.execute(END, second)
    assert [job.status for job in ended] == [Status.SUCCEEDED] * 2


async def test_open_client_raises_an_exception_of_its_block_unchanged(database):
    with pytest.raises(SystemExit, match="3"):
        async with open_client(database.dsn):
            raise SystemExit(3)


async def test_waits_for_jobs_and_for_processes_share_one_listener(database):
    async with raw_connection(database.dsn) as raw, open_waiting(database.dsn) as client:
        job = await client.jobs.enqueue("t", queue="q")
        asked = await client.processes.ask(ProcessRequest(type="p", process_id="1", kind="init"))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.jobs.wait, job.job_id)
            nursery.start_soon(partial(client.processes.wait, asked.task_id, timeout_s=patience_s()))

            async def both_wait():
                return await raw.fetchval(WATCHED) == 2 and await raw.fetchval(LISTENERS)

            await until(both_wait)
            assert await raw.fetchval(LISTENERS) == 1
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("way", ["database", "service"])
async def test_a_client_has_every_feature_in_both_ways(way, database):
    async with AsyncExitStack() as stack:
        if way == "service":
            web = await stack.enter_async_context(open_server(database.dsn))
            client = await stack.enter_async_context(open_client(url=web.url))
        else:
            client = await stack.enter_async_context(open_client(database.dsn))
        assert isinstance(client, Client)
        assert (await client.jobs.find()).jobs == []
        assert (await client.processes.find()).processes == []
        assert (await client.schedules.find()).schedules == []
        assert (await client.limits.suppliers()).suppliers == []
        assert (await client.bulk.find()).bulk == []


@pytest.mark.parametrize("name", ["open_jobs", "open_processes"])
def test_a_former_name_is_an_error_that_names_open_client(name):
    with pytest.raises(ImportError, match=rf"^dataloader\.{name} is now named open_client"):
        getattr(dataloader, name)

"""Whoever waits for a job's end waits on while the database is away."""

from __future__ import annotations

import math
from functools import partial

import pytest
import trio
from conditions import until
from databases import raw_connection
from proxy import open_proxy

from dataloader import Settings
from dataloader.jobs.errors import StoreUnavailable
from dataloader.jobs.ids import uuid7
from dataloader.jobs.states import Status
from dataloader.store.connection.bridge import DatabaseOptions, open_database
from dataloader.store.queue import reads
from dataloader.supervisor import client
from dataloader.supervisor.client_store import StoreClient


@pytest.mark.requirement("Q12")
async def test_a_wait_goes_on_when_the_database_is_back_and_says_so_and_ends_when_it_stays_away(database, monkeypatch):
    monkeypatch.setattr(client, "AWAY_S", 0.05)
    job_id, ended, told = uuid7(), [], []

    async def wait(queue, job):
        waiting = client.wait_for_end(queue, job, timeout_s=30, on_change=lambda _job: None, tell=told.append)
        ended.append(await waiting)

    async with (
        raw_connection(database.dsn) as raw,
        open_proxy(database.dsn) as proxy,
        open_database(DatabaseOptions(dsn=proxy.dsn, connect_timeout_s=2)) as store,
    ):
        await raw.execute("INSERT INTO dl_jobs (job_id, queue, task, lock_key) VALUES ($1, 'q', 't', 'k')", job_id)
        job = await reads.get_job(store, job_id)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait, StoreClient(store, None, Settings()), job)
            proxy.cut()
            await until(lambda: _refused(store))
            await trio.sleep(1)
            await raw.execute("UPDATE dl_jobs SET status = 'succeeded', finished_at = now() WHERE job_id = $1", job_id)
            proxy.mend()
        proxy.cut()
        monkeypatch.setattr(client, "MOST_AWAY_S", 0.6)
        for wait_for in (
            partial(client.wait_for_end, job=job, on_change=lambda _job: None),
            partial(client.job_that_was_added, job_id=job_id),
        ):
            with trio.fail_after(30), pytest.raises(StoreUnavailable) as gave_up:
                await wait_for(StoreClient(store, None, Settings()), timeout_s=math.inf, tell=str)
            said = str(gave_up.value)
            assert said.startswith("gave up after 0.01 minutes without an answer: ")
            assert said.endswith(f"; ask for the job later by `dataloader status {job_id}`")
    assert [job.status for job in ended] == [Status.SUCCEEDED]
    away, back = told
    assert away.endswith("; waiting for it for 10 minutes at most")
    assert back == "it answers again"


async def _refused(store):
    return store.pool_use()[0] == 0


async def test_a_bulk_action_goes_on_when_it_changed_less_than_it_was_asked_for():
    changes = iter([1_000, 999, 3, 0, 7])

    async def change():
        return next(changes)

    assert await client.repeat_bulk(change, least=1) == 2_002


async def test_a_job_that_was_added_is_not_asked_for_longer_than_one_waits():
    class Away:
        async def job(self, _job_id):
            raise StoreUnavailable("gone")

    with trio.fail_after(20), pytest.raises(StoreUnavailable):
        await client.job_that_was_added(Away(), uuid7(), timeout_s=0.1, tell=str)

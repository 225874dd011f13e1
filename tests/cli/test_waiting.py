"""A caller that waits for a job's end continues to wait while the database is unreachable."""

from __future__ import annotations

import math

import pytest
import trio
from conditions import patience_s, until
from databases import raw_connection
from proxy import open_proxy

from dataloader.cli import waiting
from dataloader.jobs.contract import Operator
from dataloader.jobs.errors import StoreUnavailable
from dataloader.jobs.ids import uuid7
from dataloader.jobs.states import Status
from dataloader.store.connection.options import DatabaseOptions
from dataloader.supervisor.database_client import open_database_client


@pytest.mark.slow
@pytest.mark.requirement("Q12")
async def test_a_wait_survives_a_short_outage_and_ends_with_a_long_one(database):
    job_id, ended, told = uuid7(), [], []

    async def wait(jobs):
        end = waiting.wait_for_end(jobs, job_id, timeout_s=30, on_change=lambda _job: None, tell=told.append)
        ended.append(await end)

    async with (
        raw_connection(database.dsn) as raw,
        open_proxy(database.dsn) as proxy,
        open_database_client(DatabaseOptions(dsn=proxy.dsn, connect_timeout_s=2), Operator("test")) as client,
    ):
        jobs = client.jobs
        await raw.execute("INSERT INTO dl_jobs (job_id, queue, task, lock_key) VALUES ($1, 'q', 't', 'k')", job_id)
        await jobs.get(job_id)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait, jobs)
            proxy.cut()
            await until(lambda: _refused(jobs.performer.database))
            await trio.sleep(1)
            await raw.execute("UPDATE dl_jobs SET status = 'succeeded', finished_at = now() WHERE job_id = $1", job_id)
            proxy.mend()
        proxy.cut()
        with trio.fail_after(patience_s()), pytest.raises(StoreUnavailable) as gave_up:
            await waiting.wait_for_end(jobs, job_id, timeout_s=math.inf, on_change=lambda _job: None, most_away_s=0.6)
        said = str(gave_up.value)
        assert said.startswith("gave up after 0.01 minutes without an answer: ")
        assert said.endswith(f"; check the job later with `dataloader status {job_id}`")
    assert [job.status for job in ended] == [Status.SUCCEEDED]
    away, back = told
    assert away.endswith("; waiting for up to 10 minutes")
    assert back == "the connection is restored"


async def _refused(store):
    return store.pool_use()[0] == 0


async def test_a_job_that_was_added_is_not_asked_for_longer_than_one_waits():
    class Away:
        async def get(self, _job_id, **_options):
            raise StoreUnavailable("gone")

        wait = get

    with trio.fail_after(patience_s()), pytest.raises(StoreUnavailable, match="was enqueued, but cannot be read: gone"):
        await waiting.wait_for_end(Away(), uuid7(), timeout_s=0.1, on_change=str)

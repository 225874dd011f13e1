"""A slot is free when its handler has ended; at most half as many ends as slots may be unrecorded (Q5, Q7)."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing
from conditions import until, when_ended
from proxy import open_proxy

from dataloader import NewJob, Tasks
from dataloader.web.services import QueueLoad


@pytest.fixture
def unrecorded(open_worker, database, settled):
    """Return a context with a worker of four slots, which records no end before it exits; it yields the begun jobs."""

    @asynccontextmanager
    async def unrecorded(jobs):
        tasks, begun = Tasks(), []

        @tasks.task("note")
        async def note(job):
            begun.append(job.args["n"])

        async with (
            open_proxy(database.dsn) as proxy,
            open_worker(tasks, {"q": 4}, dsn=proxy.dsn) as supervisor,
        ):
            await settled(supervisor)
            proxy.freeze("recorder")
            await supervisor.jobs.enqueue_many(jobs)
            yield supervisor, begun
            proxy.thaw()
            for job in jobs:
                assert (await when_ended(supervisor, job.job_id)).status == "succeeded"
            await until(lambda: _given(supervisor.state.queues["q"]), lambda load: load.running == 0)
        assert sorted(begun) == list(range(len(jobs)))

    return unrecorded


@pytest.mark.requirement("Q5")
async def test_handlers_run_ahead_of_their_record_by_half_of_the_slots(unrecorded, raw):
    jobs = [NewJob(task="note", queue="q", args={"n": n}) for n in range(10)]
    async with unrecorded(jobs) as (supervisor, begun):
        await until(lambda: _given(begun), lambda begun: len(begun) >= 6)
        await trio.testing.wait_all_tasks_blocked(0.1)
        assert len(begun) == 6
        assert supervisor.state.queues["q"] == QueueLoad(concurrency=4, running=4)
        assert await raw.fetchval("SELECT count(*) FROM dl_jobs WHERE status = 'running'") == 6


@pytest.mark.requirement("Q7")
async def test_a_key_is_held_until_the_end_of_its_job_is_recorded(unrecorded, row_of):
    jobs = [NewJob(task="note", queue="q", args={"n": n}, lock_key="k") for n in range(2)]
    async with unrecorded(jobs) as (_supervisor, begun):
        await until(lambda: row_of(jobs[1].job_id), lambda row: row["waits_for"] == "lock")
        await until(lambda: _given(begun), len)
        await trio.testing.wait_all_tasks_blocked(0.1)
        assert begun == [0]


async def _given(value):
    return value

"""Replicas share a queue and need nothing except the database."""

from __future__ import annotations

import pytest
import trio
from conditions import patience_s, when_ended

from dataloader import Job, Settings, Status, Tasks, Worker, open_supervisor

pytestmark = pytest.mark.slow


@pytest.mark.requirement("Q14")
async def test_a_second_replica_doubles_the_number_of_running_jobs(database):
    tasks = Tasks()
    here: list[Job] = []
    both_are_here = trio.Event()

    @tasks.task("meet")
    async def meet(job: Job) -> None:
        here.append(job)
        if len(here) == 2:
            both_are_here.set()
        await both_are_here.wait()

    settings = Settings(db_dsn=database.dsn, workers=(Worker("q", 1),))
    with trio.fail_after(patience_s()):
        async with open_supervisor(settings, tasks) as first:
            jobs = [await first.jobs.enqueue("meet", queue="q") for _ in range(2)]
            # One slot, two jobs that wait for each other: nothing ends until there is another replica.
            async with open_supervisor(settings, tasks):
                ended = [await when_ended(first, job.job_id) for job in jobs]
    assert [job.status for job in ended] == [Status.SUCCEEDED] * 2
    assert (
        int(database.psql("SELECT count(DISTINCT payload ->> 'worker') FROM dl_job_events WHERE kind = 'picked'")) == 2
    )

"""A job that ends by its own transaction keeps the data that others keep: progress, log lines, its real end."""

from __future__ import annotations

from datetime import datetime

import pytest
import trio
from conditions import patience_s, when_ended

from dataloader import Job, Settings, Status, Tasks, Worker, open_supervisor
from dataloader.store.queue.reads import list_events

pytestmark = pytest.mark.slow

tasks = Tasks()


@tasks.task("write")
async def write(job: Job) -> None:
    async with job.transaction() as transaction:
        await job.progress({"rows": 1})
        job.log.info("within")
        [row] = await transaction.fetch("SELECT clock_timestamp() AS at FROM pg_sleep(0.05)")
        transaction.result = row
    job.log.info("after")


@pytest.mark.requirement("Q11", "Q12")
async def test_progress_lines_and_time_of_a_job_that_committed_itself(database):
    settings = Settings(db_dsn=database.dsn, workers=(Worker("q", 1),))
    with trio.fail_after(patience_s()):
        async with open_supervisor(settings, tasks) as supervisor:
            job_id = (await supervisor.jobs.enqueue("write", queue="q")).job_id
            job = await when_ended(supervisor, job_id)
            assert (job.status, job.progress) == (Status.SUCCEEDED, {"rows": 1})
            assert job.finished_at >= datetime.fromisoformat(job.result["at"])
            await supervisor.drain()
            events = (await list_events(supervisor.database, job_id)).events
            assert [event.payload["message"] for event in events if event.kind == "log"] == ["within", "after"]
            [done] = [event for event in events if event.kind == "done"]
            assert done.ts >= datetime.fromisoformat(job.result["at"])

"""Version of a request as its handler sees it (R5)."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from conditions import when_ended

from dataloader import Tasks

pytestmark = pytest.mark.slow


@pytest.mark.requirement("R5")
async def test_a_handler_reads_the_version_of_the_last_request_for_its_job(open_worker):
    tasks, seen = Tasks(), []

    @tasks.task("employee", queue="q", unique=("id",), duplicates="update")
    async def employee(job):
        seen.append(job.version)

    async def runs(*requests):
        async with open_worker(tasks, {"other": 1}) as supervisor:
            added = [await supervisor.jobs.enqueue("employee", {"id": 1}, **request) for request in requests]
        async with open_worker(tasks, {"q": 1}) as supervisor:
            await when_ended(supervisor, added[-1].job_id)

    at = datetime(2026, 11, 20, tzinfo=UTC)
    await runs({"version": at})
    await runs({"version": at.timestamp() + 7.5}, {"version": at.timestamp() + 8})
    await runs({"version": at.timestamp() + 9}, {})
    assert seen == [at.timestamp(), at.timestamp() + 8, None], "an update without one takes it away"

"""Schedule of a running service: its jobs run at their planned times, in any process (R7)."""

from __future__ import annotations

from itertools import pairwise

import pytest
from conditions import until

from dataloader import Tasks

pytestmark = pytest.mark.slow


@pytest.mark.requirement("R7")
async def test_a_declared_schedule_runs_its_task(open_worker, raw):
    tasks, ran = Tasks(), []

    @tasks.task("tick", queue="q")
    async def tick(job):
        ran.append((job.args, job.schedule, job.planned_at))

    tasks.schedule("often", task="tick", every_s=1, args={"n": 1}, missed="all", overlap="allow")
    async with open_worker(tasks), open_worker(tasks):

        async def three():
            return len(ran) >= 3

        await until(three)
    rows = await raw.fetch("SELECT planned_at, started_at FROM dl_jobs ORDER BY planned_at")
    assert ran[0] == ({"n": 1}, "often", rows[0]["planned_at"])
    pauses = {(later["planned_at"] - earlier["planned_at"]).total_seconds() for earlier, later in pairwise(rows)}
    assert pauses == {1.0}

"""Sums of a process over its runs (R3): every outcome with its own duration, written soon and at its end."""

from __future__ import annotations

import pytest
import trio
from conditions import until, when_ended

from dataloader import GiveUp, Retry, Snooze, Tasks
from dataloader.jobs.outcomes import Canceled

pytestmark = [pytest.mark.slow, pytest.mark.requirement("R3")]

COUNTED = """
SELECT task, outcome, sum(runs)::int AS runs, sum(total_s) AS total_s, max(max_s) AS max_s
FROM dl_run_stats_new GROUP BY 1, 2
"""


async def test_every_run_is_counted_by_its_outcome_and_its_own_duration(open_worker, raw):
    tasks, turns = Tasks(), {}

    @tasks.task("by turns")
    async def by_turns(job):
        turns[job.job_id] = turns.get(job.job_id, 0) + 1
        if turns[job.job_id] == 1:
            await trio.sleep(0.3)
            return Retry(0)
        return Snooze(0) if turns[job.job_id] == 2 else None

    @tasks.task("ends")
    async def ends(job):
        return {"fail": GiveUp("no"), "cancel": Canceled("no")}[job.args["how"]]

    @tasks.task("in a transaction")
    async def in_a_transaction(job):
        async with job.transaction():
            pass

    async def counted():
        rows = await raw.fetch(COUNTED)
        return {(row["task"], row["outcome"]): (row["runs"], row["total_s"], row["max_s"]) for row in rows}

    async with open_worker(tasks) as supervisor:
        jobs = [
            await supervisor.jobs.enqueue("by turns", queue="q"),
            *[await supervisor.jobs.enqueue("ends", {"how": how}, queue="q") for how in ("fail", "fail", "cancel")],
            await supervisor.jobs.enqueue("in a transaction", queue="q"),
        ]
        for job in jobs:
            await when_ended(supervisor, job.job_id)

        async def all_are_there():
            return sum(runs for runs, *_ in (await counted()).values()) == 7

        await until(all_are_there)  # while it runs
        last = await supervisor.jobs.enqueue("ends", {"how": "fail"}, queue="q")
        await when_ended(supervisor, last.job_id)
    found = await counted()  # and at its end the rest
    assert {key: runs for key, (runs, *_) in found.items()} == {
        ("by turns", "retried"): 1,
        ("by turns", "snoozed"): 1,
        ("by turns", "succeeded"): 1,
        ("ends", "failed"): 3,
        ("ends", "canceled"): 1,
        ("in a transaction", "succeeded"): 1,
    }
    assert 0.3 <= found["by turns", "retried"][2] < 30
    # The time of the run itself, not the time since its job began.
    assert found["by turns", "succeeded"][1] < 0.3

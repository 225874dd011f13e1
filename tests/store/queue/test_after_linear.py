"""The cost of a graph is proportional to its jobs and edges: counted in buffers, not in seconds."""

from __future__ import annotations

import json

import pytest

from dataloader.jobs.model import NewJob
from dataloader.store.queue.enqueue import enqueue
from dataloader.store.queue.make_ready import JUDGED

pytestmark = pytest.mark.full

END = """
UPDATE dl_jobs SET status = 'succeeded', finished_at = now(), waits_for = NULL WHERE job_id = ANY ($1::uuid[])
"""
READY = "SELECT job_id FROM dl_jobs WHERE status = 'queued' AND waits_for IS NULL ORDER BY job_id DESC"
LEFT = """
SELECT EXISTS (SELECT FROM dl_jobs WHERE awaited AND status = 'succeeded')
    OR EXISTS (SELECT FROM dl_jobs WHERE waits_for = 'after' AND waits_on = '00000000-0000-0000-0000-000000000000')
"""
BATCH = 250
"""Number of ends that the recorder writes together."""


def one_before_many(number):
    first = NewJob(queue="q", task="t")
    return [first, *(NewJob(queue="q", task="t", after=[first.job_id]) for _ in range(number))]


def many_before_one(number):
    jobs = [NewJob(queue="q", task="t") for _ in range(number)]
    return [*jobs, NewJob(queue="q", task="t", after=[job.job_id for job in jobs])]


def a_chain(number):
    jobs = [NewJob(queue="q", task="t")]
    for _ in range(number):
        jobs.append(NewJob(queue="q", task="t", after=[jobs[-1].job_id]))
    return jobs


class Counting:
    """Calls the function like the stager, and counts the buffers that it reads."""

    def __init__(self, raw):
        self.raw = raw
        self.buffers = 0

    async def judge(self, added):
        plan = await self.raw.fetchval(
            f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) SELECT judged, more FROM dl_judge_after({JUDGED}, {added})"
        )
        [explained] = json.loads(plan)
        self.buffers += explained["Plan"]["Shared Hit Blocks"] + explained["Plan"]["Shared Read Blocks"]

    async def until_judged(self, *, added=False):
        while await self.raw.fetchval(LEFT):
            await self.judge(added)


async def buffers_of(store, raw, jobs):
    """Return the buffers for evaluating a graph, up to its last job; all ready jobs end together."""
    await raw.execute("DELETE FROM dl_jobs")
    await raw.execute("VACUUM dl_jobs, dl_job_after")
    await enqueue(store, jobs)
    await raw.execute("VACUUM ANALYZE dl_jobs, dl_job_after")
    counting = Counting(raw)
    await counting.until_judged(added=True)
    # Latest first, which is the worst order: jobs wait for the earliest one last.
    while ready := [row["job_id"] for row in await raw.fetch(READY)]:
        for start in range(0, len(ready), BATCH):
            await raw.execute(END, ready[start : start + BATCH])
            await counting.until_judged()
    assert await raw.fetchval("SELECT count(*) FROM dl_jobs WHERE status <> 'succeeded' OR awaited") == 0
    return counting.buffers


@pytest.mark.parametrize(
    ("shape", "number"),
    [
        (one_before_many, 500),
        (many_before_one, 500),
        (a_chain, 50),
        pytest.param(one_before_many, 2_500, marks=pytest.mark.slow),
        pytest.param(many_before_one, 2_500, marks=pytest.mark.slow),
        pytest.param(a_chain, 1_000, marks=pytest.mark.slow),
    ],
)
async def test_four_times_as_many_jobs_cost_four_times_as_much(store, raw, shape, number):
    few = await buffers_of(store, raw, shape(number))
    many = await buffers_of(store, raw, shape(4 * number))
    # An index with one more level needs one more page at each lookup; quadratic work would be sixteen times as much.
    assert many < 7 * few, (few, many)

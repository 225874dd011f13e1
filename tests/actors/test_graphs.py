"""Jobs that run after others, in a running process: each kind of handler, with and without notifications."""

from __future__ import annotations

import pytest
from conditions import patience_s, until, when_ended

from dataloader import JobFilter, NewJob, Tasks

pytestmark = pytest.mark.slow

tasks = Tasks()


@tasks.task("count")
async def count(job):
    return job.args["rows"]


@tasks.task("sum")
async def in_trio(job):
    return sum(one.result or 0 for one in (await job.after()).values())


@tasks.task("sum.asyncio", asyncio=True)
async def in_asyncio(job):
    return sum(one.result for one in (await job.after()).values())


@tasks.task("sum.thread")
def in_thread(job):
    return sum(one.result for one in job.after().values())


@pytest.mark.parametrize("notified", [True, False], ids=["notified", "polling"])
async def test_a_graph_runs_to_its_end_and_its_handlers_get_earlier_results(open_worker, monkeypatch, notified):
    if not notified:
        monkeypatch.setattr("dataloader.actors.listener.Listener._deliver", lambda *_: None)
    polls = {} if notified else {"poll_s": 0.1}
    parts = [NewJob(queue="q", task="count", args={"rows": n}) for n in range(1, 9)]
    sums = [NewJob(queue="q", task=name, after=[one.job_id for one in parts]) for name in tasks if name != "count"]
    total = NewJob(queue="q", task="sum", after=[one.job_id for one in sums])
    async with open_worker(tasks, **polls) as supervisor:
        await supervisor.jobs.enqueue_many([*parts, *sums, total])
        job = await when_ended(supervisor, total.job_id, within_s=patience_s())
    assert (job.status, job.result) == ("succeeded", 3 * 36)


async def test_all_that_came_of_a_job_is_found_by_it(open_worker):
    started = Tasks()
    started.include(tasks)

    @started.task("part", queue="q")
    async def part(job):
        await job.enqueue("count", {"rows": 1}, queue="q")

    @started.task("start", queue="q")
    async def start(job):
        async with job.transaction() as transaction:
            for _ in range(3):
                await transaction.enqueue("part")
            last = await transaction.enqueue("sum", queue="q", after=transaction.enqueued, when_failed="run")
            transaction.result = str(last.job_id)

    async with open_worker(started) as supervisor:
        first = await supervisor.jobs.enqueue("start")

        async def whole():
            return (await supervisor.jobs.find(JobFilter(root=first.job_id))).jobs

        jobs = await until(whole, lambda jobs: len(jobs) == 8 and all(job.status.is_final for job in jobs))
    assert {job.root for job in jobs} == {None, first.job_id}
    assert sorted(job.task for job in jobs) == ["count"] * 3 + ["part"] * 3 + ["start", "sum"]

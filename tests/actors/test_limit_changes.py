"""Operators change limits while processes run: it holds from the next claim on, in all of them (S5)."""

from __future__ import annotations

import pytest
from conditions import until, when_ended

from dataloader import Tasks


@pytest.mark.requirement("S5")
async def test_a_task_is_paused_resumed_removed_and_declared_again_while_processes_run(open_worker, raw):
    tasks, ran = Tasks(), []

    @tasks.task("one", queue="q")
    async def one(job):
        ran.append(job.args["n"])

    async def waits(job, for_what):
        async def does():
            return await raw.fetchval("SELECT waits_for FROM dl_jobs WHERE job_id = $1", job.job_id) == for_what

        await until(does)

    async with open_worker(tasks, {"q": 4, "other": 4}) as first:
        await when_ended(first, (await first.jobs.enqueue("one", {"n": 0})).job_id, within_s=30)
        await first.limits.pause_task("one")
        job = await first.jobs.enqueue("one", {"n": 1})
        elsewhere = await first.jobs.enqueue("one", {"n": 1}, queue="other")
        await waits(job, "limit")
        await waits(elsewhere, "limit")
        assert ran == [0]
        await first.limits.resume_task("one")
        await when_ended(first, job.job_id, within_s=30)
        await when_ended(first, elsewhere.job_id, within_s=30)
        assert ran == [0, 1, 1]

        await first.limits.remove_task("one")

        # Told by a notification: until it has come, this process may start one.
        async def is_told():
            return not any(dispatcher.knows("one") for dispatcher in first._parts.dispatchers)

        await until(is_told)
        job = await first.jobs.enqueue("one", {"n": 2}, queue="q")
        await waits(job, "task")
        assert ran == [0, 1, 1]
        async with open_worker(tasks, {"q": 4}):
            await when_ended(first, job.job_id, within_s=30)
        assert ran == [0, 1, 1, 2]
        await until(lambda: _knows(first))


async def _knows(supervisor):
    return all(dispatcher.knows("one") for dispatcher in supervisor._parts.dispatchers)

"""Changes of limits by operators while processes run apply from the next claim on, in all processes (S5)."""

from __future__ import annotations

import pytest
import trio
from conditions import until, when_ended

from dataloader import RetryPolicy, Tasks

pytestmark = pytest.mark.slow


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
        await when_ended(first, (await first.jobs.enqueue("one", {"n": 0})).job_id)
        await first.limits.pause_task("one")
        job = await first.jobs.enqueue("one", {"n": 1})
        elsewhere = await first.jobs.enqueue("one", {"n": 1}, queue="other")
        await waits(job, "limit")
        await waits(elsewhere, "limit")
        assert ran == [0]
        await first.limits.resume_task("one")
        await when_ended(first, job.job_id)
        await when_ended(first, elsewhere.job_id)
        assert ran == [0, 1, 1]

        await first.limits.remove_task("one")

        # A notification announces it: until it arrives, this process may start one.
        await until(lambda: _knowing(first), lambda queues: queues == [])
        job = await first.jobs.enqueue("one", {"n": 2}, queue="q")
        await waits(job, None)
        assert ran == [0, 1, 1]
        async with open_worker(tasks, {"q": 4}):
            await when_ended(first, job.job_id)
        assert ran == [0, 1, 1, 2]
        await until(lambda: _knowing(first), lambda queues: queues == ["other", "q"])


@pytest.mark.requirement("S1")
async def test_a_retry_delay_that_is_set_holds_for_the_next_end_in_all_processes(open_worker, raw):
    tasks, ends = Tasks(), trio.Event()

    @tasks.task("one", queue="q", retry=RetryPolicy(base_s=7_000, jitter=0))
    async def one(job):
        await ends.wait()
        raise ValueError(job.args)

    async def delays():
        sql = (
            "SELECT DISTINCT (payload ->> 'delay_s')::float8 AS s FROM dl_job_events WHERE kind = 'requeue' ORDER BY s"
        )
        return [row["s"] for row in await raw.fetch(sql)]

    async with open_worker(tasks, {"q": 1}) as first, open_worker(tasks, {"q": 1}) as second:
        for n in range(2):
            await first.jobs.enqueue("one", {"n": n})
        # Each has a run, and no free slot: the change applies to its end nevertheless.
        await until(lambda: _all_busy(first, second))
        await first.limits.set_tasks({"one": {"retry_delay_s": 5_000}})
        for supervisor in (first, second):
            await supervisor.signals.retry_delays.wait_until(lambda delays: delays == {"one": 5_000})
        ends.set()
        await until(lambda: _ended(raw, 2))
        assert await delays() == [5_000]
        async with open_worker(tasks, {"other": 1}) as third:
            assert third.signals.retry_delays.last == {"one": 5_000}, "it is known before the first claim"
            job = await third.jobs.enqueue("one", {}, queue="other")
            await until(lambda: _ended(raw, 3))
            assert await delays() == [5_000]
            await first.limits.set_tasks({"one": {"retry_delay_s": None}})
            await third.signals.retry_delays.wait_until(lambda delays: delays == {})
            await third.jobs.run_now(job.job_id)
            await until(lambda: _ended(raw, 4))
            assert await delays() == [5_000, 14_000], "the program's policy holds again"


async def _all_busy(*supervisors):
    return all(queue.running == 1 for one in supervisors for queue in one.state.queues.values())


async def _ended(raw, times):
    return await raw.fetchval("SELECT count(*) FROM dl_job_events WHERE kind = 'requeue'") == times


async def _knowing(supervisor):
    """Return the queues whose claims take jobs of the task now."""
    newest = {known.queue: known.tasks for known in supervisor.signals.known_tasks.values}
    return sorted(queue for queue, tasks in newest.items() if "one" in tasks)

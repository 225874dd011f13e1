"""One lock_key, one running job, in whole processes (Q7).

No poll, no sweep: the keys must be passed on without them.
"""

from __future__ import annotations

import pytest
import trio
from conditions import patience_s, when_ended

from dataloader import Tasks
from dataloader.jobs.model import NewJob

SECOND_LOOK = "SELECT array_agg(k.h) INTO v_live"


@pytest.mark.requirement("Q7")
async def test_a_job_that_was_parked_while_its_key_came_free_is_looked_at_again(open_worker, raw):
    tasks = Tasks()

    @tasks.task("t")
    async def t(job):
        pass

    source = await raw.fetchval("SELECT pg_get_functiondef('dl_claim_known'::regproc)")
    assert source.count(SECOND_LOOK) == 1
    # Claims stop between their attempt to take the key and their second check.
    barrier = "PERFORM pg_advisory_xact_lock_shared(4711, 4711);"
    await raw.execute(source.replace(SECOND_LOOK, f"{barrier} {SECOND_LOOK}"))
    await raw.execute("SELECT pg_advisory_lock(4711, 4711), pg_advisory_lock(hashtext('k'))")
    async with open_worker(tasks) as supervisor:
        with trio.fail_after(patience_s()):
            job = await supervisor.jobs.enqueue("t", queue="q", lock_key="k")
            blocked = "SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted AND objsubid = 2)"
            while not await raw.fetchval(blocked):  # noqa: ASYNC110 - the database has no event
                await trio.sleep(0.01)
            # The holder, another service, releases it without a wake-up, and the park is not committed yet.
            await raw.execute("SELECT pg_advisory_unlock(hashtext('k'))")
            await raw.execute("SELECT pg_advisory_unlock(4711, 4711)")
            assert (await when_ended(supervisor, job.job_id)).status == "succeeded"
        assert await raw.fetchval("SELECT count(*) FROM dl_job_events WHERE payload ->> 'reason' = 'lock_key'") == 1


@pytest.mark.slow
@pytest.mark.requirement("Q7")
async def test_jobs_of_few_keys_in_two_processes_run_one_by_one_and_none_is_forgotten(open_worker, raw):
    tasks, running, most = Tasks(), [], 0

    @tasks.task("t")
    async def t(job):
        nonlocal most
        assert job.lock_key not in running
        running.append(job.lock_key)
        most = max(most, len(running))
        await trio.sleep(0.002)
        running.remove(job.lock_key)

    async with open_worker(tasks, {"q": 8}) as one, open_worker(tasks, {"q": 8}) as other:
        jobs = [NewJob(queue="q", task="t", lock_key=f"k{n % 5}") for n in range(200)]
        with trio.fail_after(patience_s()):
            await one.jobs.enqueue_many(jobs[:100])
            await other.jobs.enqueue_many(jobs[100:])
            for job in jobs:
                assert (await when_ended(one, job.job_id)).status == "succeeded"
        workers = await raw.fetchval(
            "SELECT count(DISTINCT payload ->> 'worker') FROM dl_job_events WHERE kind = 'picked'"
        )
    assert workers == 2
    assert 1 < most <= 5
    assert await raw.fetchval("SELECT max(attempt) FROM dl_jobs") == 1

"""Programs with different tasks on one queue: none delays the jobs of another (Q6, Q14)."""

from __future__ import annotations

import pytest
import trio
import trio.lowlevel
from conditions import patience_s, until, when_ended

from dataloader import Settings, Tasks, Worker, open_supervisor
from dataloader.actors.claim_cursor import ClaimCursor
from dataloader.store.limits.unknown_blocks import LEAST

ADD = """
INSERT INTO dl_jobs (job_id, queue, task, lock_key, keyed, priority)
SELECT gen_random_uuid(), 'q', $1, n::text, false, $3 FROM generate_series(1, $2::int) AS n
"""


def tasks_named(*names, handler=None):
    tasks = Tasks()
    for name in names:

        @tasks.task(name, queue="q")
        async def run(job):
            if handler is not None:
                await handler(job)
            return job.task

    return tasks


@pytest.mark.slow
@pytest.mark.requirement("Q6")
async def test_a_task_that_becomes_known_between_two_claims_is_looked_for_from_the_front(open_worker, raw, monkeypatch):
    # No claim starts from the front again, as if many jobs there made it slow.
    monkeypatch.setattr(ClaimCursor, "_pause_s", 3_600.0)
    running, may_end, ran = [], trio.Event(), trio.Event()

    async def wait(job):
        running.append(job)
        await may_end.wait()

    async def note(job):
        ran.set()

    async def all_slots_are_taken():
        return len(running) == 4

    await raw.execute(ADD, "new", 1, 0)
    await raw.execute(ADD, "old", 20, 100)
    async with open_worker(tasks_named("old", handler=wait)) as supervisor:
        await until(all_slots_are_taken)
        await supervisor.add_tasks(tasks_named("new", handler=note))
        may_end.set()
        with trio.fail_after(patience_s()):
            await ran.wait()
    first_with_it = next(claim for claim in supervisor.signals.claimed.values if "new" in claim.tasks)
    assert first_with_it.after is None


@pytest.mark.slow
@pytest.mark.requirement("Q6", "Q14")
async def test_jobs_of_two_programs_on_one_queue_start_by_their_notification(open_worker, raw):
    """Polls and sweeps are an hour apart, so a job that one program delayed would not start in this test."""
    async with open_worker(tasks_named("a.work")) as first, open_worker(tasks_named("b.work")):
        for _ in range(10):
            for task in ("a.work", "b.work"):
                added = await first.jobs.enqueue(task, queue="q")
                ended = await when_ended(first, added.job_id)
                assert (ended.status, ended.result) == ("succeeded", task)
    reasons = "SELECT count(*) FROM dl_job_events WHERE kind = 'requeue'"
    assert await raw.fetchval(reasons) == 0


BLOCK = 60_000
READY = "SELECT count(*) FROM dl_jobs WHERE task = $1 AND status = 'queued' AND waits_for IS NULL"


@pytest.mark.full
@pytest.mark.requirement("Q6", "Q14")
async def test_jobs_behind_a_block_of_unknown_jobs_start_and_others_get_the_block(open_worker, raw):
    ran = []

    async def note(job):
        ran.append(job.task)

    async def block_is_moved():
        return await raw.fetchval(READY, "theirs") < LEAST

    async def theirs_run():
        return "theirs" in ran

    await raw.execute("SET session_replication_role = replica")
    await raw.execute(ADD, "theirs", BLOCK, 1)
    await raw.execute("SET session_replication_role = origin")
    await raw.execute("VACUUM ANALYZE dl_jobs")
    async with open_worker(tasks_named("ours", handler=note)) as ours:
        while not await block_is_moved():
            # Each starts by its notification: polls and sweeps are an hour apart.
            added = await ours.jobs.enqueue("ours", queue="q")
            assert (await when_ended(ours, added.job_id)).status == "succeeded"
        assert await raw.fetchval("SELECT count(*) FROM dl_jobs WHERE lane = 'theirs'") > BLOCK - LEAST
        async with open_worker(tasks_named("theirs", handler=note)):
            await until(theirs_run)


@pytest.mark.slow
@pytest.mark.requirement("S1")
@pytest.mark.parametrize("writer", ["a client", "a restore without triggers"])
async def test_a_job_in_the_lane_of_another_task_stops_no_queue(open_worker, raw, writer):
    tasks = Tasks()

    @tasks.task("limited", queue="q", max_running=1)
    async def limited(_job): ...

    async with open_worker(tasks) as supervisor:
        if writer != "a client":
            await raw.execute("SET session_replication_role = replica")
        await raw.execute(
            "INSERT INTO dl_jobs (job_id, queue, task, lock_key, keyed, lane, waits_for)"
            " SELECT gen_random_uuid(), 'q', 'nope', n::text, false, 'limited', 'limit'"
            " FROM generate_series(1, 20) AS n"
        )
        await raw.execute("RESET session_replication_role; NOTIFY dl_lane, 'limited'")
        job = await supervisor.jobs.enqueue("limited")
        await when_ended(supervisor, job.job_id)
        plain = "SELECT count(*) = 20 FROM dl_jobs WHERE task = 'nope' AND status = 'queued' AND lane IS NULL"
        await until(lambda: raw.fetchval(plain))
        assert (await supervisor.jobs.get(job.job_id)).status == "succeeded"


@pytest.mark.slow
@pytest.mark.requirement("S1")
@pytest.mark.parametrize("task", ["other", "nope"])
async def test_a_job_in_the_wrong_limit_queue_frees_the_slot_that_it_took(database, raw, task):
    """The process has two entries for the queue, each with its own slots."""
    tasks = Tasks()

    @tasks.task("one", queue="q")
    async def one(_job): ...

    @tasks.task("other", queue="q")
    async def other(_job): ...

    settings = Settings(db_dsn=database.dsn, workers=(Worker("q", 1, ("one",)), Worker("q", 1, ("other",))))
    with trio.fail_after(60):
        async with open_supervisor(settings, tasks) as supervisor:
            await supervisor.jobs.wait((await supervisor.jobs.enqueue("one")).job_id)
            await raw.execute(
                "SET session_replication_role = replica;"
                "INSERT INTO dl_jobs (job_id, queue, task, lock_key, keyed, lane, waits_for)"
                f" SELECT gen_random_uuid(), 'q', '{task}', n::text, false, 'one', 'limit'"
                " FROM generate_series(1, 3) n;"
                "RESET session_replication_role; NOTIFY dl_lane, 'one'"
            )
            left = "SELECT count(*) = 0 FROM dl_jobs WHERE lane = 'one' AND task <> 'one'"
            await until(lambda: raw.fetchval(left))
            for name in ("one", "other"):
                job = await supervisor.jobs.enqueue(name)
                assert (await supervisor.jobs.wait(job.job_id)).status == "succeeded"

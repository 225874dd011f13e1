"""Reasons why a job does not run: each cause is created, and the sentence is true for it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from databases import raw_connection
from performers import performer_of

from dataloader import NewJob, RateLimit, Supplier, Tasks
from dataloader.jobs.client.limits import Limits
from dataloader.jobs.contract import Operator
from dataloader.jobs.errors import JobNotFound
from dataloader.jobs.states import Step
from dataloader.store.limits.limit_rows import aio_declare_limits, aio_known
from dataloader.store.queue import control
from dataloader.store.queue.enqueue import enqueue
from dataloader.store.queue.enqueuer import Enqueuer
from dataloader.store.queue.lock_session import LockSession
from dataloader.store.queue.task_rows import aio_declare
from dataloader.store.queue.why import why_waits
from dataloader.store.queue.worker_rows import WorkerRow, aio_show

pytestmark = pytest.mark.requirement("Q3", "E11")
ME = Operator("me")


@pytest.fixture
async def serve(store):
    """Return a function that registers a worker of the queue q with `slots` slots."""

    async def serve(slots=4, tasks=("t",), name="w1", only=None):
        await store.write(aio_show, WorkerRow(name, "h", 1, "1", {"q": slots}, tasks, {"q": only} if only else {}))

    await serve()
    return serve


@pytest.fixture
def add(store):
    """Return a function that adds a job of t to q, and returns its ID."""

    async def add(**options):
        [one] = await enqueue(store, [NewJob(task="t", queue="q", **options)])
        return one.job_id

    return add


@pytest.fixture
async def declare(store):
    """Return a function that declares t with limits; it returns a function that claims like a dispatcher."""
    sessions = []

    async def declare(**limits):
        tasks = Tasks()
        tasks.task("t", queue="q", **limits)(print)
        await store.write(aio_declare, tasks.values(), "test")
        await store.write(aio_declare_limits, tasks.values(), tasks.suppliers)

        async def claim():
            session = LockSession(store, f"w{len(sessions)}", lost=lambda _tokens: None)
            sessions.append(session)
            _, lanes, _ = await store.run(aio_known, ("t",))
            return (await session.claim("q", 10, ("t",), 30, limited=lanes, lanes=lanes)).jobs

        return claim

    yield declare
    for session in sessions:
        await session.close()


async def test_it_is_not_due(store, serve, add, raw):
    reason = await why_waits(store, later := await add(available_at=_instant("2099-01-01T00:00:00Z")))
    assert (reason.cause, reason.text) == ("time", "It is not due until 2099-01-01 00:00:00Z.")
    assert reason.until == _instant("2099-01-01T00:00:00Z")
    await raw.execute("UPDATE dl_jobs SET error = 'no', attempt = 2 WHERE job_id = $1", later)
    reason = await why_waits(store, later)
    assert reason.text == "It failed, and attempt 3 of 5 is delayed until 2099-01-01 00:00:00Z."
    await control.pause(store, "q", ME)
    assert "paused" in (await why_waits(store, later)).also[0]


def _instant(text):
    return datetime.fromisoformat(text)


async def test_a_job_of_its_key_runs_and_it_has_a_place_in_the_line(store, serve, add, start_worker):
    worker = start_worker("host-b:1")
    first = await add(lock_key="k")
    [held] = await worker.claim()
    second, third = await add(lock_key="k"), await add(lock_key="k")
    assert await worker.claim() == []
    reason = await why_waits(store, third)
    assert (reason.cause, reason.jobs, reason.ahead) == ("key", [first], 1)
    assert reason.text.startswith(f"Its lock_key is held by job {first} on host-b:1 since ")
    assert reason.text.endswith("; 1 job is ahead.")
    assert reason.since is not None
    assert (await why_waits(store, second)).text.endswith("; it is next.")
    running = await why_waits(store, first)
    assert (running.cause, running.text[:26]) == ("running", "It is running on host-b:1 ")
    await worker.end(held)


@pytest.mark.slow
async def test_a_foreign_session_has_its_key_locked(store, serve, add, database, start_worker):
    # With both signs: the lock's number is stored in two halves.
    for key in ("k", "other", "third", "fourth"):
        async with raw_connection(database.dsn) as foreign:
            await foreign.execute("SET application_name = 'nightly psql'")
            assert await foreign.fetchval("SELECT pg_try_advisory_lock(hashtext($1))", key)
            job_id = await add(lock_key=key)
            assert await start_worker(f"w {key}").claim() == []
            reason = await why_waits(store, job_id)
            pid = await foreign.fetchval("SELECT pg_backend_pid()")
        assert (reason.cause, reason.session.pid, reason.session.application) == ("foreign_lock", pid, "nightly psql")
        assert f"the database session {pid} (application nightly psql, role postgres" in reason.text
    reason = await why_waits(store, job_id)
    assert (reason.cause, reason.ahead) == ("key_free", 0)


async def test_its_queue_is_paused_or_has_no_worker_or_none_that_knows_its_task(store, serve, add, raw):
    job_id = await add()
    assert (await why_waits(store, job_id)).cause == "next"
    await control.pause(store, "q", ME)
    reason = await why_waits(store, job_id)
    assert (reason.cause, reason.text[:28]) == ("queue_paused", "The queue q has been paused ")
    await control.resume(store, "q", ME)
    await serve(tasks=("u",))
    reason = await why_waits(store, job_id)
    assert (reason.cause, reason.text) == ("unknown_task", "No running worker of the queue q has the task t.")
    await raw.execute("UPDATE dl_workers SET seen_at = now() - interval '2 min'")
    reason = await why_waits(store, job_id)
    assert (reason.cause, reason.text) == ("no_worker", "No worker serves the queue q.")


async def test_its_task_was_unknown_to_the_claim_that_met_it(store, serve, add, start_worker):
    job_id = await add()
    assert await start_worker("w1").claim(tasks=("u",)) == []
    await serve(tasks=("u",))
    assert (await why_waits(store, job_id)).cause == "unknown_task"
    await serve(tasks=("t",))
    assert (await why_waits(store, job_id)).cause == "next"


async def test_all_slots_are_taken_and_so_many_come_before_it(store, serve, add, start_worker):
    await serve(slots=1)
    worker = start_worker("w1")
    await add()
    assert len(await worker.claim(limit=1)) == 1
    await add()
    reason = await why_waits(store, await add())
    assert (reason.cause, reason.ahead) == ("slots", 1)
    assert reason.text == "All 1 slots of the queue q are in use; 1 job is ahead."


async def test_workers_that_take_other_tasks_of_its_queue_alone_have_no_slot_for_it(store, serve, add, start_worker):
    await serve(tasks=("t", "other"), only=["other"])
    first, second = await add(), await add()
    reason = await why_waits(store, second)
    assert (reason.cause, reason.text) == ("no_worker", "No worker of the queue q claims jobs of the task t.")
    await serve(slots=1, name="w2", tasks=("t", "other"), only=["t"])
    assert [job.job_id for job in await start_worker("w2").claim(limit=1)] == [first]
    reason = await why_waits(store, second)
    assert (reason.cause, reason.text) == ("slots", "All 1 slots of the queue q are in use; it is next.")


async def test_it_runs_after_jobs_that_have_not_ended(store, serve, add):
    others = [await add(), await add()]
    reason = await why_waits(store, last := await add(after=others))
    assert (reason.cause, set(reason.jobs)) == ("after", set(others))
    assert reason.text.startswith("It depends on 2 jobs that have not ended: ")
    await control.cancel(store, others[0], ME)
    assert (await why_waits(store, last)).jobs == others[1:]


async def test_its_task_or_the_tasks_supplier_is_paused(store, serve, add, declare):
    supplier = Supplier("ecb", rate_limits=[RateLimit(100, per_s=60)])
    await declare(supplier=supplier)
    job_id = await add()
    limits = Limits(performer_of(store, ME))
    assert (await why_waits(store, job_id)).cause == "next"
    await limits.pause_supplier("ecb")
    reason = await why_waits(store, job_id)
    assert (reason.cause, reason.text) == ("supplier_paused", "The supplier ecb is paused; it is next.")
    await limits.pause_task("t")
    reason = await why_waits(store, job_id)
    assert (reason.cause, reason.text) == ("task_paused", "The task t is paused; it is next.")


async def test_a_paused_task_without_limits_keeps_its_ready_jobs(store, serve, add, declare):
    await declare()
    job_id = await add()
    await Limits(performer_of(store, ME)).pause_task("t")
    assert (await why_waits(store, job_id)).cause == "task_paused"


def _closed_now():
    """Return a minute of the week that is open, and is neither now nor soon."""
    there = datetime.now(UTC) + timedelta(days=3)
    return f"{there:%a} 00:00-00:01".upper()


async def test_no_work_period_is_open_of_its_task_or_of_its_supplier(store, serve, add, declare):
    await declare(work_periods=[_closed_now()])
    reason = await why_waits(store, job_id := await add())
    assert (reason.cause, reason.until is not None) == ("period", True)
    assert reason.text.startswith("The task t is outside its work periods until 20")
    await declare(supplier=Supplier("ecb", work_periods=[_closed_now()]))
    reason = await why_waits(store, job_id)
    assert (reason.cause, reason.until is not None) == ("supplier_period", True)


async def test_as_many_run_as_may_or_the_batch_is_full_or_a_rate_limit_is_used(store, serve, add, declare):
    claim = await declare(max_running=1)
    for _ in range(3):
        job_id = await add()
    assert len(await claim()) == 1
    reason = await why_waits(store, job_id)
    assert (reason.cause, reason.ahead) == ("max_running", 1)
    assert "has reached its concurrency limit, 1; 1 job is ahead" in reason.text

    claim = await declare(batch_size=1)
    reason = await why_waits(store, job_id)
    assert (reason.cause, "starts when its jobs have ended" in reason.text) == ("batch", True)

    claim = await declare(supplier=Supplier("ecb", rate_limits=[RateLimit(1, per_s=3_600)]))
    assert len(await claim()) == 1
    reason = await why_waits(store, job_id)
    assert (reason.cause, reason.until is not None, reason.ahead) == ("budget", True, 0)
    assert reason.text.startswith("A rate limit of the supplier ecb is used up until 20")


async def test_its_partition_has_reached_its_concurrency_limit(store, serve, add, declare):
    claim = await declare(max_running_per_partition=1)
    _, second_a, _, _ = [await add(partition_key=key) for key in ("a", "a", "b", "c")]
    assert len(await claim()) == 3
    reason = await why_waits(store, second_a)
    assert (reason.cause, reason.ahead) == ("partition", 0)
    text = "Its partition_key has reached the concurrency limit of the task t, 1; in its partition, it is next."
    assert reason.text == text
    assert "in its partition, 1 job is ahead" in (await why_waits(store, await add(partition_key="a"))).text
    assert (await why_waits(store, await add(partition_key="d"))).cause == "next"


async def test_a_newer_job_of_its_unique_key_has_taken_its_place(store, serve, start_worker):
    tasks = Tasks()
    tasks.task("t", queue="q", unique=("id",), duplicates="update")(print)
    await store.run(aio_declare, tasks.values(), "w")
    enqueuer = Enqueuer(store)
    [old] = await enqueuer.enqueue([NewJob(task="t", args={"id": 1})])
    worker = start_worker("w1")
    [claimed] = await worker.claim()
    [new] = await enqueuer.enqueue([NewJob(task="t", args={"id": 1, "more": 2})])
    assert await worker.claim() == []
    reason = await why_waits(store, new.job_id)
    assert (reason.cause, reason.jobs) == ("key", [old.job_id])
    assert "which it supersedes" in reason.text
    await control.cancel(store, old.job_id, ME)
    await worker.end(claimed, Step.CANCEL)
    reason = await why_waits(store, old.job_id)
    assert (reason.cause, reason.jobs) == ("superseded", [new.job_id])


async def test_an_ended_orphaned_or_canceling_job_gives_that_as_its_reason(store, serve, add, raw):
    job_id = await add()
    await raw.execute("UPDATE dl_jobs SET cancel_requested = true WHERE job_id = $1", job_id)
    assert (await why_waits(store, job_id)).cause == "canceling"
    await raw.execute(
        "UPDATE dl_jobs SET status = 'running', lease_expires_at = now() - interval '1 s' WHERE job_id = $1", job_id
    )
    assert (await why_waits(store, job_id)).cause == "lease_ended"
    await raw.execute("UPDATE dl_jobs SET status = 'failed', finished_at = now() WHERE job_id = $1", job_id)
    reason = await why_waits(store, job_id)
    assert (reason.cause, reason.text.endswith(": failed.")) == ("ended", True)
    with pytest.raises(JobNotFound):
        await why_waits(store, UUID(int=1))


@pytest.mark.slow
async def test_of_very_many_before_it_only_so_many_are_counted(store, serve, raw, add):
    await raw.execute(
        "INSERT INTO dl_jobs (job_id, queue, task, lock_key, keyed) SELECT gen_random_uuid(), 'q', 't', 'k' || i, false"
        " FROM generate_series(1, 10100) AS i"
    )
    reason = await why_waits(store, await add())
    assert (reason.ahead, "10,000 or more jobs are ahead" in reason.text) == (10_000, True)

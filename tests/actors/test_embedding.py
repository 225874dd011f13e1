"""Supervisor inside another program, with or without an asyncio loop."""

from __future__ import annotations

import asyncio

import attrs
import pytest
import trio
import trio.testing
import trio_asyncio
from conditions import patience_s, until, when_ended
from databases import raw_connection

from dataloader import NewJob, Tasks
from dataloader.jobs.ids import uuid7


def greeting_tasks():
    tasks = Tasks()

    @tasks.task("greet")
    async def greet(job):
        async with job.transaction() as transaction:
            transaction.result = (await transaction.fetch("SELECT 'hello' AS said"))[0]["said"]

    return tasks


@pytest.mark.slow
@pytest.mark.requirement("Q12")
async def test_it_lives_beside_the_hosts_own_asyncio_loop(open_worker):
    async with trio_asyncio.open_loop(), open_worker(greeting_tasks()) as supervisor:
        job = await supervisor.jobs.enqueue("greet", queue="q")
        # The host's loop is unchanged, during and after this.
        assert await trio_asyncio.aio_as_trio(asyncio.sleep)(0, "ours") == "ours"
        done = await when_ended(supervisor, job.job_id)
        assert (done.status, done.result) == ("succeeded", "hello")
    async with open_worker(greeting_tasks()) as supervisor, trio_asyncio.open_loop():
        job = await supervisor.jobs.enqueue("greet", queue="q")
        assert (await when_ended(supervisor, job.job_id)).result == "hello"
        assert await trio_asyncio.aio_as_trio(asyncio.sleep)(0, "ours") == "ours"


@pytest.mark.requirement("Q2")
async def test_enqueue_by_a_known_id_adds_no_job_and_reports_jobs_without_a_worker(open_worker, raw):
    async with open_worker(greeting_tasks()) as supervisor:
        new = NewJob(queue="q", task="greet")
        [first], [second] = [await supervisor.jobs.enqueue_many([new]) for _ in range(2)]
        assert (first.created, second.created, second.job_id) == (True, False, new.job_id)
        # The same answers as by HTTP and by the command line.
        names = (("nobody serves it", "greet"), ("q", "greet"), ("q", "geret"))
        other = [NewJob(queue=queue, task=task) for queue, task in names]

        async def states():
            again = [attrs.evolve(job, job_id=uuid7()) for job in other]
            return [added.queue_state for added in await supervisor.jobs.enqueue_many(again)]

        # Each is None where the database has not answered within half a second.
        await until(states, lambda states: states == ["no_worker", None, "unknown_task"])
        assert (await when_ended(supervisor, new.job_id)).status == "succeeded"
        assert [added.created for added in await supervisor.jobs.enqueue_many([new])] == [False]
    assert await raw.fetchval("SELECT count(*) FROM dl_jobs WHERE job_id = $1", new.job_id) == 1


@pytest.mark.requirement("Q2")
async def test_a_host_that_is_cancelled_while_its_jobs_are_added_gets_their_ids(
    open_worker, settled, raw, database, monkeypatch
):
    inserts = (
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%INSERT INTO dl_jobs%'"
    )
    added, scopes = [], []
    async with (
        raw_connection(database.dsn) as other,
        open_worker(greeting_tasks(), {"elsewhere": 1}, pool_size=6) as supervisor,
        trio.open_nursery() as nursery,
    ):

        async def trigger(*, task_status=trio.TASK_STATUS_IGNORED):
            with trio.CancelScope() as scope:
                scopes.append(scope)
                task_status.started()
                added.append((await supervisor.jobs.enqueue("greet", queue="q")).job_id)
            assert not scope.cancelled_caught

        async def cancel_all():
            await until(lambda: raw.fetchval(inserts))
            await trio.testing.wait_all_tasks_blocked()
            while scopes:
                scopes.pop().cancel()
            await other.execute("COMMIT")

        await settled(supervisor)
        await other.execute("BEGIN; LOCK TABLE dl_jobs")
        await nursery.start(trigger)
        await cancel_all()
        await until(lambda: raw.fetchval("SELECT count(*) = 1 FROM dl_jobs"))
        # Cancel while no read of the queues is due: a running statement, the first request of the next one, and one
        # that joins it.
        monkeypatch.setattr("dataloader.store.queue.queue_states.REMEMBERED_S", 3_600)
        await other.execute("BEGIN; LOCK TABLE dl_jobs")
        for _ in range(3):
            await nursery.start(trigger)
        await cancel_all()
        await until(lambda: raw.fetchval("SELECT count(*) = 4 FROM dl_jobs"))
    assert await raw.fetchval("SELECT array_agg(job_id ORDER BY job_id) FROM dl_jobs") == sorted(added)


async def test_a_host_that_is_cancelled_as_it_begins_leaves_none_behind(open_worker, raw):
    with trio.fail_after(patience_s()), trio.CancelScope() as scope:
        scope.cancel()
        async with open_worker(greeting_tasks()):
            raise AssertionError("it is cancelled before")
    assert scope.cancelled_caught
    assert await raw.fetchval("SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE '% locks'") == 0


async def test_it_is_used_from_tasks_that_were_born_outside_of_it(open_worker):
    asked, answered = trio.open_memory_channel(1)

    async def elsewhere():
        supervisor = await answered.receive()
        job = await supervisor.jobs.enqueue("greet", queue="q")
        assert (await when_ended(supervisor, job.job_id)).result == "hello"
        done.set()

    done = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(elsewhere)
        async with open_worker(greeting_tasks()) as supervisor:
            await asked.send(supervisor)
            await done.wait()


@pytest.mark.slow
async def test_two_supervisors_of_one_program_know_nothing_of_each_other(open_worker, row_of):
    async with open_worker(greeting_tasks(), {"a": 1}) as one:
        async with open_worker(greeting_tasks(), {"b": 1}) as other:
            assert one.worker != other.worker
            job = await other.jobs.enqueue("greet", queue="b")
            assert (await when_ended(one, job.job_id)).status == "succeeded"
        job = await one.jobs.enqueue("greet", queue="a")
        assert (await when_ended(one, job.job_id)).status == "succeeded"


async def test_it_leaves_no_connection_and_no_worker_behind(open_worker, raw):
    async with open_worker(greeting_tasks()) as supervisor:
        job = await supervisor.jobs.enqueue("greet", queue="q")
        await when_ended(supervisor, job.job_id)
    ours = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'dataloader%'"
    await until(lambda: raw.fetchval(ours), lambda count: count == 0)
    assert await raw.fetchval("SELECT count(*) FROM dl_workers") == 0


@pytest.mark.slow
@pytest.mark.requirement("Q12")
async def test_rows_and_success_commit_together_or_not_at_all(open_worker, raw):
    await raw.execute("CREATE TABLE target (n int)")
    tasks = Tasks()

    @tasks.task("fill", max_attempts=1)
    async def fill(job):
        async with job.transaction() as transaction:
            await transaction.executemany("INSERT INTO target VALUES ($1)", [(n,) for n in range(10)])
            if job.args["how"] == "raise":
                raise ValueError("half way")
            if job.args["how"] == "cancel":
                await raw.execute("UPDATE dl_jobs SET cancel_requested = true WHERE job_id = $1", job.job_id)
                await trio.sleep_forever()
            if job.args["how"] == "taken":
                # Another worker has claimed the job, after our reaper released it.
                await raw.execute("UPDATE dl_jobs SET token = token + 1 WHERE job_id = $1", job.job_id)
        if job.args["how"] == "raise after":
            raise ValueError("too late to matter")

    async def outcome(how):
        await raw.execute("TRUNCATE target")
        job = await supervisor.jobs.enqueue("fill", {"how": how}, queue="q")
        with trio.move_on_after(1 if how == "taken" else 10):
            await when_ended(supervisor, job.job_id)
        status = await raw.fetchval("SELECT status::text FROM dl_jobs WHERE job_id = $1", job.job_id)
        return status, await raw.fetchval("SELECT count(*) FROM target")

    async with open_worker(tasks) as supervisor:
        assert await outcome("end") == ("succeeded", 10)
        assert await outcome("raise") == ("failed", 0)
        assert await outcome("cancel") == ("canceled", 0)
        assert await outcome("taken") == ("running", 0)
        assert await outcome("raise after") == ("succeeded", 10)

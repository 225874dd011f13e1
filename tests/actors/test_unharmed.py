"""One job, one row or one late message does not harm the other jobs (Q7, Q8, Q9)."""

from __future__ import annotations

import child_tasks
import pytest
import trio
from conditions import patience_s, until, when_ended

from dataloader import BadRequest, GiveUp, LeaseLost, RetryPolicy, Tasks
from dataloader.actors import handler_call
from dataloader.store.queue import control
from dataloader.store.queue.notifications import CancelRequested


@pytest.fixture
def add_foreign(raw):
    """Return a function that adds a job of the task `quick` like another service, with args as SQL.

    It returns the ID.
    """

    async def add_foreign(args):
        return await raw.fetchval(
            "INSERT INTO dl_jobs (job_id, queue, task, lock_key, max_attempts, args)"
            f" VALUES (gen_random_uuid(), 'q', 'quick', 'k', 5, {args}) RETURNING job_id"
        )

    return add_foreign


@pytest.mark.requirement("Q11")
async def test_a_plain_function_logs_while_the_recorder_is_idle(open_worker, raw):
    tasks = Tasks()

    @tasks.task("talks")
    def talks(job):
        job.log.info("from a thread", n=1)
        return "said"

    async with open_worker(tasks) as supervisor:
        for _ in range(3):
            job = await supervisor.jobs.enqueue("talks", queue="q")
            ended = await when_ended(supervisor, job.job_id)
            assert (ended.status, ended.result) == ("succeeded", "said")
            lines = await raw.fetch("SELECT payload FROM dl_job_events WHERE job_id = $1 AND kind = 'log'", job.job_id)
            assert ["from a thread" in line["payload"] for line in lines] == [True]


@pytest.mark.slow
@pytest.mark.requirement("Q1")
async def test_oversized_args_fail_only_their_own_job_without_a_retry(open_worker, add_foreign, row_of):
    tasks = Tasks()

    @tasks.task("quick")
    async def quick(job):
        pass

    too_long = await add_foreign("jsonb_build_object('a', repeat('x', 17000000))")
    beside = await add_foreign("'{}'")
    async with open_worker(tasks) as supervisor:
        failed = await when_ended(supervisor, too_long)
        assert (failed.status, failed.attempt) == ("failed", 1)
        assert failed.error.startswith("args: must have at most 16,777,216 bytes")
        assert (await when_ended(supervisor, beside)).status == "succeeded"


@pytest.mark.slow
@pytest.mark.requirement("Q9")
@pytest.mark.parametrize("process", [False, True])
async def test_args_with_too_many_values_fail_their_job_undecoded(open_worker, add_foreign, monkeypatch, process):
    tasks, decoded = Tasks(), []
    tasks.task("quick", process=process)(child_tasks.who.handler)
    monkeypatch.setattr(handler_call, "args_of", lambda *given: decoded.append(given))
    job_id = await add_foreign("('{\"a\":[' || repeat('[],', 50000) || '[]]}')::jsonb")
    async with open_worker(tasks) as supervisor:
        failed = await when_ended(supervisor, job_id)
        assert (failed.status, failed.attempt) == ("failed", 1)
        assert failed.error.startswith("args: must have at most 100,000 values")
        with pytest.raises(BadRequest, match=r"^args: must have at most 100,000 values"):
            await supervisor.jobs.enqueue("quick", {"a": [[]] * 50_001}, queue="q")
        # Commas in strings do not count.
        assert (await supervisor.jobs.enqueue("quick", {"a": "[]," * 50_001}, queue="other")).created
    assert decoded == []


@pytest.mark.slow
@pytest.mark.requirement("Q9")
@pytest.mark.parametrize("process", [False, True])
async def test_args_that_are_nested_too_deeply_fail_their_job_without_a_retry(open_worker, add_foreign, process):
    tasks = Tasks()
    tasks.task("quick", process=process)(child_tasks.who.handler)
    job_id = await add_foreign("jsonb_build_object('a', (repeat('[', 1500) || repeat(']', 1500))::jsonb)")
    async with open_worker(tasks) as supervisor:
        failed = await when_ended(supervisor, job_id)
    assert (failed.status, failed.attempt) == ("failed", 1)
    assert failed.error.startswith("args: is nested too deeply")


@pytest.mark.slow
@pytest.mark.requirement("Q9")
async def test_a_reason_that_is_no_text_ends_this_job_and_no_other(open_worker, row_of):
    tasks, release = Tasks(), trio.Event()

    @tasks.task("odd")
    async def odd(job):
        return GiveUp(ValueError("no text"))

    @tasks.task("neighbour")
    async def neighbour(job):
        await release.wait()

    async with open_worker(tasks) as supervisor:
        beside = await supervisor.jobs.enqueue("neighbour", queue="q")
        job = await supervisor.jobs.enqueue("odd", queue="q")
        await until(lambda: row_of(job.job_id), lambda row: row["status"] == "failed")
        release.set()
        assert (await when_ended(supervisor, beside.job_id)).status == "succeeded"


@pytest.mark.requirement("Q9")
def test_a_value_that_is_no_exception_type_is_refused_as_final():
    with pytest.raises(ValueError, match=r"must be exception types, for example .*, not 'ValueError'"):
        RetryPolicy(final=("ValueError",))
    assert RetryPolicy(final=[KeyError]).is_final(KeyError())


@pytest.mark.slow
@pytest.mark.requirement("Q4")
async def test_a_cancel_of_an_earlier_run_does_not_stop_the_next(open_worker, raw):
    tasks, gate = Tasks(), trio.Event()

    @tasks.task("t")
    async def handler(job):
        await gate.wait()
        return "whole"

    async with open_worker(tasks) as supervisor:
        job = await supervisor.jobs.enqueue("t", queue="q", available_at=None)
        await until(lambda: raw.fetchval("SELECT status FROM dl_jobs"), lambda status: status == "running")
        await control.cancel(supervisor.database, job.job_id, control.Operator("test", None))
        assert (await when_ended(supervisor, job.job_id)).status == "canceled"
        # The cancel is notified again, late, as it is to every process that never ran the job.
        await supervisor.signals.recorded.wait()
        token = await raw.fetchval("SELECT token FROM dl_jobs")
        notified = supervisor.signals.notified
        known = notified.count
        await raw.execute("SELECT pg_notify('dl_changed', $1::text)", str(job.job_id))
        await raw.execute("SELECT pg_notify('dl_stop', $1::text)", str(token))
        await notified.wait_until(lambda last: last == CancelRequested(token) and notified.count > known)
        await control.retry(supervisor.database, job.job_id, control.Operator("test", None))
        await until(lambda: raw.fetchval("SELECT status FROM dl_jobs"), lambda status: status == "running")
        gate.set()
        ended = await when_ended(supervisor, job.job_id)
        assert (ended.status, ended.result) == ("succeeded", "whole")


@pytest.mark.full
@pytest.mark.requirement("Q8")
async def test_a_lock_on_the_worker_s_own_row_costs_no_lease(open_worker, raw, row_of):
    tasks = Tasks()

    @tasks.task("t", lease_ttl_sec=3)
    async def handler(job):
        await trio.sleep(4.5)
        return "whole"

    async with open_worker(tasks, heartbeat_s=0.5) as supervisor:
        await until(lambda: raw.fetchval("SELECT count(*) FROM dl_workers"), lambda count: count == 1)
        await raw.execute("BEGIN")
        await raw.execute("SELECT FROM dl_workers FOR UPDATE")
        job = await supervisor.jobs.enqueue("t", queue="q")
        with trio.fail_after(patience_s()):
            ended = await when_ended(supervisor, job.job_id)
        await raw.execute("ROLLBACK")
    assert (ended.status, ended.result, ended.attempt) == ("succeeded", "whole", 1)


@pytest.mark.slow
@pytest.mark.requirement("Q12")
async def test_a_handler_is_not_stopped_as_lost_after_its_transaction(open_worker, raw, row_of):
    """A second transaction, which could not be one with the success any more, does not begin either."""
    tasks, refused, went_on = Tasks(), [], []

    async def one_more(job):
        try:
            async with job.transaction() as transaction:
                transaction.result = "undone"
        except (RuntimeError, LeaseLost) as error:
            refused.append(str(error))

    @tasks.task("t", lease_ttl_sec=3)
    async def handler(job):
        async with job.transaction() as transaction:
            await one_more(job)
            transaction.result = "committed"
        await one_more(job)
        await trio.sleep(4)
        went_on.append(True)

    async with open_worker(tasks, heartbeat_s=0.5) as supervisor:
        job = await supervisor.jobs.enqueue("t", queue="q")
        await until(lambda: row_of(job.job_id), lambda _: bool(went_on))
        assert (await when_ended(supervisor, job.job_id, within_s=5)).result == "committed"
        report = await supervisor.drain()
    assert (report.finished, report.is_clean) == (0, True)
    counted = "SELECT outcome, runs FROM dl_run_stats_new UNION ALL SELECT outcome, runs FROM dl_run_stats"
    assert [tuple(row) for row in await raw.fetch(counted)] == [("succeeded", 1)]
    inside, after = refused
    assert "already has an open transaction" in inside
    assert "has already succeeded with its transaction" in after


@pytest.mark.slow
@pytest.mark.requirement("Q2")
async def test_a_locked_due_job_causes_no_busy_polling(open_worker, raw):
    tasks = Tasks()
    asked = 0

    @tasks.task("t")
    async def handler(job):
        return None

    async with open_worker(tasks) as supervisor:
        await raw.execute(
            "INSERT INTO dl_jobs (job_id, queue, task, lock_key, available_at)"
            " VALUES (gen_random_uuid(), 'q', 't', 'k', now() + interval '1 second')"
        )
        await raw.execute("BEGIN")
        await raw.execute("SELECT FROM dl_jobs FOR UPDATE")
        write = supervisor.database.write

        async def count(operation, *args):
            nonlocal asked
            asked += operation.__name__ == "_aio_ready_due"
            return await write(operation, *args)

        supervisor.database.write = count
        await trio.sleep(2.5)
        await raw.execute("ROLLBACK")
        await until(lambda: raw.fetchval("SELECT status FROM dl_jobs"), lambda status: status == "succeeded")
    assert 1 <= asked < 10

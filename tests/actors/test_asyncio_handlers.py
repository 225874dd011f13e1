"""asyncio functions as handlers (`asyncio=True`): stopped like others, they end only when all their tasks have."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import time

import pytest
import trio
from conditions import patience_s, until
from logged import capture_logs

from dataloader import AioJob, Job, Snooze, Tasks, ThreadJob
from dataloader.actors.aio_loop import open_aio_loop
from dataloader.actors.aio_port import AioRunPort
from dataloader.testing import run_task


def asyncio_tasks(**options) -> tuple[Tasks, dict]:
    """Return a registry with one task, `it`, that waits; and the events that it sets."""
    tasks, told = Tasks(), {"started": trio.Event(), "ended": trio.Event()}

    @tasks.task("it", asyncio=True, **options)
    async def it(job: AioJob) -> str:
        told["job"], told["loop"] = job, asyncio.get_running_loop()
        told["child"] = asyncio.create_task(asyncio.sleep(3_600))
        told["started"].set()
        try:
            await asyncio.sleep(3_600)
        except asyncio.CancelledError:
            told["stopped_by"] = job.stopped_by
            job.progress_nowait({"last": "word"})
            raise
        finally:
            told["ended"].set()
        return "slept"

    return tasks, told


async def test_it_does_all_that_a_trio_handler_does():
    tasks = Tasks()

    @tasks.task("it", asyncio=True)
    async def it(job: AioJob) -> list[int]:
        await job.progress({"n": 1})
        job.log.info("hello", loop=type(asyncio.get_running_loop()).__name__)
        await job.checkpoint()
        return await asyncio.gather(*(asyncio.sleep(0.001, n) for n in range(job.args["to"])))

    @tasks.task("later", asyncio=True)
    async def later(job: AioJob) -> Snooze:
        return Snooze(5)

    run = await run_task(tasks, "it", {"to": 3})
    assert (run.status, run.result, run.progress) == ("succeeded", [0, 1, 2], [{"n": 1}])
    assert [line.message for line in run.log] == ["hello"]
    assert (await run_task(tasks, "later")).delay_s == 5


@pytest.mark.parametrize("raised", [ValueError("no such day"), SystemExit(3), asyncio.CancelledError("mine")])
async def test_any_exception_of_the_handler_is_the_jobs_error(raised):
    tasks = Tasks()

    @tasks.task("it", asyncio=True)
    async def it(job: AioJob) -> None:
        await asyncio.sleep(0)
        raise raised

    run = await run_task(tasks, "it")
    assert run.status == "queued"
    assert run.error.startswith(f"{type(raised).__name__}: {raised}")
    assert "in it\n" in run.error
    assert "trio_asyncio" not in run.error


@pytest.mark.requirement("Q9")
async def test_its_timeout_stops_it_by_a_cancellation():
    tasks, told = asyncio_tasks(timeout_s=0.05)
    run = await run_task(tasks, "it")
    assert (run.status, told["stopped_by"], run.progress) == ("queued", "timeout", [{"last": "word"}])
    assert run.error.startswith("timeout")


@pytest.mark.slow
@pytest.mark.requirement("Q9")
@pytest.mark.parametrize("ends", ["returns", "raises"])
async def test_a_stop_during_a_wait_for_a_thread_is_raised_after_the_thread_has_ended(ends):
    tasks, done = Tasks(), []

    def work() -> None:
        time.sleep(0.3)
        done.append(True)
        if ends == "raises":
            raise ValueError("late")

    @tasks.task("it", asyncio=True, timeout_s=0.05)
    async def it(job: AioJob) -> None:
        for _ in range(3):
            with contextlib.suppress(ValueError):
                await asyncio.to_thread(work)

    with trio.fail_after(patience_s()):
        assert (await run_task(tasks, "it")).status == "queued"
    assert done == [True]


async def test_a_handler_that_would_stop_or_close_the_loop_of_all_gets_an_error():
    tasks = Tasks()

    @tasks.task("it", asyncio=True)
    async def it(job: AioJob) -> str:
        loop = asyncio.get_running_loop()
        for end in (loop.stop, loop.close):
            with pytest.raises(RuntimeError):
                end()
        return await asyncio.sleep(0.001, "goes on")

    with trio.fail_after(patience_s()):
        assert (await run_task(tasks, "it")).result == "goes on"


@pytest.mark.slow
async def test_a_cancel_a_lost_lease_and_a_drain_stop_it_and_leave_no_asyncio_task(open_worker, raw, row_of):
    tasks, told = asyncio_tasks()

    async def begin():
        told["started"], told["ended"] = trio.Event(), trio.Event()
        job = await supervisor.jobs.enqueue("it", queue="q")
        await told["started"].wait()
        assert len(asyncio.all_tasks(told["loop"])) > 1
        return job.job_id

    with trio.fail_after(patience_s()):
        async with open_worker(tasks, heartbeat_s=0.2, drain_timeout_s=0.1) as supervisor:
            job_id = await begin()
            await supervisor.jobs.cancel(job_id)
            assert (await supervisor.jobs.wait(job_id)).status == "canceled"
            assert told["stopped_by"] == "cancel_requested"
            assert asyncio.all_tasks(told["loop"]) == set()

            job_id = await begin()
            # Another worker, of any service, has claimed the job.
            await raw.execute(
                "UPDATE dl_jobs SET token = token + 1, attempt = 2, claimed_by = 'w' WHERE job_id = $1", job_id
            )
            await supervisor.signals.recorded.wait(2)
            assert told["ended"].is_set()
            assert told["stopped_by"] == "lease_lost"
            assert asyncio.all_tasks(told["loop"]) == set()
            row = await row_of(job_id)
            assert (row["status"], row["attempt"], row["claimed_by"], row["error"]) == ("running", 2, "w", None)
            await raw.execute("DELETE FROM dl_jobs WHERE job_id = $1", job_id)

            await begin()
            report = await supervisor.drain()
            assert (report.returned, report.stuck, told["stopped_by"]) == (1, (), "drain")


@pytest.mark.slow
@pytest.mark.requirement("Q12")
@pytest.mark.parametrize("flavour", ["asyncio", "thread"])
async def test_a_transaction_commits_rows_and_success_together_or_nothing(flavour, database):
    tasks = Tasks()
    database.psql("CREATE TABLE written (n int)")

    @tasks.task("asyncio", asyncio=True)
    async def in_asyncio(job: AioJob) -> None:
        async with job.transaction() as transaction:
            await transaction.copy("written", ["n"], [(1,), (2,)])
            await transaction.executemany("INSERT INTO written VALUES ($1)", [(3,)])
            await transaction.execute("INSERT INTO written VALUES ($1)", 4)
            [transaction.result] = await transaction.fetch("SELECT sum(n)::int AS sum FROM written")
            with pytest.raises(RuntimeError, match=r"one job\.transaction"):
                await job.transaction().__aenter__()
            if job.args.get("fail"):
                raise RuntimeError("after the rows")
            if job.args.get("hang"):
                async with asyncio.timeout(0.1):
                    await transaction.execute("SELECT pg_sleep(60)")

    @tasks.task("thread")
    def in_thread(job: ThreadJob) -> None:
        with job.transaction() as transaction:
            transaction.copy("written", ["n"], [(1,), (2,)])
            transaction.executemany("INSERT INTO written VALUES ($1)", [(3,)])
            transaction.execute("INSERT INTO written VALUES ($1)", 4)
            [transaction.result] = transaction.fetch("SELECT sum(n)::int AS sum FROM written")
            with pytest.raises(RuntimeError, match=r"one job\.transaction"):
                job.transaction().__enter__()
            if job.args.get("fail"):
                raise RuntimeError("after the rows")
            if job.args.get("hang"):
                transaction.execute("SET LOCAL statement_timeout = 100")
                transaction.execute("SELECT pg_sleep(60)")

    with trio.fail_after(patience_s()):
        failed = await run_task(tasks, flavour, {"fail": True}, dsn=database.dsn)
        assert (failed.status, failed.error.partition("\n")[0]) == ("queued", "RuntimeError: after the rows")
        assert (await run_task(tasks, flavour, {"hang": True}, dsn=database.dsn)).status == "queued"
        assert database.psql("SELECT count(*) FROM written") == "0"
        run = await run_task(tasks, flavour, dsn=database.dsn)
    assert (run.status, run.result) == ("succeeded", {"sum": 10})
    assert database.psql("SELECT sum(n) FROM written") == "10"


@pytest.mark.slow
@pytest.mark.requirement("Q12")
@pytest.mark.parametrize("flavour", ["asyncio", "thread"])
async def test_a_stop_inside_of_a_transaction_leaves_no_rows(flavour, open_worker, database):
    tasks, inside = Tasks(), trio.Event()
    database.psql("CREATE TABLE written (n int)")

    @tasks.task("asyncio", asyncio=True)
    async def in_asyncio(job: AioJob) -> None:
        async with job.transaction() as transaction:
            await transaction.execute("INSERT INTO written VALUES (1)")
            inside.set()
            await asyncio.sleep(3_600)

    @tasks.task("thread")
    def in_thread(job: ThreadJob) -> None:
        with job.transaction() as transaction:
            transaction.execute("INSERT INTO written VALUES (1)")
            trio.from_thread.run_sync(inside.set)
            while True:
                job.checkpoint()

    with trio.fail_after(patience_s()):
        async with open_worker(tasks) as supervisor:
            job = await supervisor.jobs.enqueue(flavour, queue="q")
            await inside.wait()
            await supervisor.jobs.cancel(job.job_id)
            assert (await supervisor.jobs.wait(job.job_id)).status == "canceled"
    assert database.psql("SELECT count(*) FROM written") == "0"


@pytest.mark.slow
async def test_asyncio_tasks_left_by_a_handler_are_cancelled_before_its_run_ends(open_worker):
    tasks, ended, kept, release = Tasks(), [], [], asyncio.Event()

    async def stubborn():
        try:
            await asyncio.sleep(3_600)
        finally:
            asyncio.create_task(begun_by_the_end())  # noqa: ASYNC300, RUF006 - the run holds it
            await release.wait()  # noqa: ASYNC102 - stubborn
            ended.append("stubborn")

    async def begun_by_the_end():
        try:
            await asyncio.sleep(3_600)
        finally:
            ended.append("begun by the end")

    @tasks.task("it", asyncio=True)
    async def it(job: AioJob) -> str:
        kept.append(asyncio.create_task(stubborn()))
        await asyncio.sleep(0)
        return "returned"

    @tasks.task("other", asyncio=True)
    async def other(job: AioJob) -> None:
        """Handler with the same key."""

    with trio.fail_after(patience_s()), capture_logs() as lines:
        async with open_worker(tasks, cancel_grace_s=0.1, heartbeat_s=0.2) as supervisor:
            job = await supervisor.jobs.enqueue("it", queue="q", lock_key="k")
            second = await supervisor.jobs.enqueue("other", queue="q", lock_key="k")

            async def is_told_as_stuck():
                return "a handler does not stop; it keeps its key and lease until it returns" in [
                    line["event"] for line in lines
                ]

            await until(is_told_as_stuck)
            assert (await supervisor.jobs.get(job.job_id)).status == "running"
            assert (await supervisor.jobs.get(second.job_id)).status == "queued"
            release.set()
            record = await supervisor.jobs.wait(job.job_id)
            assert (record.status, record.result) == ("succeeded", "returned")
            assert sorted(ended) == ["begun by the end", "stubborn"]
            assert (await supervisor.jobs.wait(second.job_id)).status == "succeeded"
    [left] = [line for line in lines if line["event"].startswith("cancelling asyncio tasks that a handler has left")]
    assert left["tasks"] == 1


async def test_an_error_or_an_exit_in_one_of_its_tasks_ends_nothing_else(open_worker):
    tasks = Tasks()

    @tasks.task("it", asyncio=True)
    async def it(job: AioJob) -> None:
        def fail():
            raise ValueError("in a callback")

        async def leave():
            sys.exit(3)

        asyncio.get_running_loop().call_soon(fail)
        with pytest.raises(RuntimeError, match=r"sys.exit\(3\)"):
            await asyncio.create_task(leave())  # noqa: ASYNC300 - awaited
        forgotten = asyncio.create_task(leave())
        await asyncio.sleep(0.01)
        del forgotten
        gc.collect()

    with trio.fail_after(patience_s()), capture_logs() as lines:
        async with open_worker(tasks) as supervisor:
            for _ in range(2):
                job = await supervisor.jobs.enqueue("it", queue="q")
                assert (await supervisor.jobs.wait(job.job_id)).status == "succeeded"
    told = [line for line in lines if line["event"] == "an asyncio error was never retrieved"]
    assert len(told) == 4


async def test_a_handler_that_swallows_its_cancellation_gets_it_at_each_checkpoint():
    tasks, heard = Tasks(), []

    @tasks.task("it", asyncio=True, timeout_s=0.05)
    async def it(job: AioJob) -> None:
        for _ in range(3):
            try:
                await asyncio.sleep(3_600 if not heard else 0)
                await job.checkpoint()
            except asyncio.CancelledError:  # noqa: ASYNC103 - swallowed on purpose
                heard.append(job.stopped_by)

    assert (await run_task(tasks, "it")).status == "succeeded"
    assert heard == ["timeout"] * 3


async def test_a_cancelled_task_waits_for_the_trio_call_it_has_started():
    started, release, told = trio.Event(), trio.Event(), []

    async def commit():
        with trio.CancelScope(shield=True):
            started.set()
            await release.wait()
            told.append("committed")

    async def asks(port):
        asking = asyncio.create_task(port.run(commit))
        await port.run(started.wait)
        asking.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        told.append(asking.done())
        release.set()
        with pytest.raises(asyncio.CancelledError):
            await asking

    with trio.fail_after(patience_s()):
        async with open_aio_loop() as loop, trio.open_nursery() as nursery:
            await loop.run(asks, AioRunPort(None, nursery))
    assert told == [False, "committed"]


@pytest.mark.parametrize("wait_s", [0, 1])
async def test_a_trio_handler_that_calls_asyncio_fails_for_good_and_is_told_the_fix(wait_s):
    tasks = Tasks()

    @tasks.task("it")
    async def it(job: Job) -> None:
        await asyncio.sleep(wait_s)

    @tasks.task("asyncio", asyncio=True)
    async def beside(job: AioJob) -> None:
        """Handler that makes asyncio's loop available."""

    run = await run_task(tasks, "it")
    assert run.status == "failed"
    error = run.error
    assert "declare the task with asyncio=True" in error.partition("\n")[0]


def test_a_plain_function_is_refused_where_it_is_declared():
    with pytest.raises(ValueError, match="task 'it': asyncio=True needs an async function"):
        Tasks().task("it", asyncio=True)(dict)

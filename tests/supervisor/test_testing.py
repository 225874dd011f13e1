"""`dataloader.testing`, as used by the tests of a user's module."""

from __future__ import annotations

import subprocess
import sys

import pytest
import trio
from conditions import patience_s

from dataloader import GiveUp, Job, NewJob, Retry, RetryPolicy, Snooze, Status, Tasks, ThreadJob
from dataloader.store.connection.bridge import open_database
from dataloader.store.connection.options import DatabaseOptions
from dataloader.store.queue.enqueue import enqueue
from dataloader.store.queue.reads import get_job, list_events
from dataloader.testing import LogLine, assert_enqueued, drain_queue, run_task, temporary_database

tasks = Tasks()


@tasks.task("count")
async def count(job: Job) -> int:
    for n in range(job.args["to"]):
        await job.progress({"n": n})
        job.log.info("counted", n=n)
    return job.args["to"]


@tasks.task("thread")
def in_thread(job: ThreadJob) -> str:
    job.progress({"half": True})
    job.checkpoint()
    return job.task


@tasks.task("fail", retry=RetryPolicy(base_s=7, jitter=0), max_attempts=2)
async def fail(job: Job) -> None:
    raise ValueError("no such day")


@tasks.task("slow", timeout_s=0.05, max_attempts=1)
async def slow(job: Job) -> None:
    await trio.sleep_forever()


@tasks.task("say")
async def say(job: Job) -> Retry | Snooze | GiveUp:
    return {"retry": Retry(5), "snooze": Snooze(6), "give up": GiveUp("never")}[job.args["what"]]


@tasks.task("write")
async def write(job: Job) -> None:
    async with job.transaction() as transaction:
        await transaction.execute("CREATE TABLE written (n int)")
        await transaction.copy("written", ["n"], [(1,), (2,)])
        await job.progress({"rows": 2})
        job.log.info("written")
        [row] = await transaction.fetch("SELECT sum(n)::int AS sum FROM written")
        if job.args.get("break"):
            raise RuntimeError("after the rows")
        transaction.result = row


async def test_a_handler_runs_without_a_database_and_all_it_showed_is_recorded():
    outcome = await run_task(tasks, "count", {"to": 2})
    assert (outcome.status, outcome.result, outcome.error) == (Status.SUCCEEDED, 2, None)
    assert outcome.progress == [{"n": 0}, {"n": 1}]
    assert outcome.log == [LogLine("info", "counted", {"n": 0}), LogLine("info", "counted", {"n": 1})]


async def test_a_plain_function_runs_in_a_thread():
    outcome = await run_task(tasks, "thread")
    assert (outcome.result, outcome.progress) == ("thread", [{"half": True}])


@pytest.mark.requirement("Q9")
async def test_a_failure_is_retried_by_the_tasks_policy_while_attempts_are_left():
    first = await run_task(tasks, "fail")
    assert (first.status, first.delay_s) == (Status.QUEUED, 7)
    assert first.error.startswith("ValueError: no such day")
    assert (await run_task(tasks, "fail", attempt=2)).status is Status.FAILED


async def test_a_tasks_own_timeout_counts():
    with trio.fail_after(patience_s()):
        outcome = await run_task(tasks, "slow")
    assert outcome.status is Status.FAILED
    assert outcome.error.startswith("timeout")


@pytest.mark.parametrize(
    ("what", "status", "delay_s"),
    [("retry", Status.QUEUED, 5), ("snooze", Status.QUEUED, 6), ("give up", Status.FAILED, 0)],
)
async def test_outcomes_that_are_no_failures_are_distinguished(what, status, delay_s):
    outcome = await run_task(tasks, "say", {"what": what})
    assert (outcome.status, outcome.delay_s) == (status, delay_s)


async def test_an_unknown_task_is_a_key_error():
    with pytest.raises(KeyError):
        await run_task(tasks, "nothing")


async def test_a_transaction_without_a_database_is_an_error_with_the_fix():
    outcome = await run_task(tasks, "write")
    assert outcome.status is Status.QUEUED
    assert "pass its dsn to run_task" in outcome.error


@pytest.mark.requirement("Q12")
async def test_a_transaction_commits_rows_and_success_together(database):
    outcome = await run_task(tasks, "write", dsn=database.dsn)
    assert (outcome.status, outcome.result) == (Status.SUCCEEDED, {"sum": 3})
    assert outcome.log == [LogLine("info", "written", {})]
    assert database.psql("SELECT sum(n) FROM written") == "3"
    assert database.psql("SELECT status, result FROM dl_jobs") == 'succeeded|{"sum": 3}'


@pytest.mark.requirement("Q12")
async def test_a_transaction_that_fails_leaves_no_rows(database):
    outcome = await run_task(tasks, "write", {"break": True}, dsn=database.dsn)
    assert (outcome.status, outcome.error.partition("\n")[0]) == (Status.QUEUED, "RuntimeError: after the rows")
    assert database.psql("SELECT to_regclass('written') IS NULL") == "t"


async def test_everything_that_is_ready_is_worked_off_and_the_rest_stays(database):
    new = [
        NewJob(queue="a", task="count", args={"to": 1}, lock_key="one"),
        NewJob(queue="b", task="count", args={"to": 2}, lock_key="one"),
        NewJob(queue="a", task="fail"),
        NewJob(queue="a", task="of another worker"),
    ]
    with trio.fail_after(patience_s()):
        async with open_database(DatabaseOptions(dsn=database.dsn)) as db:
            jobs = await enqueue(db, new, default_lease_s=60)
            outcomes = await drain_queue(database.dsn, tasks)
            assert sorted(outcome.task for outcome in outcomes) == ["count", "count", "fail"]
            records = [await get_job(db, job.job_id) for job in jobs]
            assert [record.status for record in records] == ["succeeded", "succeeded", "queued", "queued"]
            assert [record.waits_for for record in records] == [None, None, "time", None]
            kinds = [event.kind for event in (await list_events(db, jobs[0].job_id)).events]
            assert kinds == ["queued", "picked", "done"]


@pytest.mark.slow
async def test_a_temporary_database_is_there_for_a_block_and_migrated():
    with temporary_database() as dsn:
        assert (await run_task(tasks, "write", dsn=dsn)).result == {"sum": 3}


async def test_the_answer_shows_whether_a_job_was_added(database):
    async with open_database(DatabaseOptions(dsn=database.dsn)) as db:
        await enqueue(
            db, [NewJob(queue="a", task="count", args={"to": n, "by": 1}) for n in (1, 2)], default_lease_s=60
        )
    [job] = await assert_enqueued(database.dsn, "count", {"to": 2}, queue="a")
    assert job.args == {"to": 2, "by": 1}
    await assert_enqueued(database.dsn, "count", times=2)
    await assert_enqueued(database.dsn, "count", {"to": 3}, times=0)
    await assert_enqueued(database.dsn, count, {"to": 1}, queue="a")
    with pytest.raises(AssertionError, match=r"enqueued: 0, expected 1 of 'count' in 'b' with {'to': 2}; .*'by': 1"):
        await assert_enqueued(database.dsn, "count", {"to": 2}, queue="b")


@pytest.mark.full
def test_the_pytest_fixture_gives_each_test_a_separate_database(tmp_path):
    (tmp_path / "conftest.py").write_text(
        "import pytest\n"
        "import my_tasks\n"
        "pytest_plugins = ['dataloader.pytest']\n"
        "@pytest.fixture(scope='session')\n"
        "def dataloader_tasks():\n"
        "    return my_tasks.tasks\n"
    )
    (tmp_path / "my_tasks.py").write_text(
        "import attrs\n"
        "from dataloader import Job, Tasks\n"
        "tasks = Tasks()\n"
        "@attrs.frozen\n"
        "class Year:\n"
        "    year: int\n"
        "@tasks.task('load', args=Year, queue='own', lock_key='{year}')\n"
        "async def load(job: Job[Year]) -> int:\n"
        "    return job.args.year\n"
    )
    (tmp_path / "test_it.py").write_text(
        "import pytest, trio\n"
        "from my_tasks import Year, load, tasks\n"
        "from dataloader import Job, open_client\n"
        "from dataloader.testing import assert_enqueued, drain_queue, run_task\n"
        "async def test_a_task_has_its_defaults(dataloader_dsn):\n"
        "    async with open_client(dataloader_dsn) as client:\n"
        "        await load.enqueue(client.jobs, Year(1999))\n"
        "    await assert_enqueued(dataloader_dsn, load, Year(1999), queue='own')\n"
        "    assert [run.result for run in await drain_queue(dataloader_dsn, tasks)] == [1999]\n"
        "@tasks.task('write')\n"
        "async def write(job: Job) -> None:\n"
        "    async with job.transaction() as transaction:\n"
        "        await transaction.execute('CREATE TABLE written (n int)')\n"
        "@pytest.mark.parametrize('n', [1, 2])\n"
        "async def test_it(dataloader_dsn, n):\n"
        "    assert (await run_task(tasks, 'write', dsn=dataloader_dsn)).status == 'succeeded'\n"
        "    await assert_enqueued(dataloader_dsn, 'write')\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-o", "trio_mode=true", "-p", "no:cacheprovider", str(tmp_path)]
    # In pytest's own folder it would make the folders of all other tests unreadable for PostgreSQL.
    command += ["--basetemp", str(tmp_path / "run")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "3 passed" in done.stdout, done.stdout

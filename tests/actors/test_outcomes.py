"""Ends of runs: results, errors and retries, return values of handlers, timeouts, the event history (Q9, Q11)."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime, timedelta
from functools import partial

import attrs
import pytest
import trio
from conditions import patience_s, until, when_ended
from databases import raw_connection
from logged import capture_logs

from dataloader import GiveUp, Retry, RetryPolicy, Snooze, Tasks
from dataloader.store.queue import finish

# A job that is ready again immediately may be read before its own key is free.
PARKED = "requeue: lock_key"


async def delay_of(raw, job_id):
    """Return the seconds between the requeue of a job and its next run."""
    return await raw.fetchval(
        "SELECT extract(epoch FROM available_at - (SELECT max(ts) FROM dl_job_events e WHERE e.job_id = j.job_id))"
        "::float8 FROM dl_jobs j WHERE job_id = $1",
        job_id,
    )


@pytest.mark.requirement("Q9")
async def test_a_failed_run_is_repeated_when_its_policy_says(open_worker, raw, row_of):
    tasks = Tasks()

    @tasks.task("fail")
    async def fail(job):
        raise ValueError("no such file")

    async with open_worker(tasks) as supervisor:
        await raw.execute("ALTER TABLE dl_jobs ALTER attempt SET DEFAULT 2")
        # With a key: a job without one may be added as running, from attempt 1.
        job = await supervisor.jobs.enqueue("fail", queue="q", lock_key="k")
        row = await until(lambda: row_of(job.job_id), lambda row: row["error"])
    assert (row["status"], row["attempt"], row["waits_for"]) == ("queued", 3, "time")
    # The first frame is the handler's: its callers are the same for all handlers.
    trace = "Traceback (most recent call last):\n  File "
    assert row["error"].startswith(f'ValueError: no such file\n\n{trace}"{__file__}", line ')
    assert 90 - 0.1 <= await delay_of(raw, job.job_id) <= 99 + 0.1


@attrs.frozen
class Year:
    year: int


@pytest.mark.requirement("Q9")
async def test_args_that_do_not_fit_their_type_fail_the_job_without_a_retry(open_worker):
    """A started supervisor has stored the task's queue in the database."""
    tasks = Tasks()

    @tasks.task("load", args=Year, queue="q")
    async def load(job):
        return job.args.year

    async with open_worker(tasks) as supervisor:
        fits = await load.enqueue(supervisor.jobs, Year(1999))
        misfits = await supervisor.jobs.enqueue("load", {"year": "x"})
        assert (fits.queue, fits.queue_state) == ("q", None)
        assert (await when_ended(supervisor, fits.job_id)).result == 1999
        ended = await when_ended(supervisor, misfits.job_id)
    assert (ended.status, ended.attempt, ended.error) == ("failed", 1, 'args.year: must be an integer, not "x"')


@pytest.mark.requirement("Q9")
async def test_the_last_attempts_error_fails_the_job(open_worker, journal_of):
    tasks = Tasks()

    @tasks.task("fail", retry=RetryPolicy(base_s=0), max_attempts=3)
    async def fail(job):
        raise ValueError(f"attempt {job.attempt}")

    async with open_worker(tasks) as supervisor:
        job = await supervisor.jobs.enqueue("fail", queue="q")
        ended = await when_ended(supervisor, job.job_id)
    assert (ended.status, ended.attempt) == ("failed", 3)
    assert ended.error.startswith("ValueError: attempt 3")
    again = ["picked", "requeue: retry"]
    journal = [line for line in await journal_of(job.job_id) if line != PARKED]
    assert journal == ["queued", *again, *again, "picked", "failed: fail"]


@pytest.mark.requirement("Q9")
async def test_a_final_error_fails_immediately_even_in_an_exception_group(open_worker):
    tasks = Tasks()

    @tasks.task("fail", retry=RetryPolicy(final=(LookupError,)))
    async def fail(job):
        if job.args["grouped"]:
            raise ExceptionGroup("two", [KeyError("a"), IndexError("b")])
        raise KeyError("a")

    async with open_worker(tasks) as supervisor:
        for grouped in (False, True):
            job = await supervisor.jobs.enqueue("fail", {"grouped": grouped}, queue="q")
            ended = await when_ended(supervisor, job.job_id)
            assert (ended.status, ended.attempt) == ("failed", 1)


@pytest.mark.slow
@pytest.mark.requirement("Q9")
async def test_a_handler_may_ask_for_a_retry_snooze_or_give_up(open_worker, raw, row_of):
    tasks = Tasks()

    @tasks.task("say")
    async def say(job):
        return {"retry": Retry(after_s=100, reason="busy"), "snooze": Snooze(200), "give up": GiveUp("never")}[
            job.args["what"]
        ]

    with capture_logs() as lines:
        async with open_worker(tasks) as supervisor:
            retry, snooze, give_up = [
                (await supervisor.jobs.enqueue("say", {"what": what}, queue="q")).job_id
                for what in ("retry", "snooze", "give up")
            ]
            row = await until(lambda: row_of(retry), lambda row: row["waits_for"] == "time")
            assert (row["attempt"], row["error"]) == (1, "busy")
            assert 99 < await delay_of(raw, retry) < 101
            row = await until(lambda: row_of(snooze), lambda row: row["waits_for"] == "time")
            assert (row["attempt"], row["error"]) == (0, None)
            assert 199 < await delay_of(raw, snooze) < 201
            ended = await when_ended(supervisor, give_up)
            assert (ended.status, ended.error) == ("failed", "never")
    [failed] = [line for line in lines if line["log_level"] == "warning"]
    assert (failed["event"], failed["error"], failed["next"]) == ("the job failed", "never", "fail")
    assert (failed["job_id"], failed["queue"], failed["task"], failed["attempt"]) == (str(give_up), "q", "say", 1)


@pytest.mark.slow
@pytest.mark.requirement("Q9")
@pytest.mark.parametrize("kind", ["async", "thread"])
async def test_a_run_that_takes_too_long_is_stopped_and_repeated(open_worker, raw, row_of, kind):
    tasks = Tasks()
    if kind == "async":

        @tasks.task("slow", timeout_s=0.1)
        async def slow(job):
            await trio.sleep_forever()
    else:

        @tasks.task("slow", timeout_s=0.1)
        def slow_thread(job):
            while True:
                time.sleep(0.01)
                job.checkpoint()

    with capture_logs() as lines:
        async with open_worker(tasks) as supervisor:
            job = await supervisor.jobs.enqueue("slow", queue="q")
            row = await until(lambda: row_of(job.job_id), lambda row: row["error"])
    assert (row["status"], row["attempt"]) == ("queued", 1)
    assert row["error"].startswith("timeout: the run took longer than 0.1 s")
    [said] = [line for line in lines if line["log_level"] == "warning"]
    assert (said["event"], said["why"], said["next"]) == ("the job was stopped", "timeout", "retry")
    assert said["error"].startswith("timeout: the run took longer than 0.1 s")


@pytest.mark.slow
@pytest.mark.requirement("Q11")
async def test_the_event_history_has_the_whole_life_of_a_job(open_worker, raw, journal_of, monkeypatch):
    monkeypatch.setattr("dataloader.actors.heartbeat.JOURNAL_EVERY_S", 0.5)
    tasks, beaten = Tasks(), trio.Event()

    @tasks.task("life", retry=RetryPolicy(base_s=0))
    async def life(job):
        if job.attempt == 1:
            job.log.info("reading", rows=3, password="sesame")
            raise ValueError("first")
        await beaten.wait()

    async with open_worker(tasks, heartbeat_s=0.1) as supervisor:
        job = await supervisor.jobs.enqueue("life", queue="q")
        beats = "SELECT count(*) FROM dl_job_events WHERE kind = 'heartbeat'"
        await until(lambda: raw.fetchval(beats), lambda count: count >= 1)
        beaten.set()
        assert (await when_ended(supervisor, job.job_id)).status == "succeeded"
    kinds = [line for line in await journal_of(job.job_id) if line != PARKED]
    assert "heartbeat" in kinds
    others = [kind for kind in kinds if kind != "heartbeat"]
    assert others == ["queued", "picked", "log", "requeue: retry", "picked", "done"]
    rows = await raw.fetch("SELECT payload FROM dl_job_events WHERE kind <> 'heartbeat' ORDER BY event_id")
    payloads = [json.loads(row["payload"] or "{}") for row in rows]
    assert payloads[1] == {"attempt": 1, "worker": supervisor.worker}
    assert payloads[2] == {"level": "info", "message": "reading", "fields": {"rows": 3, "password": "***"}}
    assert payloads[3]["error"].startswith("ValueError: first")


@pytest.mark.slow
@pytest.mark.requirement("Q9")
@pytest.mark.parametrize("lock", ["FOR NO KEY UPDATE", "FOR UPDATE"])
async def test_a_locked_row_delays_no_other_jobs_outcome(database, open_worker, row_of, journal_of, lock):
    tasks, running, locked, release = Tasks(), [], trio.Event(), trio.Event()

    @tasks.task("wait")
    async def wait(job):
        running.append(job.job_id)
        await locked.wait()
        await job.progress({"locked": True})
        job.log.info("somebody has the row")
        await release.wait()

    async def all_run():
        return len(running) == 2

    async with open_worker(tasks) as supervisor:
        held, other = [(await supervisor.jobs.enqueue("wait", queue="q")).job_id for _ in range(2)]
        await until(all_run)
        async with raw_connection(database.dsn) as psql:
            await psql.execute("BEGIN")
            await psql.execute(f"SELECT FROM dl_jobs WHERE job_id = $1 {lock}", held)
            locked.set()
            # Its progress is behind that of the locked one, and is written within a second or two.
            await until(partial(row_of, other), lambda row: row["progress"] == '{"locked": true}', within_s=10)
            assert (await row_of(held))["progress"] == "{}"
            release.set()
            assert (await when_ended(supervisor, other, within_s=5)).status == "succeeded"
            assert (await row_of(held))["status"] == "running"
            await psql.execute("ROLLBACK")
        assert (await when_ended(supervisor, held, within_s=5)).status == "succeeded"
    for job_id in (held, other):
        assert (await row_of(job_id))["progress"] == '{"locked": true}'
        assert sorted(await journal_of(job_id)) == ["done", "log", "picked", "queued"]


TRIED = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND application_name LIKE '% recorder' AND state = 'idle'
  AND query = $1
"""


@pytest.mark.slow
@pytest.mark.requirement("Q17")
@pytest.mark.parametrize("in_transaction", [True, False])
async def test_lines_whose_row_was_locked_for_a_moment_at_the_jobs_end_are_kept(
    database, open_worker, raw, journal_of, in_transaction
):
    tasks = Tasks()

    @tasks.task("tell")
    async def tell(job):
        job.log.info("the last words")
        if in_transaction:
            async with job.transaction():
                pass
        await psql.execute("BEGIN")
        await psql.execute("SELECT FROM dl_jobs WHERE job_id = $1 FOR UPDATE", job.job_id)

    async with raw_connection(database.dsn) as psql, open_worker(tasks) as supervisor:
        job = await supervisor.jobs.enqueue("tell", queue="q")
        # The recorder has tried to write the lines, and has read which rows it had to skip.
        await until(partial(raw.fetchval, TRIED, finish._OURS))
        assert await raw.fetchval("SELECT count(*) FROM dl_job_events WHERE kind = 'log'") == 0
        assert supervisor.signals.recorded.count == 0
        await psql.execute("ROLLBACK")
        await supervisor.signals.recorded.wait()
        assert (await supervisor.jobs.get(job.job_id)).status == "succeeded"
    assert sorted(await journal_of(job.job_id)) == ["done", "log", "picked", "queued"]


@pytest.mark.slow
@pytest.mark.requirement("Q12")
async def test_a_handler_that_continues_after_its_commit_does_not_end_the_process(open_worker, row_of):
    tasks, ended = Tasks(), trio.Event()

    @tasks.task("long", timeout_s=0.1)
    async def long(job):
        async with job.transaction():
            pass
        with trio.CancelScope(shield=True):
            await trio.sleep(3.6)  # the lease and the grace
        ended.set()

    settings = {"default_lease_s": 3, "heartbeat_s": 0.5, "cancel_grace_s": 0.2}
    with capture_logs() as logs:
        async with open_worker(tasks, **settings) as supervisor:
            job = await supervisor.jobs.enqueue("long", queue="q")
            with trio.fail_after(patience_s()):
                await ended.wait()
        assert (await row_of(job.job_id))["status"] == "succeeded"
    assert [line for line in logs if line["log_level"] == "critical"] == []
    assert "a handler does not stop; it keeps its key and lease until it returns" in {line["event"] for line in logs}


@pytest.mark.slow
@pytest.mark.requirement("Q2", "Q6")
async def test_a_delayed_job_starts_on_time(open_worker):
    tasks, started = Tasks(), []

    @tasks.task("tick")
    async def tick(job):
        started.append(datetime.now(UTC))

    async with open_worker(tasks) as supervisor:
        due = [datetime.now(UTC) + timedelta(seconds=after_s) for after_s in (0.6, 0.9)]
        # The later one first: the stager must learn of the earlier one.
        jobs = [await supervisor.jobs.enqueue("tick", queue="q", available_at=at) for at in reversed(due)]
        for job in jobs:
            await when_ended(supervisor, job.job_id)
    late = [(at - wanted).total_seconds() for at, wanted in zip(started, due, strict=True)]
    # Nothing polls here; a benchmark measures the usual delay.
    assert all(0 <= late_s < 1 for late_s in late), late


@pytest.mark.slow
@pytest.mark.requirement("Q3")
async def test_progress_is_written_within_a_second_and_the_last_one_always(open_worker, raw, row_of):
    tasks, shown, release = Tasks(), trio.Event(), trio.Event()

    @tasks.task("load")
    async def load(job):
        for rows in range(500):
            await job.progress({"rows": rows})
        shown.set()
        await release.wait()
        await job.progress({"rows": 1000})

    async with open_worker(tasks) as supervisor:
        job = await supervisor.jobs.enqueue("load", queue="q")
        await shown.wait()
        await until(lambda: row_of(job.job_id), lambda row: row["progress"] == '{"rows": 499}', within_s=3)
        release.set()
        done = await when_ended(supervisor, job.job_id)
        assert done.status == "succeeded"
        assert done.progress == {"rows": 1000}

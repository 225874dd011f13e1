"""Whatever a handler returns, raises or logs: its job ends, and the others continue (Q9)."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import pytest
import trio
from conditions import until, when_ended

from dataloader import RetryPolicy, Tasks
from dataloader.actors.runner import error_text


class UnspeakableError(Exception):
    def __str__(self):
        raise RuntimeError("not even this")

    __repr__ = __str__


class NoException(BaseException):
    """Not an Exception: libraries use this to bypass `except Exception`."""


class Strange:
    def __repr__(self):
        raise RuntimeError("no")


def deep(levels):
    value = ["\ud800"]
    for _ in range(levels):
        value = [value]
    return ["\ud800", value]


RAISED = {
    "NUL and lone surrogates": lambda: ValueError("a\x00b\ud800c"),
    "50 MB": lambda: ValueError("x" * 50_000_000),
    "no text": UnspeakableError,
    "a group": lambda: ExceptionGroup("g\x00", [ValueError("\udfff"), UnspeakableError()]),
    "no Exception": lambda: NoException("b"),
    "a group of no Exceptions": lambda: BaseExceptionGroup("g", [NoException("b")]),
    "SystemExit": lambda: SystemExit(3),
    "asyncio's cancellation": asyncio.CancelledError,
    "GeneratorExit": GeneratorExit,
    "StopAsyncIteration": StopAsyncIteration,
}
RETURNED = {
    "an object": Strange,
    "a set of objects": lambda: {Strange()},
    "NUL and lone surrogates": lambda: {"a\x00\ud800": "b\x00\udfff"},
    "50 MB": lambda: "x" * 50_000_000,
    "a deep list": lambda: deep(100_000),
    "itself": lambda: (cycle := [], cycle.append(cycle))[0],
    "not a number": lambda: float("nan"),
    "a huge number": lambda: 10**5_000,
    "keys that are no text": lambda: {(1, 2): 3, None: 4},
    "an exception": lambda: ValueError("returned"),
}


@pytest.mark.slow
@pytest.mark.requirement("Q9")
@pytest.mark.parametrize("kind", ["async", "thread"])
async def test_any_raised_exception_fails_the_job(open_worker, kind):
    tasks = Tasks()
    now = RetryPolicy(base_s=0)

    @tasks.task("async", retry=now, max_attempts=1)
    async def raising(job):
        error = RAISED[job.args["what"]]()
        raise error

    @tasks.task("thread", retry=now, max_attempts=1)
    def raising_thread(job):
        error = RAISED[job.args["what"]]()
        raise error

    async with open_worker(tasks) as supervisor:
        for what in RAISED:
            job = await supervisor.jobs.enqueue(kind, {"what": what}, queue="q")
            ended = await when_ended(supervisor, job.job_id)
            assert (what, ended.status) == (what, "failed")
            assert ended.error
            assert len(ended.error) <= 16_400
            if what == "a group":
                assert f'Traceback (most recent call last):\n  |   File "{__file__}", line ' in ended.error


@pytest.mark.slow
@pytest.mark.requirement("Q9")
async def test_the_traceback_of_a_handler_that_could_not_be_called_shows_who_called_it(open_worker):
    tasks = Tasks()
    tasks.task("no function", max_attempts=1)(dict)  # its arguments cannot be inspected before the call
    async with open_worker(tasks) as supervisor:
        job = await supervisor.jobs.enqueue("no function", queue="q")
        ended = await when_ended(supervisor, job.job_id)
    assert "object is not iterable" in ended.error
    assert "in _called\n" in ended.error


@pytest.mark.slow
@pytest.mark.requirement("Q9")
async def test_any_returned_value_ends_the_job(open_worker):
    tasks = Tasks()

    @tasks.task("return")
    async def returning(job):
        return RETURNED[job.args["what"]]()

    async with open_worker(tasks) as supervisor:
        for what in RETURNED:
            job = await supervisor.jobs.enqueue("return", {"what": what}, queue="q")
            ended = await when_ended(supervisor, job.job_id)
            assert (what, ended.status) == (what, "succeeded"), ended.error


@pytest.mark.slow
@pytest.mark.requirement("Q9", "Q11")
async def test_a_refused_line_or_progress_does_not_affect_other_jobs(open_worker, raw):
    # The constraint represents one that an operator has added.
    await raw.execute("ALTER TABLE dl_job_events ADD CONSTRAINT n CHECK (payload ->> 'message' IS DISTINCT FROM 'bad')")
    await raw.execute("ALTER TABLE dl_jobs ADD CONSTRAINT p CHECK (progress -> 'bad' IS NULL)")
    tasks, go_on = Tasks(), trio.Event()

    @tasks.task("show")
    async def show(job):
        bad = job.args["n"] == 2
        job.log.info("before", n=job.args["n"])
        job.log.info("bad" if bad else "good")
        job.log.info("after", n=job.args["n"])
        await job.progress({"bad" if bad else "good": True})
        await go_on.wait()

    async def messages():
        found = await raw.fetch("SELECT payload ->> 'message' FROM dl_job_events WHERE kind = 'log'")
        return Counter(row[0] for row in found)

    async def shown():
        return await raw.fetchval("SELECT count(*) FROM dl_jobs WHERE progress -> 'good' IS NOT NULL")

    async with open_worker(tasks) as supervisor:
        jobs = [await supervisor.jobs.enqueue("show", {"n": n}, queue="q") for n in range(4)]
        await until(messages, lambda found: found == {"before": 4, "good": 3, "after": 4})
        await until(shown, lambda number: number == 3)
        go_on.set()
        for job in jobs:
            assert (await when_ended(supervisor, job.job_id)).status == "succeeded"


@pytest.mark.slow
@pytest.mark.requirement("Q9", "Q11")
async def test_any_progress_or_log_line_leaves_other_jobs_unharmed(open_worker, raw):
    tasks = Tasks()

    @tasks.task("show")
    async def show(job):
        for make in RETURNED.values():
            await job.progress({"it": make()})
            job.log.info("a\x00\ud800", it=make())
        for _ in range(50):
            job.log.error("again")
        return "done"

    async with open_worker(tasks, log_lines_per_job=30) as supervisor:
        job = await supervisor.jobs.enqueue("show", queue="q")
        ended = await when_ended(supervisor, job.job_id)
        assert (ended.status, ended.result) == ("succeeded", "done"), ended.error
        lines = "SELECT count(*) FROM dl_job_events WHERE kind = 'log'"
        assert await raw.fetchval(lines) == 31  # and one that says so
        last = "SELECT payload->>'message' FROM dl_job_events WHERE kind = 'log' ORDER BY event_id DESC LIMIT 1"
        assert await raw.fetchval(last) == "more than 30 lines; the rest is not stored"


@pytest.mark.requirement("E11")
async def test_a_line_of_a_load_that_is_too_long_stays_one_of_the_load(open_worker, raw):
    tasks = Tasks()

    @tasks.task("tell")
    async def tell(job):
        job.log_of("rates").warning("m" * 600, rows=["x" * 100] * 1_000)

    async with open_worker(tasks) as supervisor:
        job = await supervisor.jobs.enqueue("tell", queue="q")
        await when_ended(supervisor, job.job_id)
        [line] = (await supervisor.jobs.logs(job.job_id, load="rates", level="warning")).lines
        assert (line.level, line.message) == ("warning", "m" * 500)
        assert line.fields["bytes"] > 100_000
        # It is not a run, so the position of its lines is not stored.
        assert await raw.fetchval("SELECT count(*) FROM dl_etl_logs") == 0


@pytest.mark.requirement("Q9")
async def test_one_outcome_that_the_database_refuses_does_not_hold_up_the_others(open_worker, raw):
    tasks, gate = Tasks(), trio.Event()
    # An unforeseen error, here from a check that another program has added.
    await raw.execute("ALTER TABLE dl_jobs ADD CHECK (result IS NULL OR result <> '\"poison\"')")

    @tasks.task("return")
    async def returning(job):
        await gate.wait()
        return job.args["what"]

    async with open_worker(tasks, {"q": 10}) as supervisor:
        jobs = [
            await supervisor.jobs.enqueue("return", {"what": what}, queue="q") for what in ("good", "poison", "better")
        ]
        await until(lambda: raw.fetchval("SELECT count(*) FROM dl_jobs WHERE status = 'running'"), lambda n: n == 3)
        gate.set()
        ended = [await when_ended(supervisor, job.job_id) for job in jobs]
    assert [(job.status, job.result) for job in ended] == [
        ("succeeded", "good"),
        ("succeeded", None),
        ("succeeded", "better"),
    ]


@pytest.mark.requirement("Q9")
async def test_arguments_of_another_service_that_are_no_object_reach_the_handler(open_worker, raw):
    tasks, seen = Tasks(), []

    @tasks.task("any")
    async def anything(job):
        seen.append(job.args)

    async with open_worker(tasks) as supervisor:
        for args in ("[1, 2]", '"text"', "null", "1e400"):
            job_id = await raw.fetchval(
                "INSERT INTO dl_jobs (job_id, queue, task, lock_key, args)"
                " VALUES (gen_random_uuid(), 'q', 'any', 'k', $1) RETURNING job_id",
                args,
            )
            assert (await when_ended(supervisor, job_id)).status == "succeeded"
    assert seen[:3] == [[1, 2], "text", None]


@pytest.mark.slow
@pytest.mark.requirement("Q9", "Q16")
async def test_a_log_line_or_error_of_megabytes_does_not_delay_other_jobs(open_worker):
    tasks, took_s = Tasks(), {}

    @tasks.task("say")
    async def say(job):
        text = "token=a, " * job.args["times"]
        began = time.thread_time()
        job.log.warning(text, it=text)
        error_text(ValueError(text))
        took_s[job.args["times"]] = time.thread_time() - began

    async with open_worker(tasks, job_log_level="warning") as supervisor:
        for times in (20_000, 2_000_000):
            job = await supervisor.jobs.enqueue("say", {"times": times}, queue="q")
            assert (await when_ended(supervisor, job.job_id)).status == "succeeded"
    # Creating 18 MB of text takes time, too; masking them takes ten seconds.
    assert took_s[2_000_000] < 10 * took_s[20_000]

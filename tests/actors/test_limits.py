"""Limits of running services: the number of jobs that tasks start, and the times, over all processes (S1, S4)."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
import trio
from conditions import until, when_ended

from dataloader import NewJob, Next, RateLimit, RetryPolicy, Supplier, Tasks
from dataloader.actors.dispatcher import Dispatcher

pytestmark = pytest.mark.slow


def most_within(instants, span_s):
    """Return the largest number of `instants` within any span of `span_s` seconds."""
    ordered = sorted(instants)
    return max(sum(1 for at in ordered if first <= at < first + span_s) for first in ordered)


class Crowd:
    """Counts the handlers inside, and their maximum."""

    def __init__(self):
        self.now = self.most = 0

    async def stay(self, seconds):
        self.now += 1
        self.most = max(self.most, self.now)
        await trio.sleep(seconds)
        self.now -= 1


@pytest.mark.requirement("S1")
async def test_a_task_keeps_its_concurrency_limit_over_all_processes(open_worker, raw):
    tasks, crowd = Tasks(), Crowd()

    @tasks.task("narrow", queue="q", max_running=3)
    async def narrow(job):
        await crowd.stay(0.02)

    @tasks.task("wide", queue="q")
    async def wide(job): ...

    async with open_worker(tasks, {"q": 10}) as one, open_worker(tasks, {"q": 10}):
        for _ in range(30):
            await one.jobs.enqueue("narrow")
        await one.jobs.enqueue("wide")

        async def ended():
            return await raw.fetchval("SELECT count(*) FROM dl_jobs WHERE status = 'succeeded'") == 31

        await until(ended)
    assert crowd.most == 3


@pytest.mark.requirement("S1")
async def test_the_next_batch_begins_when_the_last_one_has_ended_and_its_pause_is_over(open_worker, raw):
    tasks = Tasks()

    @tasks.task("batch", queue="q", batch_size=4, batch_delay_s=0.3)
    async def batch(job):
        await trio.sleep(0.05)

    async with open_worker(tasks, {"q": 3}) as one, open_worker(tasks, {"q": 3}):
        await one.jobs.enqueue_many([NewJob(task="batch") for _ in range(10)])

        async def ended():
            return await raw.fetchval("SELECT count(*) FROM dl_jobs WHERE status = 'succeeded'") == 10

        await until(ended)
    rows = await raw.fetch("SELECT started_at, finished_at FROM dl_jobs ORDER BY started_at")
    batches = [[rows[0]]]
    for row in rows[1:]:
        if row["started_at"] >= max(former["finished_at"] for former in batches[-1]):
            batches.append([])
        batches[-1].append(row)
    assert [len(one) for one in batches] == [4, 4, 2]
    for former, later in pairwise(batches):
        pause = min(row["started_at"] for row in later) - max(row["finished_at"] for row in former)
        assert pause.total_seconds() >= 0.3


@pytest.mark.requirement("S4")
async def test_starts_of_all_tasks_of_a_supplier_keep_its_rate_limits(open_worker, raw):
    tasks, began = Tasks(), []
    hr = Supplier("hr", rate_limits=(RateLimit(5, per_s=0.5), RateLimit(12, per_s=2)), margin_s=0.05)

    @tasks.task("one", queue="q", supplier=hr)
    async def one(job):
        began.append(trio.current_time())

    @tasks.task("two", queue="other", supplier="hr", cost=2)
    async def two(job):
        began.extend([trio.current_time()] * 2)

    async with open_worker(tasks, {"q": 10, "other": 10}) as first, open_worker(tasks, {"q": 10}):
        await first.jobs.enqueue_many([NewJob(task="one") for _ in range(20)] + [NewJob(task="two") for _ in range(5)])

        async def ended():
            return await raw.fetchval("SELECT count(*) FROM dl_jobs WHERE status = 'succeeded'") == 25

        await until(ended, within_s=60)
    assert len(began) == 30
    assert most_within(began, 0.5) <= 5
    assert most_within(began, 2) <= 12


@pytest.mark.requirement("S4")
@pytest.mark.parametrize("flavour", ["trio", "asyncio", "thread"])
async def test_a_handler_waits_for_units_of_a_supplier_and_is_snoozed_if_too_long(open_worker, raw, flavour):
    tasks, sent = Tasks(), []
    hr = tasks.supplier(Supplier("hr", rate_limits=(RateLimit(2, per_s=0.4),), margin_s=0.1))
    if flavour == "thread":

        @tasks.task("ask", queue="q")
        def ask(job):
            for _ in range(3):
                job.take("hr")
                sent.append(trio.from_thread.run_sync(trio.current_time))
            job.take(hr, 2, max_wait_s=0.01)

    else:

        @tasks.task("ask", queue="q", asyncio=flavour == "asyncio")
        async def ask(job):
            for _ in range(3):
                await job.take("hr")
                sent.append(trio.current_time())
            await job.take(hr, 2, max_wait_s=0.01)

    async with open_worker(tasks) as service:
        job = await service.jobs.enqueue("ask")

        async def snoozed():
            return await raw.fetchrow("SELECT status, error, attempt FROM dl_jobs WHERE job_id = $1", job.job_id)

        row = await until(snoozed, lambda row: row["error"] is not None)
    assert "the supplier 'hr' accepts no request for" in row["error"]
    assert row["attempt"] == 0
    assert most_within(sent[:3], 0.4) == 2


@pytest.mark.requirement("S4")
async def test_a_take_that_can_never_succeed_is_an_error(open_worker):
    tasks = Tasks()
    tasks.supplier(Supplier("hr", rate_limits=(RateLimit(2, per_s=1),)))

    @tasks.task("too many", queue="q", max_attempts=1)
    async def too_many(job):
        await job.take("hr", 3)

    @tasks.task("unknown", queue="q", max_attempts=1)
    async def unknown(job):
        await job.take("nobody")

    async with open_worker(tasks) as service:
        unknown = "must be a declared supplier (tasks.supplier()), not 'nobody'"
        for task, said in (("too many", "n: must be at most 2"), ("unknown", unknown)):
            job = await service.jobs.enqueue(task)
            ended = await service.jobs.wait(job.job_id)
            assert ended.status == "failed"
            assert said in ended.error


@pytest.mark.requirement("S1")
async def test_a_job_whose_run_failed_or_lost_its_worker_gets_the_priority_of_a_retry(open_worker, raw):
    tasks = Tasks()

    @tasks.task("fails", queue="q", retry=RetryPolicy(), retry_priority=1_000)
    async def fails(job):
        raise OSError

    async with open_worker(tasks) as service:
        job = await service.jobs.enqueue("fails", priority=5)

        async def priority():
            return await raw.fetchval("SELECT priority FROM dl_jobs WHERE job_id = $1", job.job_id)

        await until(priority, lambda found: found == 1_000)


@pytest.mark.requirement("S4")
async def test_outside_its_period_a_task_starts_nothing_and_when_it_opens_all_of_it(open_worker, raw):
    tasks, ran = Tasks(), []

    @tasks.task("nightly", queue="q", work_periods="DAILY 00:00-24:00")
    async def nightly(job):
        ran.append(job.job_id)

    async with open_worker(tasks) as service, open_worker(tasks):
        await raw.execute("UPDATE dl_tasks SET periods = '{}', zone = 'UTC'")
        for _ in range(5):
            await service.jobs.enqueue("nightly")

        async def waiting():
            return await raw.fetchval("SELECT count(*) FROM dl_jobs WHERE waits_for = 'limit'")

        await until(waiting, lambda number: number == 5)
        assert not ran
        await raw.execute("UPDATE dl_tasks SET periods = '{[0,10080)}'; SELECT pg_notify('dl_lane', '')")

        async def ended():
            return await raw.fetchval("SELECT count(*) FROM dl_jobs WHERE status = 'succeeded'")

        await until(ended, lambda number: number == 5)
    assert len(ran) == 5


@pytest.mark.requirement("S1")
async def test_jobs_that_were_ready_before_their_task_had_limits_move_to_its_lane(open_worker, raw):
    tasks, crowd = Tasks(), Crowd()
    await raw.execute(
        "INSERT INTO dl_jobs (job_id, queue, task, lock_key) SELECT gen_random_uuid(), 'q', 'narrow', 'k' || i"
        " FROM generate_series(1, 10) AS i"
    )

    @tasks.task("narrow", queue="q", max_running=1)
    async def narrow(job):
        await crowd.stay(0.01)

    async with open_worker(tasks):

        async def ended():
            return await raw.fetchval("SELECT count(*) FROM dl_jobs WHERE status = 'succeeded' AND lane = 'narrow'")

        await until(ended, lambda number: number == 10)
    assert crowd.most == 1


@pytest.mark.requirement("S4")
async def test_a_body_that_would_begin_later_than_it_was_counted_goes_back(open_worker, raw, monkeypatch):
    """The event loop is blocked once, between a claim and the handlers of its jobs."""
    tasks, ran, held = Tasks(), [], []
    hr = Supplier("hr", rate_limits=(RateLimit(3, per_s=1),), margin_s=0.1)

    @tasks.task("late", queue="q", supplier=hr)
    async def late(job):
        ran.append(job.attempt)

    async with open_worker(tasks, {"q": 30}) as service:
        claim = Dispatcher._claim

        async def slowly(*args):
            answer = await claim(*args)
            if answer.jobs and not held:
                held.append(len(answer.jobs))
                time.sleep(0.3)  # noqa: ASYNC251 - like a user's handler
            return answer

        monkeypatch.setattr(Dispatcher, "_claim", slowly)
        job = await service.jobs.enqueue("late")
        ended = await service.jobs.wait(job.job_id)
    assert held == [1]
    assert (ended.status, ran, ended.attempt) == ("succeeded", [1], 1)
    kinds = [row["kind"] for row in await raw.fetch("SELECT kind FROM dl_job_events ORDER BY event_id")]
    assert kinds == ["queued", "picked", "requeue", "picked", "done"]


@pytest.mark.requirement("S1")
async def test_a_running_job_that_is_deleted_makes_room_in_its_lane(open_worker, raw):
    tasks, ran = Tasks(), []

    @tasks.task("narrow", queue="q", max_running=1)
    async def narrow(job):
        ran.append(job.job_id)
        if len(ran) == 1:
            await trio.sleep_forever()

    async def begun():
        return len(ran)

    async with open_worker(tasks, heartbeat_s=0.5) as service:
        await service.jobs.enqueue_many([NewJob(task="narrow") for _ in range(2)])
        await until(begun, lambda number: number == 1)
        await raw.execute("DELETE FROM dl_jobs WHERE status = 'running'")
        await until(begun, lambda number: number == 2)


@pytest.mark.requirement("S1", "R6")
async def test_the_jobs_of_a_flow_of_stages_wait_in_the_lane_of_its_first_stage(open_worker, raw):
    tasks, crowd = Tasks(), Crowd()

    @tasks.task("doc.fetch", queue="q", max_running=1)
    async def fetch(job):
        await crowd.stay(0.01)

    @tasks.task("doc.index", queue="q")
    async def index(job):
        return Next(to="fetch") if next(back, False) else None

    back = iter([True] * 3)
    tasks.stages("doc", fetch, index)
    async with open_worker(tasks, {"q": 10}) as service:
        await service.jobs.enqueue_many([NewJob(task="doc") for _ in range(6)])

        async def ended():
            return await raw.fetchval("SELECT count(*) FROM dl_jobs WHERE status = 'succeeded'")

        await until(ended, lambda number: number == 6)
    assert crowd.most == 1
    assert await raw.fetch("SELECT lane FROM dl_lanes") == [("doc.fetch",)]


@pytest.mark.requirement("S5")
async def test_an_override_that_no_longer_fits_keeps_no_program_from_starting(open_worker, raw):
    former, tasks = Tasks(), Tasks()

    @former.task("t", queue="q", batch_size=3)
    async def first(job): ...

    @tasks.task("t", queue="q", max_running=2)
    async def second(job): ...

    async with open_worker(former) as service:
        await service.limits.set_tasks({"t": {"batch_delay_s": 5}})
    async with open_worker(tasks):
        assert await raw.fetchval("SELECT batch_size FROM dl_tasks WHERE task = 't'") == 3


@pytest.mark.requirement("S4")
@pytest.mark.parametrize("flavour", ["trio", "asyncio", "thread"])
async def test_at_the_period_end_a_run_continues_or_is_stopped_and_requeued(
    open_worker, raw, row_of, journal_of, flavour
):
    tasks, told, is_back = Tasks(), [], trio.Event()
    tasks.supplier(Supplier("hr", work_periods="DAILY 00:00-24:00"))
    other_day = f"{(datetime.now(UTC) + timedelta(days=3)):%a} 00:00-24:00".upper()

    async def on_trio(job):
        try:
            if not told:
                await trio.sleep_forever()
        finally:
            told.append(job.stopped_by)

    async def on_asyncio(job):
        try:
            if not told:
                await asyncio.sleep(1_000)
        finally:
            told.append(job.stopped_by)

    def in_thread(job):
        try:
            while not told:
                job.checkpoint()
                time.sleep(0.02)
        finally:
            told.append(job.stopped_by)

    handler = {"trio": on_trio, "asyncio": on_asyncio, "thread": in_thread}[flavour]
    tasks.task("nightly", queue="q", supplier="hr", at_period_end="stop", asyncio=flavour == "asyncio")(handler)

    @tasks.task("patient", queue="q", supplier="hr")
    async def patient(job):
        await is_back.wait()

    async def came_back():
        return told and (await row_of(job.job_id))["waits_for"] == "limit"

    async with open_worker(tasks) as service:
        job, other = await service.jobs.enqueue("nightly"), await service.jobs.enqueue("patient")

        async def running():
            return await raw.fetchval("SELECT count(*) FROM dl_jobs WHERE status = 'running'")

        await until(running, lambda number: number == 2)
        await service.limits.pause_task("nightly")
        await service.limits.resume_task("nightly")
        assert not told
        await service.limits.set_supplier("hr", {"work_periods": [other_day]})
        await until(came_back)
        is_back.set()
        row = await row_of(job.job_id)
        assert (row["status"], row["attempt"], row["lane"], row["error"]) == ("queued", 0, "nightly", None)
        assert told == ["period_end"]
        assert await journal_of(job.job_id) == ["queued", "picked", "requeue: period_end"]
        assert (await when_ended(service, other.job_id)).status == "succeeded"
        await service.limits.set_supplier("hr", {"work_periods": None})
        assert (await when_ended(service, job.job_id)).status == "succeeded"


@pytest.mark.requirement("S4")
async def test_starts_around_midnight_keep_a_daily_rate_limit(open_worker, raw):
    tasks, began = Tasks(), []

    @tasks.task("daily", queue="q", supplier=Supplier("hr", rate_limits=(RateLimit(7, per="day"),), margin_s=0.4))
    async def daily(job):
        began.append(time.time())

    async with open_worker(tasks, {"q": 10}) as one, open_worker(tasks, {"q": 10}):
        midnight = time.time() + 2.5
        # A time zone in which it is 24:00 then, in the database's notation.
        clock = (datetime.fromtimestamp(midnight, UTC) - datetime(2000, 1, 1, tzinfo=UTC)).total_seconds() % 86_400
        hours, rest = divmod(int(clock), 3_600)
        zone = f"<x>+{hours:02}:{rest // 60:02}:{rest % 60:02}"
        midnight -= clock - int(clock)
        await raw.execute("UPDATE dl_sources SET zones = ARRAY[$1]", zone)
        await one.jobs.enqueue_many([NewJob(task="daily") for _ in range(30)])

        async def of_the_new_day():
            return sum(at >= midnight for at in began)

        await until(of_the_new_day, lambda number: number >= 7)
    assert len(began) <= 14
    assert await of_the_new_day() == 7


@pytest.mark.requirement("S1")
async def test_a_partition_keeps_its_concurrency_limit_over_all_processes(open_worker, raw):
    tasks, crowds = Tasks(), {key: Crowd() for key in "abc"}

    @tasks.task("shop", queue="q", max_running_per_partition=2)
    async def shop(job):
        await crowds[job.partition_key].stay(0.02)

    async with open_worker(tasks, {"q": 10}) as one, open_worker(tasks, {"q": 10}):
        await one.jobs.enqueue_many(
            [
                NewJob(task="shop", partition_key=key)
                for key, number in (("a", 24), ("b", 3), ("c", 3))
                for _ in range(number)
            ]
        )

        async def ended():
            return await raw.fetchval("SELECT count(*) FROM dl_jobs WHERE status = 'succeeded'")

        await until(ended, lambda number: number == 30)
    assert [crowd.most for crowd in crowds.values()] == [2, 2, 2]

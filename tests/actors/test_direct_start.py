"""A job that finds a free slot in the process that adds it starts immediately, without a notification and a claim (Q6).

Polls are an hour apart, so all other jobs start by their notifications. The pool's connection behind the proxy is the
one that adds jobs.
"""

from __future__ import annotations

import math
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

import pytest
import trio
import trio.testing
from conditions import patience_s, until, when_ended
from logged import capture_logs
from proxy import open_proxy

from dataloader import NewJob, StoreUnavailable, Tasks
from dataloader.jobs.contract import Operator
from dataloader.store.queue.control import pause, resume

OPERATOR = Operator("test", None)
AT_ONCE = ["queued", "picked", "done"]
LOCKS = "SELECT pid FROM pg_stat_activity WHERE application_name LIKE '% locks' AND datname = current_database()"


class Desk:
    """A task `note`, which records its jobs' `n` and, if they have `wait`, waits for `release`."""

    def __init__(self):
        self.tasks, self.release, self.noted = Tasks(), trio.Event(), []
        self.now = self.most = 0

        @self.tasks.task("note")
        async def note(job):
            self.noted.append(job.args.get("n"))
            self.now += 1
            self.most = max(self.most, self.now)
            try:
                with trio.move_on_after(math.inf if job.args.get("wait") else 0.002):
                    await self.release.wait()
            finally:
                self.now -= 1

    async def has_noted(self):
        return self.noted


@pytest.fixture
def desk():
    return Desk()


@pytest.fixture
async def heard(raw):
    """Return a function that reads the queues for which a notification of a ready job has arrived."""
    queues = []

    def hear(_connection, _pid, _channel, queue):
        queues.append(queue)

    await raw._cross(raw.asyncpg.add_listener, "dl_jobs", hear)

    async def heard():
        await raw.fetchval("SELECT 1")
        return queues

    return heard


@pytest.fixture
def renewed(raw):
    """Return a function that ends a supervisor's lock session, and waits for the repair by a new one."""

    async def renewed(supervisor):
        answers = supervisor.signals.keys_safe.count
        former = await raw.fetchval(LOCKS)
        assert await raw.fetchval(f"SELECT count(pg_terminate_backend(pid, 5000)) FROM ({LOCKS}) AS locks") == 1
        await supervisor.signals.keys_safe.wait(answers + 1)
        await until(lambda: raw.fetchval(LOCKS), lambda pid: pid not in {None, former})

    return renewed


@pytest.mark.requirement("Q6")
async def test_a_job_starts_immediately_if_a_slot_is_free(
    open_worker, desk, resting, heard, renewed, raw, row_of, journal_of
):
    async with open_worker(desk.tasks) as supervisor:
        await resting(supervisor)
        added = await supervisor.jobs.enqueue("note", {"n": 1.5, "wait": True}, queue="q", lease_ttl_sec=77)
        assert (added.status, added.created, added.queue) == ("queued", True, "q")
        assert desk.noted == [1.5], "its handler has begun before its caller goes on"
        row = await row_of(added.job_id)
        assert (row["status"], row["attempt"], row["claimed_by"]) == ("running", 1, supervisor.worker)
        assert row["lease_expires_at"] - row["started_at"] == timedelta(seconds=77)
        assert 0 < row["token"] < 2**53
        # This needs the token that is in its notification.
        await supervisor.jobs.cancel(added.job_id)
        assert (await when_ended(supervisor, added.job_id)).status == "canceled"
        other = await supervisor.jobs.enqueue("note", queue="q")
        assert (await when_ended(supervisor, other.job_id)).status == "succeeded"
        assert await heard() == []
        await resting(supervisor)
        # A new lock session takes the keys of all known runs again: there are none.
        with capture_logs() as lines:
            await renewed(supervisor)
        assert [line["event"] for line in lines if "acquiring its locks again" in line["event"]] == []
    assert await journal_of(added.job_id) == ["queued", "picked", "canceled: cancel"]
    assert await journal_of(other.job_id) == AT_ONCE
    picked = "SELECT payload::text FROM dl_job_events WHERE job_id = $1 AND kind = 'picked'"
    assert supervisor.worker in await raw.fetchval(picked, other.job_id)


@pytest.mark.slow
@pytest.mark.requirement("Q6")
async def test_a_job_that_may_not_run_yet_or_here_waits_for_its_claim(
    open_worker, desk, resting, heard, raw, row_of, journal_of
):
    later = Tasks()

    @later.task("elsewhere")
    async def elsewhere(job):
        """Only the other process knows this task."""

    async with open_worker(desk.tasks, {"q": 2, "r": 2}) as supervisor:
        await resting(supervisor)

        # Its queue is paused.
        await pause(supervisor.database, "q", OPERATOR)
        paused = await supervisor.jobs.enqueue("note", queue="q")
        await until(heard, lambda queues: queues == ["q"])
        assert (await row_of(paused.job_id))["status"] == "queued"
        await resume(supervisor.database, "q", OPERATOR)
        assert (await when_ended(supervisor, paused.job_id)).status == "succeeded"

        async def is_claimed(queues, task="note", **options):
            """Add a job with these options; check that it is announced, and succeeds if this process may run it."""
            await resting(supervisor)
            (await heard()).clear()
            job = await supervisor.jobs.enqueue(task, **options)
            await until(heard, lambda heard: heard == queues)
            return job.job_id

        jobs = [
            await is_claimed(["q"], queue="q", lock_key="k"),
            await is_claimed(["q"], queue="q", idempotency_key="i"),
            await is_claimed(["q"], queue="q", available_at=datetime.now(UTC) + timedelta(seconds=0.3)),
        ]
        # Only the database knows the changes of the task since this process has started.
        await raw.execute("UPDATE dl_tasks SET lock_key = '\"fixed\"', queue = 'r' WHERE task = 'note'")
        jobs.append(await is_claimed(["q"], queue="q"))
        assert (await row_of(jobs[-1]))["lock_key"] == "fixed"
        for job_id in jobs:
            assert (await when_ended(supervisor, job_id)).status == "succeeded"
            assert await journal_of(job_id) == AT_ONCE
        # A queue, and a task, of another process.
        others = [
            await is_claimed(["other"], queue="other"),
            await is_claimed(["q"], "elsewhere", queue="q"),
        ]
        async with open_worker(later, {"q": 1}, claim_backoff_s=0.2):
            assert (await when_ended(supervisor, others[1])).status == "succeeded"
        assert (await row_of(others[0]))["status"] == "queued"


@pytest.mark.slow
@pytest.mark.requirement("Q6")
async def test_concurrent_additions_start_no_more_jobs_than_there_are_slots(open_worker, desk, resting, raw):
    jobs = [NewJob(queue="q", task="note", args={"n": n}) for n in range(300)]

    async def add(some):
        for job in some:
            await supervisor.jobs.enqueue_many([job])

    async with open_worker(desk.tasks) as supervisor:
        await resting(supervisor)
        async with trio.open_nursery() as nursery:
            for n in range(64):
                nursery.start_soon(add, jobs[n::64])
        for job in jobs:
            assert (await when_ended(supervisor, job.job_id)).status == "succeeded"
        await resting(supervisor)
    assert desk.most == 4
    assert sorted(desk.noted) == list(range(300))
    assert await raw.fetchval("SELECT count(*) FROM dl_jobs WHERE attempt = 1") == 300


@pytest.fixture
def held_back(open_worker, desk, resting, database):
    """Return a context with a worker behind a proxy, which can hold back the answers to the pool."""

    @asynccontextmanager
    async def held_back(**settings):
        async with (
            open_proxy(database.dsn) as proxy,
            open_worker(desk.tasks, dsn=proxy.dsn, **settings) as supervisor,
        ):
            await resting(supervisor)
            # Then the connection has prepared the statement, and the next trigger need not read the queues.
            first = await supervisor.jobs.enqueue("note", {"n": "first"}, queue="q")
            await when_ended(supervisor, first.job_id)
            await resting(supervisor)
            desk.noted.clear()
            yield proxy, supervisor

    return held_back


@pytest.fixture
def unanswered(held_back, raw, monkeypatch):
    """Return a context like `held_back` in which a job was added as running, but its answer has not arrived."""
    monkeypatch.setattr("dataloader.store.queue.lock_session.DOUBT_S", 0.2)

    @asynccontextmanager
    async def unanswered(answers, **settings):
        async with held_back(**settings) as (proxy, supervisor), trio.open_nursery() as nursery:
            job = NewJob(queue="q", task="note")
            proxy.freeze_at("pool", job.job_id.bytes)
            nursery.start_soon(_add, supervisor, job, answers)
            await until(lambda: raw.fetchval("SELECT count(*) FROM dl_jobs WHERE status = 'running'"))
            yield proxy, supervisor, job.job_id

    return unanswered


async def _add(supervisor, job, answers):
    try:
        answers += await supervisor.jobs.enqueue_many([job])
    except StoreUnavailable as error:
        answers.append(error)


@pytest.mark.slow
@pytest.mark.requirement("Q6")
async def test_a_job_that_finds_no_slot_is_not_overtaken_by_a_later_one(held_back, desk, raw):
    async with held_back(queues={"q": 1}) as (proxy, supervisor):

        async def is_free():
            return supervisor.state.queues["q"].running == 0

        jobs = []

        async def add(n, priority=100, **args):
            jobs.append(await supervisor.jobs.enqueue("note", {"n": n} | args, queue="q", priority=priority))

        await add(0, wait=True)
        await until(desk.has_noted)
        # The queue has a free slot again before the process receives the notifications of waiting jobs.
        proxy.freeze("listener", answers_only=True)
        await add(1)
        desk.release.set()
        await until(is_free)
        await add(2)
        await add(3, priority=1)
        proxy.thaw()
        await until(desk.has_noted, lambda noted: len(noted) == 4)
        for job in jobs:
            assert (await when_ended(supervisor, job.job_id)).status == "succeeded"
    assert desk.noted == [0, 3, 1, 2]


@pytest.mark.slow
@pytest.mark.requirement("Q6")
async def test_a_job_added_during_a_claim_is_not_overtaken_by_a_later_one(held_back, desk, raw):
    async with held_back() as (proxy, supervisor):

        async def is_running():
            return await raw.fetchval("SELECT count(*) FROM dl_jobs WHERE status = 'running'")

        async def rests():
            return list(supervisor.signals.resting.last or ()) == ["q"]

        # The claim of the first job is answered after the second one was added; its notification arrives last.
        proxy.freeze("locks", answers_only=True)
        await raw.execute("SELECT dl_enqueue('note', queue => 'q')")
        await until(is_running)
        proxy.freeze("listener", answers_only=True)
        jobs = [await supervisor.jobs.enqueue("note", {"n": 1}, queue="q")]
        proxy.thaw()
        proxy.freeze("listener", answers_only=True)
        await until(rests)
        jobs.append(await supervisor.jobs.enqueue("note", {"n": 2}, queue="q"))
        assert desk.noted == [None], "the second job has not started directly, before the first one"
        proxy.thaw()
        for job in jobs:
            assert (await when_ended(supervisor, job.job_id)).status == "succeeded"


@pytest.mark.slow
@pytest.mark.requirement("Q6")
async def test_jobs_that_are_added_together_keep_what_is_their_own(held_back, desk, raw):
    started = trio.Event()

    @desk.tasks.task("parent")
    async def parent(job):
        started.set()
        await desk.release.wait()
        await job.enqueue("note", {"n": 2}, queue="q")

    async with held_back() as (proxy, supervisor), trio.open_nursery() as nursery:
        whole = await supervisor.jobs.enqueue("parent", queue="q")
        await started.wait()
        first, other, twin = (NewJob(queue="q", task="note", args={"n": n}) for n in (0, 1, 3))
        proxy.freeze("pool")
        answers, twins = [], []
        nursery.start_soon(_add, supervisor, first, answers)
        await trio.testing.wait_all_tasks_blocked(0.01)
        # The next statement adds all of these.
        for job, to in ((other, answers), (twin, twins), (twin, twins)):
            nursery.start_soon(_add, supervisor, job, to)
        desk.release.set()
        await trio.testing.wait_all_tasks_blocked(0.01)
        proxy.thaw()
        for job_id in (whole.job_id, first.job_id, other.job_id, twin.job_id):
            assert (await when_ended(supervisor, job_id)).status == "succeeded"
        await until(desk.has_noted, lambda noted: len(noted) >= 4)
    assert sorted(desk.noted) == [0, 1, 2, 3]
    assert sorted(answer.created for answer in twins) == [False, True]
    roots = await raw.fetch("SELECT root_id FROM dl_jobs WHERE root_id IS NOT NULL")
    assert [row["root_id"] for row in roots] == [whole.job_id]


@pytest.mark.slow
@pytest.mark.requirement("Q6")
async def test_a_job_whose_addition_had_no_answer_goes_back_and_runs_once(unanswered, desk, raw, row_of, journal_of):
    answers = []
    async with unanswered(answers) as (proxy, supervisor, job_id):
        assert (await row_of(job_id))["claimed_by"] == supervisor.worker
        proxy.cut("pool")
        proxy.thaw()
        await until(lambda: row_of(job_id), lambda row: row["status"] == "succeeded")
    assert [type(answer) for answer in answers] == [StoreUnavailable]
    assert len(desk.noted) == 1
    assert (await row_of(job_id))["attempt"] == 1
    lost = "requeue: the claim's reply was lost"
    assert await journal_of(job_id) == ["queued", "picked", lost, "picked", "done"]


@pytest.mark.slow
@pytest.mark.requirement("Q7")
async def test_a_job_that_is_just_being_added_is_not_given_back_by_a_repair(unanswered, desk, renewed, journal_of):
    answers = []
    async with unanswered(answers) as (proxy, supervisor, job_id):
        await renewed(supervisor)
        proxy.thaw()
        assert (await when_ended(supervisor, job_id)).status == "succeeded"
    assert [answer.created for answer in answers] == [True]
    assert len(desk.noted) == 1
    assert await journal_of(job_id) == AT_ONCE


@pytest.mark.slow
@pytest.mark.requirement("Q15")
@pytest.mark.parametrize("answered", [True, False], ids=["the answer comes", "the answer is lost"])
async def test_a_drain_waits_for_the_answer_to_an_addition(unanswered, desk, row_of, journal_of, answered):
    answers = []
    async with unanswered(answers) as (proxy, supervisor, job_id):
        supervisor.request_drain()
        await trio.testing.wait_all_tasks_blocked(0.01)
        if not answered:
            proxy.cut("pool")
        proxy.thaw()
        with trio.fail_after(patience_s()):
            report = await supervisor.wait_drained()
        assert report.is_clean
        assert report.finished == answered
    if answered:
        assert await journal_of(job_id) == AT_ONCE
        return
    row = await row_of(job_id)
    assert (row["status"], row["attempt"], row["claimed_by"]) == ("queued", 0, None)
    assert desk.noted == []

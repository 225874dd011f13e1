"""Queues from their users' view: shared by processes, paused, with tasks that not every process knows (Q14)."""

from __future__ import annotations

import json

import httpx2
import pytest
import trio
from conditions import until, when_ended

from dataloader import ConfigError, NewJob, Tasks
from dataloader.jobs.contract import Operator
from dataloader.store.queue.control import pause, resume

OPERATOR = Operator("test", None)


@pytest.mark.slow
@pytest.mark.requirement("Q14")
async def test_two_processes_share_the_work_of_a_queue(open_worker, raw):
    tasks = Tasks()

    @tasks.task("work")
    async def work(job):
        await trio.sleep(0.02)

    jobs = [NewJob(queue="q", task="work") for _ in range(60)]
    async with open_worker(tasks, {"q": 3}) as one, open_worker(tasks, {"q": 3}) as other:
        await one.jobs.enqueue_many(jobs)
        for job in jobs:
            assert (await when_ended(other, job.job_id)).status == "succeeded"
        picked = "SELECT count(*) FROM dl_job_events WHERE kind = 'picked' AND payload->>'worker' = $1"
        shares = [await raw.fetchval(picked, worker.worker) for worker in (one, other)]
    assert sum(shares) == 60
    assert min(shares) >= 10


@pytest.mark.requirement("Q14")
async def test_more_slots_than_the_server_has_locks_for_are_refused_without_a_worker_row(open_worker, raw):
    with pytest.raises(ConfigError, match=r"^WORKERS_JSON: 100000 slots are too many, .* has room for [0-9]+ "):
        async with open_worker(Tasks(), {f"q{n}": 1_000 for n in range(100)}):
            pass
    assert await raw.fetchval("SELECT count(*) FROM dl_workers") == 0


@pytest.mark.slow
@pytest.mark.requirement("Q6")
async def test_a_queue_runs_as_many_jobs_as_it_has_slots_and_claims_no_more(open_worker, raw):
    tasks, release = Tasks(), trio.Event()

    @tasks.task("wait")
    async def wait(job):
        await release.wait()

    jobs = [NewJob(queue=queue, task="wait") for queue in "ab" for _ in range(6)]
    async with open_worker(tasks, {"a": 2, "b": 4}) as supervisor:
        await supervisor.jobs.enqueue_many(jobs)
        running = "SELECT queue, count(*) FROM dl_jobs WHERE status = 'running' GROUP BY queue ORDER BY queue"
        rows = await until(lambda: raw.fetch(running), lambda rows: sum(row["count"] for row in rows) >= 6)
        assert [tuple(row) for row in rows] == [("a", 2), ("b", 4)]
        assert await raw.fetchval("SELECT count(*) FROM dl_job_events WHERE kind = 'picked'") == 6
        release.set()
        for job in jobs:
            await when_ended(supervisor, job.job_id)


@pytest.mark.slow
@pytest.mark.requirement("Q6")
async def test_more_urgent_jobs_run_first_and_older_ones_before_younger(open_worker):
    tasks, order, release = Tasks(), [], trio.Event()

    @tasks.task("note")
    async def note(job):
        order.append(job.args["n"])
        if job.args["n"] == 0:
            await release.wait()

    async with open_worker(tasks, {"q": 1}) as supervisor:
        await supervisor.jobs.enqueue("note", {"n": 0}, queue="q")
        await until(lambda: _now(order))
        jobs = [
            await supervisor.jobs.enqueue("note", {"n": n}, queue="q", priority=p)
            for n, p in ((1, 100), (2, 100), (3, 1))
        ]
        release.set()
        for job in jobs:
            await when_ended(supervisor, job.job_id)
    assert order == [0, 3, 1, 2]


async def _now(value):
    return value


@pytest.mark.slow
@pytest.mark.requirement("Q6")
async def test_a_job_that_was_locked_when_it_became_ready_starts_soon_after(open_worker, settled, raw):
    tasks = Tasks()

    @tasks.task("quick")
    async def quick(job):
        return None

    async with open_worker(tasks) as supervisor:
        await settled(supervisor)
        job = NewJob(queue="q", task="quick")
        await raw.execute("INSERT INTO dl_queues VALUES ('q', true)")
        await supervisor.jobs.enqueue_many([job])
        await raw.execute("BEGIN")
        await raw.fetch("SELECT FROM dl_jobs FOR UPDATE")
        await resume(supervisor.database, "q", OPERATOR)
        await raw.execute("SELECT pg_sleep(0.3)")  # the claim that the notification caused has skipped it
        await raw.execute("ROLLBACK")
        # No notification is sent for this, and polls are an hour apart.
        assert (await when_ended(supervisor, job.job_id, within_s=5)).status == "succeeded"


@pytest.mark.slow
@pytest.mark.requirement("Q6")
async def test_a_paused_queue_starts_nothing_until_it_is_resumed(open_worker, row_of):
    tasks, ran = Tasks(), trio.Event()

    @tasks.task("quick")
    async def quick(job):
        ran.set()

    async with open_worker(tasks, {"q": 1, "r": 1}) as supervisor:
        await pause(supervisor.database, "q", OPERATOR)
        paused = await supervisor.jobs.enqueue("quick", queue="q")
        other = await supervisor.jobs.enqueue("quick", queue="r")
        assert (await when_ended(supervisor, other.job_id)).status == "succeeded"
        assert (await row_of(paused.job_id))["status"] == "queued"
        await resume(supervisor.database, "q", OPERATOR)
        assert (await when_ended(supervisor, paused.job_id)).status == "succeeded"


@pytest.mark.slow
@pytest.mark.requirement("Q14")
async def test_a_job_with_an_unknown_task_waits_for_a_worker_that_knows_it(open_worker, row_of):
    old, new = Tasks(), Tasks()

    @old.task("old")
    async def known(job):
        return None

    @new.task("new")
    async def added(job):
        return "by the new one"

    async with open_worker(old) as without:
        job = await without.jobs.enqueue("new", queue="q")
        # It does not delay other jobs.
        other = await without.jobs.enqueue("old", queue="q")
        assert (await when_ended(without, other.job_id)).status == "succeeded"
        row = await row_of(job.job_id)
        assert (row["status"], row["attempt"], row["waits_for"]) == ("queued", 0, None)
        assert (await without.jobs.get(job.job_id)).queue_state == "unknown_task"
        async with open_worker(new, claim_backoff_s=3_600) as knowing:
            done = await when_ended(knowing, job.job_id)
            assert (done.status, done.result, done.attempt) == ("succeeded", "by the new one", 1)


@pytest.mark.slow
@pytest.mark.requirement("Q2", "Q3", "Q4", "Q17")
async def test_a_job_is_triggered_looked_at_and_canceled_over_http(open_worker, raw):
    tasks, started = Tasks(), trio.Event()

    @tasks.task("load")
    async def load(job):
        await job.progress({"rows": 7})
        started.set()
        await trio.sleep_forever()

    async with (
        open_worker(tasks, with_web=True) as supervisor,
        httpx2.AsyncClient(base_url=supervisor.url, timeout=15, verify=False) as client,
    ):
        body = {"queue": "q", "task": "load", "lock_key": "k", "args": {"day": "2026-01-01"}}
        answer = await client.post("/api/v1/jobs/trigger", json=body)
        assert answer.status_code == 201
        job = f"/api/v1/jobs/{answer.json()['job_id']}"
        await started.wait()

        async def status():
            return (await client.get(f"{job}/status")).json()

        shown = await until(status, lambda shown: shown["progress"] == {"rows": 7})
        assert (shown["status"], shown["attempt"]) == ("running", 1)
        assert shown["started_at"]
        assert (await client.post(f"{job}/cancel")).status_code in {200, 202}
        shown = (await client.get(f"{job}/status", params={"wait": 10})).json()
        assert shown["cancel_requested"] or shown["status"] == "canceled"
        shown = await until(status, lambda shown: shown["status"] == "canceled")
        assert shown["finished_at"]


@pytest.mark.slow
@pytest.mark.requirement("Q5")
async def test_status_shows_the_live_workers_of_all_processes(open_worker):
    async with (
        open_worker(Tasks(), {"q": 2}, with_web=True) as one,
        open_worker(Tasks(), {"r": 3}) as other,
        httpx2.AsyncClient(base_url=one.url, timeout=15, verify=False) as client,
    ):

        async def workers():
            return {worker["worker"]: worker for worker in (await client.get("/status")).json()["workers"]}

        shown = await until(workers, lambda workers: len(workers) == 2)
    assert shown[one.worker]["queues"] == {"q": 2}
    assert shown[other.worker]["queues"] == {"r": 3}


@pytest.mark.slow
@pytest.mark.requirement("Q6")
async def test_an_urgent_job_does_not_wait_for_the_end_of_a_backlog(open_worker):
    tasks, ran, begun, most = Tasks(), [], trio.Event(), trio.Event()

    @tasks.task("work")
    async def work(job):
        ran.append(job.args["n"])
        begun.set()
        if len(ran) == 4_000:
            most.set()

    backlog = [NewJob(queue="q", task="work", args={"n": n}) for n in range(5_000)]
    async with open_worker(tasks, {"q": 20}) as supervisor:
        await supervisor.jobs.enqueue_many(backlog)
        await begun.wait()
        [urgent] = await supervisor.jobs.enqueue_many([NewJob(queue="q", task="work", args={"n": -1}, priority=0)])
        assert (await when_ended(supervisor, urgent.job_id)).status == "succeeded"
        assert len(ran) < 4_000
        await most.wait()
        # Claims nevertheless continued behind the last one.
        places = [claim.after for claim in supervisor.signals.claimed.values]
        assert sum(place is not None for place in places) > 20


@pytest.mark.requirement("Q3")
async def test_a_worker_is_registered_before_its_first_claim_and_removed_at_its_end(open_worker, raw):
    async with open_worker(Tasks(), {"q": 3}) as supervisor:
        [(worker, queues)] = await raw.fetch("SELECT worker, queues FROM dl_workers")
        assert (worker, json.loads(queues)) == (supervisor.worker, {"q": 3})
    assert await raw.fetchval("SELECT count(*) FROM dl_workers") == 0

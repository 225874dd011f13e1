"""Leases: renewed for all jobs in one statement, never outlived by a handler, reclaimed when their worker has died."""

from __future__ import annotations

from functools import partial

import pytest
import trio
from conditions import patience_s, until, when_ended
from logged import capture_logs
from proxy import open_proxy

from dataloader import Tasks
from dataloader.actors import reaper
from dataloader.store.queue.lease_clock import lease_time
from dataloader.store.queue.lock_session import LockSession


@pytest.mark.slow
@pytest.mark.requirement("Q8")
async def test_one_statement_renews_the_leases_of_all_jobs(open_worker, raw):
    tasks, release = Tasks(), trio.Event()

    @tasks.task("wait")
    async def wait(job):
        await release.wait()

    # Count each renewed row, and each statement that renewed any.
    await raw.execute("""
        CREATE TABLE beats (changed int);
        CREATE FUNCTION beat() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
          INSERT INTO public.beats SELECT count(*) FROM new_rows n JOIN old_rows o USING (job_id)
            WHERE n.status = 'running' AND o.status = 'running' HAVING count(*) > 0;
          RETURN NULL;
        END $$;
        CREATE TRIGGER beat AFTER UPDATE ON dl_jobs REFERENCING OLD TABLE AS old_rows NEW TABLE AS new_rows
          FOR EACH STATEMENT EXECUTE FUNCTION beat()""")
    async with open_worker(tasks, {"q": 20, "r": 10}, heartbeat_s=0.3) as supervisor:
        with trio.fail_after(patience_s()):
            jobs = [await supervisor.jobs.enqueue("wait", queue=queue) for queue in ["q"] * 20 + ["r"] * 10]
            await until(lambda: raw.fetch("SELECT changed FROM beats WHERE changed = 30"), lambda rows: len(rows) >= 2)
            release.set()
            for job in jobs:
                assert (await when_ended(supervisor, job.job_id)).status == "succeeded"


@pytest.mark.slow
@pytest.mark.requirement("Q8")
async def test_the_heartbeat_connects_before_the_first_job_and_after_a_disconnect(open_worker, database):
    async with open_proxy(database.dsn) as proxy:

        async def links():
            return proxy.links("heartbeat")

        async with open_worker(Tasks(), heartbeat_s=0.2, dsn=proxy.dsn):
            [first] = await until(links)
            proxy.cut("heartbeat")
            await until(links, lambda links: links and first not in links)


@pytest.mark.full
@pytest.mark.requirement("Q7")
async def test_claims_that_are_answered_keep_the_keys_safe_while_no_ping_has_its_turn(open_worker, row_of, monkeypatch):
    tasks = Tasks()

    @tasks.task("wait")
    async def wait(job):
        await trio.sleep(job.args["s"])

    async def wait_for_its_turn(_session, _lease_s):
        await trio.sleep_forever()

    async with open_worker(tasks, heartbeat_s=0.5, default_lease_s=5) as supervisor:
        await supervisor.signals.keys_safe.wait()
        monkeypatch.setattr(LockSession, "ping", wait_for_its_turn)
        long_job = await supervisor.jobs.enqueue(
            "wait", {"s": 5.5}, queue="q"
        )  # longer than the keys are safe after a ping
        with trio.fail_after(patience_s()):
            while (await row_of(long_job.job_id))["status"] != "succeeded":
                job = await supervisor.jobs.enqueue("wait", {"s": 0.1}, queue="q")
                await when_ended(supervisor, job.job_id, within_s=5)
    assert (await row_of(long_job.job_id))["refunds"] == 0


@pytest.mark.slow
@pytest.mark.requirement("Q8", "Q17")
async def test_a_job_is_claimed_kept_alive_by_heartbeats_and_done(open_worker, row_of, journal_of):
    tasks, release = Tasks(), trio.Event()

    @tasks.task("wait")
    async def wait(job):
        await release.wait()
        return {"rows": 3}

    async with open_worker(tasks, heartbeat_s=0.2) as supervisor:
        with trio.fail_after(patience_s()):
            job = await supervisor.jobs.enqueue("wait", queue="q")
            claimed = await until(lambda: row_of(job.job_id), lambda row: row["status"] == "running")
            assert claimed["claimed_by"] == supervisor.worker
            alive = await until(lambda: row_of(job.job_id), lambda row: row["heartbeat_at"] > claimed["heartbeat_at"])
            assert alive["lease_expires_at"] > claimed["lease_expires_at"]
            release.set()
            done = await when_ended(supervisor, job.job_id)
        assert (done.status, done.result, done.claimed_by, done.attempt) == ("succeeded", {"rows": 3}, None, 1)
        assert await journal_of(job.job_id) == ["queued", "picked", "done"]


@pytest.mark.full
@pytest.mark.requirement("Q8")
async def test_a_lease_shorter_than_the_heartbeats_period_does_not_lapse(open_worker, settled):
    tasks = Tasks()

    @tasks.task("work")
    async def work(job):
        await trio.sleep(5)

    async with open_worker(tasks, heartbeat_s=10) as supervisor:
        # Heartbeats have happened, and the next one is ten seconds away.
        await settled(supervisor)
        job = await supervisor.jobs.enqueue("work", queue="q", lease_ttl_sec=3)
        done = await when_ended(supervisor, job.job_id)
        assert (done.status, done.attempt) == ("succeeded", 1)


@pytest.mark.full
@pytest.mark.requirement("Q8", "Q10")
async def test_a_worker_that_is_cut_off_stops_its_body_before_another_may_start_it(open_worker, database, raw, row_of):
    tasks, bodies = Tasks(), []

    @tasks.task("wait")
    async def wait(job):
        bodies.append(["begin", await raw.fetchval("SELECT clock_timestamp()"), None])
        mine = bodies[-1]
        try:
            if len(bodies) == 1:
                await trio.sleep_forever()
        finally:
            mine[2] = trio.current_time()

    with trio.fail_after(patience_s()):
        async with open_proxy(database.dsn) as proxy:
            cut_off = {"dsn": proxy.dsn, "heartbeat_s": 0.5, "default_lease_s": 4, "statement_timeout_s": 2}
            async with open_worker(tasks, connect_timeout_s=2, drain_timeout_s=0, **cut_off) as supervisor:
                job = await supervisor.jobs.enqueue("wait", queue="q", lock_key="k")
                await until(lambda: _length(bodies), lambda length: length == 1)
                proxy.freeze()
                # The server's view: from here on the lease is not renewed.
                await until(lambda: _now(bodies[0][2]), lambda at: at is not None)
                left = await raw.fetchval(
                    "SELECT extract(epoch FROM lease_expires_at - clock_timestamp()) FROM dl_jobs WHERE job_id = $1",
                    job.job_id,
                )
                assert left > 0, "the body was stopped after its lease had ended"
                async with open_worker(tasks, reaper_period_s=0.2, heartbeat_s=1, default_lease_s=4) as other:
                    done = await when_ended(other, job.job_id)
                    assert (done.status, done.attempt) == ("succeeded", 2)
                proxy.thaw()
    assert len(bodies) == 2


@pytest.mark.slow
@pytest.mark.requirement("Q8")
async def test_a_body_ends_before_its_lease_though_its_key_is_safe(stopped_without):
    left = "SELECT extract(epoch FROM lease_expires_at - clock_timestamp()) FROM dl_jobs"
    async with stopped_without("heartbeat", left) as (supervisor, [left_s]):
        assert left_s > 0, "the body was stopped after its lease had ended"
        assert supervisor.signals.keys_safe.last > lease_time()


async def _length(items):
    return len(items)


async def _now(value):
    return value


@pytest.mark.slow
@pytest.mark.requirement("Q8")
async def test_a_row_locked_by_another_session_costs_no_job_its_lease(open_worker, raw, database, row_of):
    tasks, release = Tasks(), trio.Event()

    @tasks.task("wait")
    async def wait(job):
        await release.wait()

    async with open_worker(tasks, heartbeat_s=0.3) as supervisor:
        with trio.fail_after(patience_s()):
            locked, free = [(await supervisor.jobs.enqueue("wait", queue="q")).job_id for _ in range(2)]
            for job_id in (locked, free):
                await until(lambda job_id=job_id: row_of(job_id), lambda row: row["status"] == "running")
            await raw.execute("BEGIN")
            await raw.fetchval("SELECT 1 FROM dl_jobs WHERE job_id = $1 FOR UPDATE", locked)
            before = await row_of(free)
            await until(lambda: row_of(free), lambda row: row["heartbeat_at"] > before["heartbeat_at"])
            await raw.execute("COMMIT")
            before = await row_of(locked)
            await until(lambda: row_of(locked), lambda row: row["heartbeat_at"] > before["heartbeat_at"])
            release.set()
            for job_id in (locked, free):
                assert (await when_ended(supervisor, job_id)).status == "succeeded"


@pytest.mark.slow
@pytest.mark.requirement("Q8", "Q9")
async def test_a_job_that_another_has_taken_is_stopped_and_its_end_is_void(open_worker, raw, row_of, journal_of):
    tasks, started, stopped = Tasks(), trio.Event(), trio.Event()

    @tasks.task("wait")
    async def wait(job):
        started.set()
        try:
            await trio.sleep_forever()
        finally:
            stopped.set()

    async with open_worker(tasks, heartbeat_s=0.2) as supervisor:
        with trio.fail_after(patience_s()):
            job = await supervisor.jobs.enqueue("wait", queue="q")
            await started.wait()
            # Another worker that runs the document's SQL.
            await raw.execute(
                "UPDATE dl_jobs SET status = 'queued', available_at = now() + interval '1 day' WHERE true"
            )
            await stopped.wait()
            await raw.execute("UPDATE dl_jobs SET status = 'running', attempt = attempt + 1 WHERE true")
            await supervisor.signals.recorded.wait()
        row = await row_of(job.job_id)
        assert (row["status"], row["attempt"], row["claimed_by"]) == ("running", 2, None)
        assert await journal_of(job.job_id) == ["queued", "picked"]


@pytest.mark.requirement("Q9")
async def test_a_late_success_changes_nothing(open_worker, raw, row_of, journal_of):
    tasks, started, release = Tasks(), trio.Event(), trio.Event()

    @tasks.task("deaf")
    async def deaf(job):
        started.set()
        with trio.CancelScope(shield=True):
            await release.wait()
        return "late"

    async with open_worker(tasks, heartbeat_s=50) as supervisor:
        with trio.fail_after(patience_s()):
            job = await supervisor.jobs.enqueue("deaf", queue="q")
            await started.wait()
            await raw.execute("UPDATE dl_jobs SET status = 'canceled', finished_at = now() WHERE true")
            before = dict(await row_of(job.job_id))
            release.set()
            await supervisor.signals.recorded.wait()
        assert dict(await row_of(job.job_id)) == before
        assert await journal_of(job.job_id) == ["queued", "picked"]


@pytest.mark.slow
@pytest.mark.requirement("Q10", "Q17")
async def test_a_job_whose_lease_has_ended_is_queued_again_and_runs(open_worker, raw, row_of, journal_of):
    tasks = Tasks()

    @tasks.task("quick")
    async def quick(job):
        return job.attempt

    await raw.execute("""
        INSERT INTO dl_jobs (job_id, queue, task, lock_key, status, token, attempt, lease_expires_at, claimed_by)
        VALUES (gen_random_uuid(), 'q', 'quick', 'k', 'running', 1, 1, now() - interval '1 second', 'gone:1:a')""")
    job_id = await raw.fetchval("SELECT job_id FROM dl_jobs")
    # Another process sweeps, and ends: a claim while a sweep checks the key would park the job briefly.
    async with open_worker(tasks, {"elsewhere": 1}):
        await until(partial(row_of, job_id), lambda row: row["status"] == "queued")
    async with open_worker(tasks) as supervisor:
        done = await when_ended(supervisor, job_id)
        assert (done.status, done.result, done.crashes, done.error) == ("succeeded", 2, 1, None)
        assert await journal_of(job_id) == ["requeue: lease expired", "picked", "done"]


@pytest.mark.requirement("Q10")
async def test_a_job_whose_workers_died_as_often_as_it_may_run_is_lost(open_worker, raw, journal_of):
    tasks = Tasks()
    await raw.execute("""
        INSERT INTO dl_jobs (job_id, queue, task, lock_key, status, token, attempt, max_attempts, lease_expires_at,
                             claimed_by)
        VALUES (gen_random_uuid(), 'q', 't', 'k', 'running', 1, 3, 3, now() - interval '1 second', 'gone:1:a')""")
    job_id = await raw.fetchval("SELECT job_id FROM dl_jobs")
    async with open_worker(tasks) as supervisor:
        lost = await when_ended(supervisor, job_id)
        assert lost.status == "lost"
        assert lost.error == "worker lost: the lease of gone:1:a ended in attempt 3"
        assert await journal_of(job_id) == ["lost: lease expired"]


@pytest.mark.slow
@pytest.mark.requirement("Q10")
async def test_running_jobs_with_endless_leases_are_reported_once(open_worker, raw, monkeypatch):
    monkeypatch.setattr(reaper, "SAY_ENDLESS_EVERY_S", 0)

    async def add_running(lease):
        return await raw.fetchval(f"""
            INSERT INTO dl_jobs (job_id, queue, task, lock_key, status, heartbeat_at, lease_expires_at)
            VALUES (gen_random_uuid(), 'q', 't', 'k', 'running', now() - interval '1 hour', {lease})
            RETURNING job_id::text""")

    async def told():
        """Return the log lines when two more sweeps have begun, and the first of them is over."""
        for _ in range(2):
            expired = await add_running("now() - interval '1 s'")
            ended = f"SELECT status <> 'running' FROM dl_jobs WHERE job_id = '{expired}'"
            await until(partial(raw.fetchval, ended))
        return [line for line in lines if "never expire and are not renewed" in line["event"]]

    with capture_logs() as lines:
        async with open_worker(Tasks(), {"none": 1}, reaper_period_s=0.05):
            first = await add_running("NULL")
            assert [line["jobs"] for line in await told()] == [1]
            second = await add_running("'infinity'")
            assert [line["jobs"] for line in await told()] == [1, 2]
            await raw.execute(f"DELETE FROM dl_jobs WHERE job_id = '{first}'")
            assert [line["jobs"] for line in await told()] == [1, 2]
            third = await add_running("NULL")
            [_, _, last] = await told()
    assert set(last["job_ids"]) == {second, third}

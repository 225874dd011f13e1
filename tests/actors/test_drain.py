"""A drain in this process: running jobs may finish, stopped jobs are released, and it ends in every case (Q15)."""

from __future__ import annotations

import httpx2
import pytest
import trio
import trio.testing
from conditions import patience_s, until
from proxy import open_proxy
from queue_workers import ANY_CLAIM

from dataloader import Draining, Tasks


@pytest.mark.requirement("Q15")
async def test_running_jobs_finish_and_waiting_ones_are_left_alone(open_worker, row_of):
    tasks, started, release = Tasks(), trio.Event(), trio.Event()

    @tasks.task("wait")
    async def wait(job):
        started.set()
        await release.wait()

    async with open_worker(tasks, {"q": 1}) as supervisor, trio.open_nursery() as nursery:
        with trio.fail_after(patience_s()):
            running = await supervisor.jobs.enqueue("wait", queue="q")
            await started.wait()
            waiting = await supervisor.jobs.enqueue("wait", queue="q")
            nursery.start_soon(_release_in_drain, supervisor, release)
            report = await supervisor.drain()
    assert (report.finished, report.returned, report.is_clean) == (1, 0, True)
    assert (await row_of(running.job_id))["status"] == "succeeded"
    row = await row_of(waiting.job_id)
    assert (row["status"], row["attempt"]) == ("queued", 0)


async def _release_in_drain(supervisor, release):
    await supervisor.wait_draining()
    release.set()


@pytest.mark.requirement("Q15")
async def test_a_job_stopped_by_the_deadline_is_released_with_its_attempt_refunded(open_worker, row_of, journal_of):
    tasks, started = Tasks(), trio.Event()

    @tasks.task("wait")
    async def wait(job):
        started.set()
        await trio.sleep_forever()

    async with open_worker(tasks, drain_timeout_s=0.1) as supervisor:
        with trio.fail_after(patience_s()):
            job = await supervisor.jobs.enqueue("wait", queue="q", lock_key="k")
            await started.wait()
            report = await supervisor.drain()
    assert (report.finished, report.returned, report.is_clean) == (0, 1, True)
    row = await row_of(job.job_id)
    assert (row["status"], row["attempt"], row["waits_for"], row["claimed_by"]) == ("queued", 0, None, None)
    assert await journal_of(job.job_id) == ["queued", "picked", "requeue: return"]


@pytest.mark.slow
@pytest.mark.requirement("Q15")
async def test_a_drain_ends_claims_of_a_backlog_while_slots_are_free(open_worker, raw):
    tasks, began, ran = Tasks(), trio.Event(), 0

    @tasks.task("note")
    async def note(_job):
        nonlocal ran
        ran += 1
        if ran == 200:
            began.set()

    await raw.execute(
        "INSERT INTO dl_jobs (job_id, queue, task, lock_key, keyed)"
        " SELECT gen_random_uuid(), 'q', 'note', n::text, false FROM generate_series(1, 3000) AS n"
    )
    # Claims take longer than handlers and their records, so that slots stay free.
    await raw.execute(
        "CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(0.003); RETURN NEW; END';"
        " CREATE TRIGGER wait BEFORE UPDATE ON dl_jobs FOR EACH ROW"
        " WHEN (NEW.status = 'running' AND OLD.status = 'queued') EXECUTE FUNCTION wait()"
    )
    async with open_worker(tasks, {"q": 1_000}) as supervisor:
        with trio.fail_after(60):
            await began.wait()
            report = await supervisor.drain()
    assert report.is_clean
    # The jobs of the claim that was in progress also ran.
    assert await raw.fetchval("SELECT count(*) FROM dl_jobs WHERE status = 'queued'") > 1_500


@pytest.mark.slow
@pytest.mark.requirement("Q15")
async def test_a_claim_that_was_under_way_when_the_drain_began_is_drained_too(open_worker, raw, row_of):
    tasks, ran = Tasks(), []

    @tasks.task("wait")
    async def wait(job):
        ran.append(job.job_id)
        await trio.sleep_forever()

    async with open_worker(tasks, drain_timeout_s=1) as supervisor, trio.open_nursery() as nursery:
        with trio.fail_after(patience_s()):
            await raw.execute("BEGIN")
            await raw.execute("LOCK TABLE dl_queues IN ACCESS EXCLUSIVE MODE")  # blocks every claim
            job = await supervisor.jobs.enqueue("wait", queue="q", lock_key="k")  # it must be claimed
            await until(lambda: _has_blocked_claim(raw))
            nursery.start_soon(supervisor.drain)
            await supervisor.wait_draining()
            await trio.testing.wait_all_tasks_blocked()
            await raw.execute("COMMIT")
            report = await supervisor.wait_drained()
            assert ran == [job.job_id]
            assert (report.returned, report.is_clean) == (1, True)
    row = await row_of(job.job_id)
    assert (row["status"], row["attempt"]) == ("queued", 0)


async def _has_blocked_claim(connection):
    """Return whether a claim is blocked. In a transaction, statistics are frozen until their snapshot is cleared."""
    await connection.execute("SELECT pg_stat_clear_snapshot()")
    return await connection.fetchval(
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query ~ $1", ANY_CLAIM
    )


@pytest.mark.slow
@pytest.mark.requirement("Q15")
async def test_a_draining_supervisor_takes_no_new_jobs_but_answers_and_cancels(open_worker, row_of):
    tasks, started = Tasks(), trio.Event()

    @tasks.task("wait")
    async def wait(job):
        started.set()
        await trio.sleep_forever()

    async with (
        open_worker(tasks, with_web=True) as supervisor,
        httpx2.AsyncClient(base_url=supervisor.url, timeout=10, verify=False) as client,
    ):
        with trio.fail_after(patience_s()):
            job = await supervisor.jobs.enqueue("wait", queue="q")
            await started.wait()
            assert (await client.get("/ready")).status_code == 200
            supervisor.request_drain()
            assert (await client.get("/ready")).status_code == 503
            assert (await client.get("/health")).status_code == 200
            refused = await client.post("/api/v1/jobs/trigger", json={"queue": "q", "task": "wait", "lock_key": "k"})
            assert refused.status_code == 503
            assert "retry-after" in refused.headers
            with pytest.raises(Draining):
                await supervisor.jobs.enqueue("wait", queue="q")
            shown = await client.get(f"/api/v1/jobs/{job.job_id}/status")
            assert shown.json()["status"] == "running"
            assert (await client.post(f"/api/v1/jobs/{job.job_id}/cancel")).status_code in {200, 202}
            report = await supervisor.wait_drained()
    assert (report.finished, report.returned) == (1, 0)
    assert (await row_of(job.job_id))["status"] == "canceled"


@pytest.mark.slow
@pytest.mark.requirement("Q15")
async def test_a_handler_that_swallows_its_cancel_is_reported_by_the_drain(open_worker, row_of, monkeypatch):
    monkeypatch.setattr("dataloader.supervisor.drain.BOUND_S", 0.3)
    tasks, started, release = Tasks(), trio.Event(), trio.Event()

    @tasks.task("deaf")
    async def deaf(job):
        started.set()
        with trio.CancelScope(shield=True):
            await release.wait()

    async with open_worker(tasks, drain_timeout_s=0.1) as supervisor:
        with trio.fail_after(patience_s()):
            job = await supervisor.jobs.enqueue("deaf", queue="q")
            await started.wait()
            report = await supervisor.drain()
            assert report.stuck == (str(job.job_id),)
            assert not report.is_clean
            assert (await row_of(job.job_id))["status"] == "running"
            release.set()
    assert (await row_of(job.job_id))["status"] == "succeeded"


@pytest.mark.slow
@pytest.mark.requirement("Q15")
@pytest.mark.parametrize("broken", ["cut", "freeze"])
async def test_a_drain_with_the_database_gone_ends_and_so_does_the_block(
    open_worker, resting, database, monkeypatch, broken
):
    monkeypatch.setattr("dataloader.supervisor.drain.BOUND_S", 0.5)
    tasks, started, release = Tasks(), trio.Event(), trio.Event()

    @tasks.task("wait")
    async def wait(job):
        started.set()
        await release.wait()

    async with open_proxy(database.dsn) as proxy:
        with trio.fail_after(60) as watchdog:
            async with open_worker(tasks, dsn=proxy.dsn, drain_timeout_s=0.1) as supervisor:
                await supervisor.jobs.enqueue("wait", queue="q")
                await started.wait()
                await resting(supervisor, running=1)
                getattr(proxy, broken)()
                release.set()
                began = trio.current_time()
                report = await supervisor.drain()
                assert trio.current_time() - began < 10
            took_s = trio.current_time() - began
        assert not watchdog.cancelled_caught
    assert not report.is_clean
    assert report.unrecorded == 1
    assert took_s < 20


@pytest.mark.slow
@pytest.mark.requirement("Q15")
async def test_a_clean_drain_does_not_wait_for_what_is_under_way_in_a_silent_database(
    open_worker, resting, database, monkeypatch
):
    monkeypatch.setattr("dataloader.supervisor.tree.LEAVE_S", 0.3)
    async with open_proxy(database.dsn) as proxy:
        with trio.fail_after(60):
            async with open_worker(Tasks(), dsn=proxy.dsn, reaper_period_s=0.2) as supervisor:
                await resting(supervisor)
                proxy.freeze()
                await trio.sleep(0.5)  # the reaper sends a statement, and gets no answer
                report = await supervisor.drain()
                began = trio.current_time()
            # Its write may take 42 s.
            assert trio.current_time() - began < 20
    assert report.is_clean


@pytest.mark.requirement("Q15")
async def test_a_host_that_is_cancelled_gives_its_jobs_back(open_worker, row_of):
    tasks, started, jobs = Tasks(), trio.Event(), []

    @tasks.task("wait")
    async def wait(job):
        started.set()
        await trio.sleep_forever()

    async def host():
        async with open_worker(tasks) as supervisor:
            jobs.append(await supervisor.jobs.enqueue("wait", queue="q"))
            await trio.sleep_forever()

    with trio.fail_after(patience_s()):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(host)
            await started.wait()
            nursery.cancel_scope.cancel()
    row = await row_of(jobs[0].job_id)
    assert (row["status"], row["attempt"]) == ("queued", 0)


@pytest.mark.requirement("Q15")
async def test_a_host_that_fails_gets_its_own_error_and_its_jobs_back(open_worker, row_of):
    tasks, started = Tasks(), trio.Event()

    @tasks.task("wait")
    async def wait(job):
        started.set()
        await trio.sleep_forever()

    with trio.fail_after(patience_s()), pytest.raises(ZeroDivisionError):  # noqa: PT012
        async with open_worker(tasks) as supervisor:
            job = await supervisor.jobs.enqueue("wait", queue="q")
            await started.wait()
            1 / 0  # noqa: B018 - the host's own mistake
    row = await row_of(job.job_id)
    assert (row["status"], row["attempt"]) == ("queued", 0)


@pytest.mark.slow
@pytest.mark.requirement("Q15")
async def test_progress_and_lines_of_a_stopped_job_are_kept(open_worker, raw, row_of):
    tasks, started = Tasks(), trio.Event()

    @tasks.task("wait")
    async def wait(job):
        await job.progress({"rows": 41})
        job.log.info("so far", rows=41)
        started.set()
        await trio.sleep_forever()

    async with open_worker(tasks, drain_timeout_s=0) as supervisor:
        job = await supervisor.jobs.enqueue("wait", queue="q")
        await started.wait()
    row = await row_of(job.job_id)
    assert (row["status"], row["progress"]) == ("queued", '{"rows": 41}')
    assert await raw.fetchval("SELECT count(*) FROM dl_job_events WHERE kind = 'log'") == 1

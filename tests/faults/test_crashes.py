"""Processes that are killed, databases that crash: nothing is lost, nothing runs twice at once (Q8, Q10, Q12, Q14)."""

from __future__ import annotations

import os
import signal
import subprocess
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import trio
from conditions import until
from databases import postgres_server
from proxy import open_proxy
from services import FAST

ENQUEUE = """
INSERT INTO dl_jobs (job_id, queue, task, lock_key, lease_ttl_sec, args)
SELECT gen_random_uuid(), 'q' || n % 3, 'ledger', 'key ' || n % 500, 5, jsonb_build_object('n', n)
FROM generate_series(1, $1::int) AS n
"""
OVERLAPS = """
SELECT count(*) FROM (
  SELECT began_at, max(ended_at) OVER (PARTITION BY lock_key ORDER BY began_at ROWS BETWEEN UNBOUNDED PRECEDING
                                       AND 1 PRECEDING) AS others_until
  FROM ledger) AS visits
WHERE began_at < others_until
"""


@pytest.mark.slow
@pytest.mark.requirement("Q8", "Q10")
async def test_a_job_whose_process_was_killed_runs_again_within_its_lease_and_a_sweep(serve, add, row_when, raw):
    victim = await serve(**FAST)
    job_id = await add("sleep", {"s": 3_600}, lock_key="k", lease_ttl_sec=5)
    row = await row_when(job_id, "running")
    await serve(**FAST)
    victim.process.kill()
    await raw.execute("UPDATE dl_jobs SET args = '{\"s\": 0}'")
    killed_at = trio.current_time()
    done = await row_when(job_id, "succeeded", within_s=5 + 1 + 3)
    assert trio.current_time() - killed_at < 5 + 1 + 1
    assert (done["attempt"], done["crashes"]) == (2, 1)
    # Not before the dead process's lease had ended.
    picked = await raw.fetch("SELECT ts FROM dl_job_events WHERE kind = 'picked' ORDER BY event_id")
    assert (picked[1]["ts"] - row["lease_expires_at"]).total_seconds() > 0


@pytest.mark.slow
@pytest.mark.requirement("Q12")
async def test_of_a_process_killed_at_any_moment_rows_and_success_are_there_or_neither(serve, add, raw):
    await raw.execute("CREATE TABLE target (job_id uuid, n int)")
    for _ in range(200):
        await add("fill", lease_ttl_sec=5)
    service = await serve({"q": 8}, **FAST)
    done = "SELECT count(*) FROM dl_jobs WHERE status = 'succeeded'"
    await until(lambda: raw.fetchval(done), lambda count: count >= 20)
    service.process.kill()
    await until(
        lambda: raw.fetchval("SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE '% transaction'"),
        lambda count: count == 0,
    )
    half_done = """
        SELECT count(*) FROM dl_jobs j LEFT JOIN (SELECT job_id, count(*) AS rows FROM target GROUP BY job_id) t
        USING (job_id) WHERE coalesce(t.rows, 0) <> CASE WHEN j.status = 'succeeded' THEN 20 ELSE 0 END"""
    assert await raw.fetchval(half_done) == 0
    assert 20 <= await raw.fetchval(done) < 200
    await serve({"q": 8}, **FAST)
    await until(lambda: raw.fetchval(done), lambda count: count == 200, within_s=40)
    assert await raw.fetchval("SELECT count(*) FROM target") == 4_000


@pytest.mark.slow
@pytest.mark.requirement("Q7", "Q10", "Q14")
async def test_twenty_thousand_jobs_of_two_processes_one_of_them_killed_half_way(unmeasured, serve, raw):
    await raw.execute("""
        CREATE UNLOGGED TABLE ledger (lock_key text, job_id uuid, began_at timestamptz, ended_at timestamptz);
        CREATE INDEX ON ledger (job_id)""")
    await raw.execute(ENQUEUE, 20_000)
    queues = {"q0": 8, "q1": 8, "q2": 8}
    victim, survivor = await serve(queues, **FAST), await serve(queues, **FAST)
    done = "SELECT count(*) FROM dl_jobs WHERE status = 'succeeded'"
    await until(lambda: raw.fetchval(done), lambda count: count >= 10_000, within_s=300)
    victim.process.kill()
    left = "SELECT count(*) FROM dl_jobs WHERE status IN ('queued', 'running')"
    await until(lambda: raw.fetchval(left), lambda count: count == 0, within_s=300)
    assert await raw.fetchval(done) == 20_000
    assert await raw.fetchval("SELECT count(DISTINCT job_id) FROM ledger") == 20_000
    assert await raw.fetchval("SELECT count(*) FROM ledger") == 20_000
    assert await raw.fetchval(OVERLAPS) == 0
    # Both had a share of it.
    shares = await raw.fetch(
        "SELECT count(*) FROM dl_job_events WHERE kind = 'picked' GROUP BY payload->>'worker' ORDER BY 1"
    )
    assert len(shares) == 2
    assert shares[0]["count"] > 1_000
    assert survivor.process.poll() is None


@pytest.mark.slow
@pytest.mark.requirement("Q8")
async def test_a_handler_that_does_not_stop_ends_its_process_when_its_lease_is_gone(serve, add, row_when, database):
    async with open_proxy(database.dsn) as proxy:
        service = await serve(dsn=proxy.dsn, cancel_grace_sec=0.2, **FAST)
        job_id = await add("deaf", lease_ttl_sec=3)
        await row_when(job_id, "running")
        proxy.freeze()
        assert await service.exit_code(within_s=3 + 4) == 1
        last = await service.logged("lease is gone")
        assert (last["job_id"], last["task"]) == (str(job_id), "deaf")


@pytest.mark.slow
@pytest.mark.requirement("Q8")
async def test_a_process_whose_backends_are_stopped_stops_its_job_in_time_and_runs_it_again(serve, add, raw, row_when):
    frozen = await serve(**FAST)
    job_id = await add("sleep", {"s": 3_600}, lock_key="k", lease_ttl_sec=5)
    await row_when(job_id, "running")
    pids = [
        record["pid"]
        for record in await raw.fetch(
            "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'dataloader%' AND pid <> pg_backend_pid()"
        )
    ]
    await raw.execute("UPDATE dl_jobs SET args = '{\"s\": 0}'")
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    lease_until = await raw.fetchval("SELECT lease_expires_at FROM dl_jobs")
    try:
        stopped_at = datetime.fromisoformat((await frozen.logged("the job was stopped", within_s=10))["timestamp"])
        assert stopped_at < lease_until
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    await row_when(job_id, "succeeded", within_s=20)
    picked = await raw.fetch("SELECT ts FROM dl_job_events WHERE kind = 'picked' ORDER BY event_id")
    assert len(picked) == 2
    assert picked[1]["ts"] > stopped_at


@pytest.mark.slow
@pytest.mark.requirement("Q5", "Q12")
async def test_a_database_that_crashes_under_load_costs_no_job(serve, database_of_its_own):
    database = database_of_its_own
    database.psql(
        "INSERT INTO dl_jobs (job_id, queue, task, lock_key, lease_ttl_sec)"
        " SELECT gen_random_uuid(), 'q', 'churn', 'k' || n % 50, 5 FROM generate_series(1, 1500) AS n"
    )
    service = await serve({"q": 10}, dsn=database.dsn, **FAST)
    await until(_count_of(database, "succeeded"), lambda count: count > 200)
    # The end of any backend ends all sessions; the server recovers and takes connections again.
    os.kill(int(database.psql("SELECT pid FROM pg_stat_activity WHERE application_name ~ 'recorder'")), signal.SIGKILL)
    await until(_count_of(database, "succeeded"), lambda count: count == 1_500, within_s=60)
    assert service.process.poll() is None


@pytest.fixture
def database_of_its_own():
    """A database on a server that nobody else uses."""
    with (
        TemporaryDirectory(prefix="dataloader-tests-") as data_dir,
        postgres_server(18, Path(data_dir)) as server,
        server.database("migrated") as database,
    ):
        yield database


def _count_of(database, status):
    async def count():
        try:
            return int(
                await trio.to_thread.run_sync(database.psql, f"SELECT count(*) FROM dl_jobs WHERE status = '{status}'")
            )
        except (AssertionError, subprocess.SubprocessError):
            return -1  # it is recovering

    return count

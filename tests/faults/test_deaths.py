"""Deaths: an accepted job ends or waits to run, whatever process dies (promises 1 and 4).

Processes are killed at chosen and at random moments, by signals, by native code, and by tables that are emptied while
they run. The guarantees are checked in the rows, the event histories and the ledger. MANY_JOBS is the number of jobs
that two processes share: by default 3,000; 20,000 in a full run.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections import Counter
from functools import partial

import pytest
import trio
from conditions import until
from proxy import open_proxy
from services import FAST, LEASE_S, PATIENT, PATIENT_LEASE_S, SWEEP_S, all_at_once

JOBS = int(os.environ.get("MANY_JOBS", "3000"))
VISITS = """
INSERT INTO dl_jobs (job_id, queue, task, lock_key, lease_ttl_sec, max_attempts, args)
SELECT gen_random_uuid(), 'q', 'visit', 'key ' || n % $2::int, $3, 20, jsonb_build_object('s', $4::float8)
FROM generate_series(1, $1::int) AS n
"""
MISCOUNTED = """
SELECT j.job_id, j.attempt, j.crashes, e.expired FROM dl_jobs j CROSS JOIN LATERAL (
  SELECT count(*) AS expired FROM dl_job_events e
  WHERE e.job_id = j.job_id AND e.kind = 'requeue' AND e.payload ->> 'reason' = 'lease expired') AS e
WHERE j.crashes <> e.expired OR j.attempt <> j.crashes + 1
"""
KILLED_BUT_NOT_COUNTED = """
SELECT * FROM ledger l WHERE how = 'killed' AND NOT EXISTS (
  SELECT FROM dl_job_events e WHERE e.job_id = l.job_id AND e.payload ->> 'reason' = 'lease expired'
  AND (e.payload ->> 'attempt')::int = l.attempt)
"""
NEVER_DONE = """
SELECT * FROM dl_jobs j WHERE NOT EXISTS (
  SELECT FROM ledger l WHERE l.job_id = j.job_id AND l.attempt = j.attempt AND l.how = 'returned')
"""


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


@pytest.fixture
def all_succeeded(counts):
    """Return a function that waits until every job has ended, and checks that all have succeeded."""

    async def all_succeeded(number, *, within_s=60):
        await until(counts, lambda found: found == {"succeeded": number}, within_s=within_s)

    return all_succeeded


@pytest.mark.slow
@pytest.mark.requirement("Q8", "Q10")
async def test_f01_a_job_whose_process_was_killed_runs_again_within_its_lease_and_a_sweep(serve, add, row_when, raw):
    victim = await serve(**FAST)
    job_id = await add("sleep", {"s": 3_600}, lock_key="k", lease_ttl_sec=LEASE_S)
    await row_when(job_id, "running")
    await serve(**FAST)
    await raw.execute("UPDATE dl_jobs SET args = '{\"s\": 0}'")
    victim.process.kill()
    await trio.to_thread.run_sync(victim.process.wait, 20)
    lease_until = await raw.fetchval("SELECT lease_expires_at FROM dl_jobs")
    done = await row_when(job_id, "succeeded")
    assert (done["attempt"], done["crashes"]) == (2, 1)
    # After the end of the dead process's lease, and by the next sweep.
    picked = await raw.fetch("SELECT ts FROM dl_job_events WHERE kind = 'picked' ORDER BY event_id")
    assert 0 < (picked[1]["ts"] - lease_until).total_seconds() < SWEEP_S + 8


@pytest.mark.full
@pytest.mark.requirement("S6")
async def test_a_failure_notice_lost_with_its_process_is_sent_once_by_the_next(serve, add, row_when, raw, tmp_path):
    out = tmp_path / "notices"
    code = f"import sys; open({str(out)!r}, 'a').write(sys.stdin.read() + chr(10))"
    targets = {"notify": json.dumps([{"name": "page", "argv": [sys.executable, "-c", code]}])}
    victim = await serve(**targets)

    async def watched():
        return await raw.fetchval("SELECT count(*) FROM dl_notice_watch")

    await until(watched)
    await row_when(await add("log", {}, max_attempts=1), "failed")
    victim.process.kill()
    await trio.to_thread.run_sync(victim.process.wait, 20)
    assert not out.exists()
    await serve(**targets)

    async def told():
        return out.exists() and out.read_text().splitlines()

    [notice] = await until(told, within_s=60)
    assert (json.loads(notice)["name"], json.loads(notice)["times"]) == ("log", 1)
    assert "sesame" not in notice


BEGUN_TOO_EARLY = """
SELECT * FROM ledger v JOIN dl_job_after a USING (job_id) JOIN dl_jobs p ON p.job_id = a.after_id
WHERE p.finished_at > v.began_at OR p.finished_at IS NULL
"""


@pytest.mark.slow
@pytest.mark.requirement("Q8", "Q10")
async def test_a_graph_survives_a_killed_worker_and_a_lost_job_cancels_its_dependents(
    serve, raw, ledger, kill, row_when
):
    async def add(*after, s=0, when_failed="cancel", max_attempts=20):
        return await raw.fetchval(
            "SELECT dl_enqueue('visit', jsonb_build_object('s', $1::float8), 'q', after => $2::uuid[],"
            " when_failed => $3, max_attempts => $4, lease_ttl_sec => $5)",
            s,
            after,
            when_failed,
            max_attempts,
            LEASE_S,
        )

    parts = [await add() for _ in range(3)]
    survives, dies = await add(*parts, s=3_600), await add(*parts, s=3_600, max_attempts=1)
    report, canceled = await add(survives), await add(dies)
    anyway = await add(survives, dies, when_failed="run")
    last, never = await add(report, anyway), await add(report, canceled)
    victim = await serve(**FAST)
    await until(ledger.visits, lambda visits: {survives, dies} <= {visit["job_id"] for visit in visits})
    await raw.execute("UPDATE dl_jobs SET args = '{\"s\": 0}'")
    await kill(victim)
    survivor = await serve(**FAST)
    await row_when(last, "succeeded")
    await row_when(never, "canceled")
    found = {row["job_id"]: row["status"] for row in await raw.fetch("SELECT job_id, status::text FROM dl_jobs")}
    ended_otherwise = {dies: "lost", canceled: "canceled", never: "canceled"}
    assert found == dict.fromkeys([*parts, survives, report, anyway, last], "succeeded") | ended_otherwise
    assert await raw.fetch(BEGUN_TOO_EARLY) == []
    assert await ledger.overlaps() == []
    visits = Counter(visit["job_id"] for visit in await ledger.visits())
    assert visits == dict.fromkeys([*parts, dies, report, anyway, last], 1) | {survives: 2}
    survivor.signal(signal.SIGTERM)
    assert await survivor.exit_code(within_s=20) == 0


@pytest.mark.slow
@pytest.mark.requirement("Q12")
async def test_of_a_process_killed_at_any_moment_rows_and_success_are_there_or_neither(serve, add, raw):
    await raw.execute("CREATE TABLE target (job_id uuid, n int)")
    for _ in range(80):
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
    assert 20 <= await raw.fetchval(done) < 80
    await serve({"q": 8}, **FAST)
    await until(lambda: raw.fetchval(done), lambda count: count == 80, within_s=40)
    assert await raw.fetchval("SELECT count(*) FROM target") == 1_600


@pytest.mark.full
@pytest.mark.requirement("Q7", "Q10", "Q14")
async def test_thousands_of_jobs_of_two_processes_one_of_them_killed_half_way(unmeasured, serve, raw):
    await raw.execute("""
        CREATE UNLOGGED TABLE ledger (lock_key text, job_id uuid, began_at timestamptz, ended_at timestamptz);
        CREATE INDEX ON ledger (job_id)""")
    await raw.execute(ENQUEUE, JOBS)
    queues = {"q0": 8, "q1": 8, "q2": 8}
    victim, survivor = await serve(queues, **FAST), await serve(queues, **FAST)
    done = "SELECT count(*) FROM dl_jobs WHERE status = 'succeeded'"
    await until(lambda: raw.fetchval(done), lambda count: count >= JOBS // 2, within_s=300)
    victim.process.kill()
    left = "SELECT count(*) FROM dl_jobs WHERE status IN ('queued', 'running')"
    await until(lambda: raw.fetchval(left), lambda count: count == 0, within_s=300)
    assert await raw.fetchval(done) == JOBS
    assert await raw.fetchval("SELECT count(DISTINCT job_id) FROM ledger") == JOBS
    assert await raw.fetchval("SELECT count(*) FROM ledger") == JOBS
    assert await raw.fetchval(OVERLAPS) == 0
    # Both have run some of them.
    shares = await raw.fetch(
        "SELECT count(*) FROM dl_job_events WHERE kind = 'picked' GROUP BY payload->>'worker' ORDER BY 1"
    )
    assert len(shares) == 2
    assert shares[0]["count"] > JOBS // 20
    assert survivor.process.poll() is None


@pytest.mark.full
@pytest.mark.requirement("Q7", "Q8", "Q10", "Q12", "Q14")
async def test_f02_replicas_that_are_killed_one_after_the_other_lose_no_job(
    unmeasured, serve, raw, ledger, kill, all_succeeded
):
    replicas = await all_at_once(*[partial(serve, {"q": 5}, **PATIENT)] * 3)
    await raw.execute(VISITS, 900, 60, PATIENT_LEASE_S, 0.4)

    async def replace():
        replicas.append(await serve({"q": 5}, **PATIENT))

    async def at_work():
        pids = {visit["pid"] for visit in await ledger.visits() if visit["ended_at"] is None}
        return [replica for replica in replicas if replica.process.pid in pids]

    async with trio.open_nursery() as nursery:
        for _ in range(6):
            await trio.sleep(random.uniform(0.5, 1.5))
            victim = random.choice(await until(at_work))
            replicas.remove(victim)
            await kill(victim)
            nursery.start_soon(replace)
    await all_succeeded(900, within_s=240)
    assert await ledger.overlaps() == []
    ends = Counter(visit["how"] for visit in await ledger.visits())
    assert ends.keys() == {"killed", "returned"}
    assert ends["killed"] >= 6
    assert await raw.fetch(KILLED_BUT_NOT_COUNTED) == []
    assert await raw.fetch(MISCOUNTED) == []
    assert await raw.fetch(NEVER_DONE) == []


@pytest.mark.slow
@pytest.mark.requirement("Q8", "Q10")
async def test_f03_a_job_of_a_claimer_killed_before_the_reply_runs_after_its_lease(
    serve, add, raw, ledger, kill, row_when, database
):
    async with open_proxy(database.dsn) as proxy:
        claimer = await serve(dsn=proxy.dsn, poll_sec=3_600)
        proxy.freeze_at("locks", b"its claim")
        job_id = await add("visit", lock_key="its claim", lease_ttl_sec=LEASE_S)
        claimed = await row_when(job_id, "running")
        await kill(claimer)
        await serve(**FAST)
        ready_at = await raw.fetchval("SELECT clock_timestamp()")
        row = await row_when(job_id, "succeeded")
    assert (row["attempt"], row["crashes"]) == (2, 1)
    [visit] = await ledger.visits(job_id)
    assert visit["attempt"] == 2
    assert visit["began_at"] > claimed["lease_expires_at"]
    assert (visit["began_at"] - max(claimed["lease_expires_at"], ready_at)).total_seconds() < SWEEP_S + 8


@pytest.mark.slow
@pytest.mark.requirement("Q7", "Q8")
async def test_f03_a_claim_whose_reply_was_lost_is_released_and_repeated(serve, add, raw, ledger, row_when, database):
    async with open_proxy(database.dsn) as proxy:
        await serve(dsn=proxy.dsn, poll_sec=3_600)
        proxy.freeze_at("locks", b"its claim")
        # Its lease is longer than the test, so that the reaper does not find it.
        job_id = await add("visit", lock_key="its claim", lease_ttl_sec=600)
        claimed = await row_when(job_id, "running")
        proxy.cut("locks")
        proxy.thaw()
        row = await row_when(job_id, "succeeded")
    assert row["token"] != claimed["token"]
    assert (row["attempt"], row["refunds"], row["crashes"]) == (1, 1, 0)
    assert [visit["attempt"] for visit in await ledger.visits(job_id)] == [1]
    reasons = "SELECT payload ->> 'reason' FROM dl_job_events WHERE job_id = $1 AND kind = 'requeue'"
    assert [record[0] for record in await raw.fetch(reasons, job_id)] == ["the claim's reply was lost"]


@pytest.mark.full
@pytest.mark.requirement("Q8", "Q10", "Q12")
async def test_f04_a_job_runs_again_if_its_process_dies_before_recording_the_outcome(
    serve, add, raw, ledger, kill, row_when, database
):
    async with open_proxy(database.dsn) as proxy:
        doer = await serve(dsn=proxy.dsn, **FAST)
        proxy.freeze("recorder")
        job_id = await add("visit", lease_ttl_sec=LEASE_S)
        await until(ledger.visits, lambda visits: visits and visits[0]["how"] == "returned")
        left = await row_when(job_id, "running", within_s=0)
        await kill(doer)
        await serve(**FAST)
        row = await row_when(job_id, "succeeded")
    assert (row["attempt"], row["crashes"], row["result"]) == (2, 1, "2")
    first, second = await ledger.visits(job_id)
    assert (first["how"], second["how"]) == ("returned", "returned")
    assert second["began_at"] > left["lease_expires_at"] > first["ended_at"]


@pytest.mark.slow
@pytest.mark.requirement("Q15")
async def test_an_error_that_breaks_the_event_loop_is_the_last_line_of_the_log(serve, add):
    await add("internal error")
    service = await serve(ready=None)
    assert await service.exit_code(within_s=30) == 1
    last = service.lines[-1]
    assert last["level"] == "critical"
    assert last["event"].startswith("ended by an unexpected error")
    assert "LookupError: password=*** is unknown" in last["exception"]
    assert "no JSON" not in {line["level"] for line in service.lines}


@pytest.mark.slow
@pytest.mark.requirement("Q10")
async def test_f05_f20_a_job_that_kills_its_process_each_time_is_lost_and_others_succeed(
    serve, add, raw, ledger, row_when, counts, metric
):
    poison = await add("segmentation fault", lease_ttl_sec=3, max_attempts=2)
    for _ in range(20):
        await add("visit", {"s": 0.1}, lease_ttl_sec=LEASE_S)
    for _ in range(2):
        service = await serve({"q": 2}, ready=None, **FAST)
        assert await service.exit_code(within_s=30) == -signal.SIGSEGV
        said = [line["event"] for line in service.lines]
        assert "Fatal Python error: Segmentation fault\n" in said
        assert any("in segmentation_fault" in line for line in said)
        await ledger.died(service.process.pid)
    last = await serve({"q": 2}, **FAST)
    row = await row_when(poison, "lost")
    assert (row["attempt"], row["crashes"]) == (2, 2)
    assert row["error"].startswith("worker lost: the lease of ")
    assert row["finished_at"] is not None
    # Without the claims that encountered a check of the key, which are not attempts.
    told = """
        SELECT kind, payload ->> 'reason', payload ->> 'attempt' FROM dl_job_events
        WHERE job_id = $1 AND payload ->> 'reason' IS DISTINCT FROM 'lock_key' ORDER BY event_id"""
    assert [tuple(record) for record in await raw.fetch(told, poison)] == [
        ("picked", None, "1"),
        ("requeue", "lease expired", "1"),
        ("picked", None, "2"),
        ("lost", "lease expired", "2"),
    ]
    await until(counts, lambda found: found == {"lost": 1, "succeeded": 20})
    assert last.process.poll() is None
    assert await metric(last, 'dataloader_jobs_taken_back_total{queue="q",status="lost"}') == 1
    assert await ledger.overlaps() == []


@pytest.mark.full
@pytest.mark.requirement("Q15")
async def test_f10_a_sigterm_at_any_moment_while_claims_flow_leaves_no_row_running(
    unmeasured, serve, raw, ledger, counts, database, all_succeeded
):
    async def at_work():
        return {record["pid"] for record in await raw.fetch("SELECT DISTINCT pid FROM ledger")}

    async with open_proxy(database.dsn) as proxy:
        for _ in range(3):
            services = await all_at_once(*[partial(serve, {"q": 8}, dsn=proxy.dsn)] * 2)
            await raw.execute(VISITS, 600, 600, 60, 0.05)
            # Now a claim is in progress at almost any time.
            proxy.delay_s, proxy.jitter_s = 0.01, 0.03
            pids = {service.process.pid for service in services}
            await until(at_work, pids.issubset)
            for service in services:
                await trio.sleep(random.uniform(0, 0.3))
                service.signal(signal.SIGTERM)
            assert [await service.exit_code(within_s=60) for service in services] == [0, 0]
            proxy.delay_s = proxy.jitter_s = 0
            assert (await counts()).keys() == {"queued", "succeeded"}
    await serve({"q": 30})
    await all_succeeded(1_800, within_s=240)
    # No job ran twice: each claimed one has run, or was released before it began, with its attempt.
    assert [visit["how"] for visit in await ledger.visits()] == ["returned"] * 1_800
    assert await raw.fetch("SELECT * FROM dl_jobs WHERE attempt <> 1") == []


@pytest.mark.slow
async def test_f46_tables_restored_under_live_workers_stop_only_the_removed_jobs(
    serve, add, raw, ledger, row_when, counts, metric
):
    gone = [await add("visit", {"s": 3_600}, lock_key=f"gone {n}", lease_ttl_sec=LEASE_S) for n in range(2)]
    kept = [await add("visit", {"s": 3_600}, lock_key=f"kept {n}", lease_ttl_sec=LEASE_S) for n in range(2)]
    await raw.execute("CREATE TABLE backup AS SELECT * FROM dl_jobs WHERE lock_key LIKE 'kept %'")
    await raw.execute("""UPDATE backup SET args = '{"s": 0}'""")
    first = await serve({"q": 4, "flow": 4, "first": 1}, **FAST)
    await until(ledger.visits, lambda visits: len(visits) == 4)
    second = await serve({"q": 4, "flow": 4, "second": 1}, **FAST)
    await raw.execute("""
        INSERT INTO dl_jobs (job_id, queue, task, lock_key, lease_ttl_sec)
        SELECT gen_random_uuid(), 'flow', 'churn', gen_random_uuid()::text, 5 FROM generate_series(1, 400)""")
    await until(counts, lambda found: found.get("succeeded", 0) >= 20)
    await raw.execute("BEGIN; TRUNCATE dl_jobs CASCADE; INSERT INTO dl_jobs SELECT * FROM backup; COMMIT")
    visits = await until(ledger.visits, lambda visits: all(visit["ended_at"] for visit in visits[:4]))
    assert {(visit["job_id"], visit["how"]) for visit in visits[:4]} == {(job, "Cancelled") for job in gone + kept}
    for job in kept:
        assert (await row_when(job, "succeeded"))["attempt"] == 1
    assert await ledger.overlaps() == []
    assert await metric(first, "dataloader_leases_lost_total") >= 4
    for queue in ("first", "second"):
        await row_when(await add("quick", queue=queue), "succeeded")
    assert await counts() == {"succeeded": 4}
    for service in (first, second):
        service.signal(signal.SIGTERM)
        assert await service.exit_code(within_s=20) == 0

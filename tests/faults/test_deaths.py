"""Deaths: an accepted job ends or waits to run, whatever dies (promises 1 and 4).

Processes are killed at chosen and at random moments, by signals, by native code, and by tables that are emptied under
them. What must hold is read from the rows, the journal and the ledger.
"""

from __future__ import annotations

import random
import signal
from collections import Counter
from functools import partial

import pytest
import trio
from conditions import IDLE_LOCK_SESSIONS, until
from proxy import open_proxy
from services import FAST, LEASE_S, SWEEP_S, all_at_once

pytestmark = pytest.mark.slow

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


@pytest.fixture
def all_succeeded(counts):
    """Waits until every job has ended, and all have succeeded."""

    async def all_succeeded(number, *, within_s=60):
        await until(counts, lambda found: found == {"succeeded": number}, within_s=within_s)

    return all_succeeded


@pytest.mark.requirement("Q7", "Q8", "Q10", "Q12", "Q14")
@pytest.mark.full
async def test_f02_replicas_that_are_killed_one_after_the_other_lose_no_job(
    unmeasured, serve, raw, ledger, kill, all_succeeded
):
    replicas = await all_at_once(*[partial(serve, {"q": 5}, **FAST)] * 3)
    await raw.execute(VISITS, 300, 60, LEASE_S, 0.4)

    async def replace():
        replicas.append(await serve({"q": 5}, **FAST))

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
    await all_succeeded(300)
    assert await ledger.overlaps() == []
    ends = Counter(visit["how"] for visit in await ledger.visits())
    assert ends.keys() == {"killed", "returned"}
    assert ends["killed"] >= 6
    assert await raw.fetch(KILLED_BUT_NOT_COUNTED) == []
    assert await raw.fetch(MISCOUNTED) == []
    assert await raw.fetch(NEVER_DONE) == []


@pytest.mark.requirement("Q8", "Q10")
async def test_f03_a_job_whose_claimer_was_killed_before_it_read_the_reply_runs_after_one_lease_and_a_sweep(
    serve, add, raw, ledger, kill, row_when, database
):
    async with open_proxy(database.dsn) as proxy:
        claimer = await serve(dsn=proxy.dsn, poll_sec=3_600, **FAST)
        await until(lambda: raw.fetchval(IDLE_LOCK_SESSIONS), lambda count: count == 1)
        proxy.freeze("locks", answers_only=True)
        job_id = await add("visit", lease_ttl_sec=LEASE_S)
        claimed = await row_when(job_id, "running")
        await kill(claimer)
        await serve(**FAST)
        row = await row_when(job_id, "succeeded", within_s=LEASE_S + SWEEP_S + 4)
    assert (row["attempt"], row["crashes"]) == (2, 1)
    [visit] = await ledger.visits(job_id)
    assert visit["attempt"] == 2
    waited_s = (visit["began_at"] - claimed["lease_expires_at"]).total_seconds()
    assert 0 < waited_s < SWEEP_S + 3


@pytest.mark.requirement("Q7", "Q8")
async def test_f03_a_claim_whose_reply_was_lost_with_its_connection_is_given_back_and_made_again(
    serve, add, raw, ledger, row_when, database
):
    async with open_proxy(database.dsn) as proxy:
        await serve(dsn=proxy.dsn, poll_sec=3_600)
        await until(lambda: raw.fetchval(IDLE_LOCK_SESSIONS), lambda count: count == 1)
        proxy.freeze("locks", answers_only=True)
        # Its lease outlives the test: not the reaper is to find it.
        job_id = await add("visit", lease_ttl_sec=600)
        claimed = await row_when(job_id, "running")
        proxy.cut("locks")
        proxy.thaw()
        row = await row_when(job_id, "succeeded")
    assert row["token"] != claimed["token"]
    assert (row["attempt"], row["refunds"], row["crashes"]) == (1, 1, 0)
    assert [visit["attempt"] for visit in await ledger.visits(job_id)] == [1]
    reasons = "SELECT payload ->> 'reason' FROM dl_job_events WHERE job_id = $1 AND kind = 'requeue'"
    assert [record[0] for record in await raw.fetch(reasons, job_id)] == ["the claim's reply was lost"]


@pytest.mark.requirement("Q8", "Q10", "Q12")
@pytest.mark.full
async def test_f04_a_process_that_is_killed_before_it_has_recorded_what_was_done_has_it_done_again(
    serve, add, raw, ledger, kill, row_when, database
):
    async with open_proxy(database.dsn) as proxy:
        doer = await serve(dsn=proxy.dsn, **FAST)
        job_id = await add("visit", {"s": 0.5}, lease_ttl_sec=LEASE_S)
        await until(ledger.visits)
        proxy.freeze("recorder")
        await until(ledger.visits, lambda visits: visits[0]["how"] == "returned")
        left = await row_when(job_id, "running", within_s=0)
        await kill(doer)
        await serve(**FAST)
        row = await row_when(job_id, "succeeded", within_s=LEASE_S + SWEEP_S + 4)
    assert (row["attempt"], row["crashes"], row["result"]) == (2, 1, "2")
    first, second = await ledger.visits(job_id)
    assert (first["how"], second["how"]) == ("returned", "returned")
    assert second["began_at"] > left["lease_expires_at"] > first["ended_at"]


@pytest.mark.requirement("Q10")
async def test_f05_f20_a_job_that_kills_its_process_each_time_is_lost_in_the_end_and_the_others_of_its_queue_succeed(
    serve, add, raw, ledger, row_when, counts
):
    poison = await add("segmentation fault", lease_ttl_sec=3, max_attempts=2)
    for _ in range(20):
        await add("visit", {"s": 0.1}, lease_ttl_sec=LEASE_S)
    for _ in range(2):
        service = await serve({"q": 2}, ready=None, **FAST)
        assert await service.exit_code(within_s=30) == -signal.SIGSEGV
        await ledger.died(service.process.pid)
    last = await serve({"q": 2}, **FAST)
    row = await row_when(poison, "lost")
    assert (row["attempt"], row["crashes"]) == (2, 2)
    assert row["error"].startswith("worker lost: the lease of ")
    assert row["finished_at"] is not None
    told = """
        SELECT kind, payload ->> 'reason', payload ->> 'attempt' FROM dl_job_events
        WHERE job_id = $1 ORDER BY event_id"""
    assert [tuple(record) for record in await raw.fetch(told, poison)] == [
        ("picked", None, "1"),
        ("requeue", "lease expired", "1"),
        ("picked", None, "2"),
        ("lost", "lease expired", "2"),
    ]
    await until(counts, lambda found: found == {"lost": 1, "succeeded": 20})
    assert last.process.poll() is None
    assert await ledger.overlaps() == []


@pytest.mark.requirement("Q15")
@pytest.mark.full
async def test_f10_a_sigterm_at_any_moment_while_claims_flow_leaves_no_row_running(
    unmeasured, serve, raw, ledger, counts, database, all_succeeded
):
    await raw.execute(VISITS, 1_000, 1_000, 60, 0.05)

    async def at_work():
        return {record["pid"] for record in await raw.fetch("SELECT DISTINCT pid FROM ledger")}

    async with open_proxy(database.dsn) as proxy:
        for _ in range(3):
            services = await all_at_once(*[partial(serve, {"q": 8}, dsn=proxy.dsn)] * 2)
            # Now some claim is under way at almost any time.
            proxy.delay_s, proxy.jitter_s = 0.01, 0.03
            pids = {service.process.pid for service in services}
            await until(at_work, pids.issubset)
            for service in services:
                await trio.sleep(random.uniform(0, 0.3))
                service.signal(signal.SIGTERM)
            assert [await service.exit_code(within_s=20) for service in services] == [0, 0]
            proxy.delay_s = proxy.jitter_s = 0
            assert (await counts()).keys() == {"queued", "succeeded"}
    await serve({"q": 30})
    await all_succeeded(1_000)
    # Nothing ran twice: what was claimed has run, or has gone back before it began, with its attempt.
    assert [visit["how"] for visit in await ledger.visits()] == ["returned"] * 1_000
    assert await raw.fetch("SELECT * FROM dl_jobs WHERE attempt <> 1") == []


async def test_f46_tables_that_are_emptied_and_restored_under_live_workers_stop_what_is_gone_and_nothing_else(
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

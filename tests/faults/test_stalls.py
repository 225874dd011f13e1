"""Stalls: never two concurrent runs of a job or a key, and a late write changes nothing (promises 2 and 3).

Processes that are stopped, blocked or cut off resume later, when others have continued with their jobs. Two processes,
another service and lost sessions compete for keys; cancels race with everything.
"""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from datetime import UTC, datetime
from functools import partial

import pytest
import trio
from conditions import until
from databases import raw_connection
from foreign import BACK_OFF, CLAIM, FINISH, LOCK, UNLOCK
from journal import step_of
from proxy import open_proxy
from services import FAST, LEASE_S, PATIENT, PATIENT_LEASE_S, SWEEP_S, all_at_once

from dataloader.jobs.states import TRANSITIONS, Status, Step

TAKEN_OVER_S = PATIENT_LEASE_S + SWEEP_S + 30
BRIEF = "UPDATE dl_jobs SET args = '{\"s\": 0}' WHERE job_id = $1"
END_SESSIONS = """
SELECT count(*) FILTER (WHERE pg_terminate_backend(pid)) FROM pg_stat_activity
WHERE datname = current_database() AND application_name LIKE '% ' || $1 AND pid = ANY (coalesce($2::int[], ARRAY[pid]))
"""
HOLDERS = """
SELECT array_agg(DISTINCT pid) FROM pg_locks
WHERE locktype = 'advisory' AND granted AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""

FOREIGN_PID = 0

STEPS = {Step.CLAIM, Step.SUCCEED, Step.FAIL, Step.CANCEL, Step.PARK, Step.RETRY, Step.REVIVE}
"""All transitions of jobs whose processes live."""


@pytest.fixture
def story_of(raw):
    """Return a function that reads the row and the events of a job, without the heartbeats of its current run."""

    async def story_of(job_id):
        row = dict(await raw.fetchrow("SELECT * FROM dl_jobs WHERE job_id = $1", job_id))
        if row["status"] == "running":
            del row["heartbeat_at"], row["lease_expires_at"]
        events = await raw.fetch("SELECT * FROM dl_job_events WHERE job_id = $1 ORDER BY event_id", job_id)
        return row, [tuple(event) for event in events]

    return story_of


@pytest.fixture
def goes_on(add, row_when):
    """Return a function that checks that a process, the only one with the queue `own`, still claims jobs."""

    async def goes_on(service):
        await row_when(await add("quick", queue="own", lease_ttl_sec=LEASE_S), "succeeded", within_s=30)
        assert service.process.poll() is None

    return goes_on


@pytest.mark.slow
@pytest.mark.requirement("Q8", "Q9")
async def test_f06_writes_of_a_process_suspended_beyond_its_leases_change_nothing(
    serve, add, raw, ledger, row_when, metric, story_of, goes_on
):
    stopped = await serve({"q": 2, "own": 1}, cancel_grace_sec=60, **FAST)
    still_running = await add("visit", {"s": 3_600}, lease_ttl_sec=LEASE_S)
    ended = await add("late", {"s": 3_600, "linger": 1.5}, lease_ttl_sec=LEASE_S)
    await until(ledger.visits, lambda visits: len(visits) == 2)
    await serve({"q": 2}, **FAST)
    await raw.execute(BRIEF, ended)
    stopped.signal(signal.SIGSTOP)
    await row_when(ended, "succeeded", within_s=TAKEN_OVER_S)
    await until(partial(ledger.visits, still_running), lambda visits: len(visits) == 2)
    before = await story_of(still_running), await story_of(ended)
    assert [row["attempt"] for row, _ in before] == [2, 2]
    stopped.signal(signal.SIGCONT)
    [old, _new] = await until(partial(ledger.visits, still_running), lambda visits: visits[0]["ended_at"])
    assert old["how"] == "Cancelled"
    [old, _new] = await until(partial(ledger.visits, ended), lambda visits: visits[0]["ended_at"])
    assert old["how"] == "returned"
    await stopped.logged("late outcomes had no effect: another worker has the jobs now")
    await goes_on(stopped)
    # Two runs, each with a void outcome, or known to be lost before it had one.
    void = await metric(stopped, "dataloader_writes_fenced_total")
    assert void >= 1
    assert void + await metric(stopped, "dataloader_leases_lost_total") >= 2
    assert (await story_of(still_running), await story_of(ended)) == before


@pytest.mark.full
@pytest.mark.requirement("Q8")
async def test_f06_a_suspended_process_continues_if_its_handlers_stop_promptly(
    serve, add, raw, ledger, row_when, goes_on
):
    service = await serve({"q": 8, "own": 1}, cancel_grace_sec=5, **FAST)
    jobs = [await add("visit", {"s": 3_600}, lease_ttl_sec=LEASE_S) for _ in range(8)]
    await until(ledger.visits, lambda visits: len(visits) == 8)
    service.signal(signal.SIGSTOP)
    for job in jobs:
        await raw.execute(BRIEF, job)
    over = "SELECT max(lease_expires_at) + interval '7 s' < now() FROM dl_jobs"
    await until(partial(raw.fetchval, over))
    service.signal(signal.SIGCONT)
    for job in jobs:
        # Whether the first run counts depends on which was noticed first: the end of the lease, or the loss of the key.
        await row_when(job, "succeeded")
        assert [visit["how"] for visit in await ledger.visits(job)] == ["Cancelled", "returned"]
    assert await ledger.overlaps() == []
    await goes_on(service)


@pytest.mark.full
@pytest.mark.requirement("Q8", "Q9")
async def test_f07_a_handler_that_blocks_the_loop_beyond_its_lease_is_named_and_fenced(
    serve, add, raw, ledger, row_when, metric, story_of, goes_on, tmp_path
):
    blocked = await serve({"q": 1, "own": 1}, cancel_grace_sec=120, **FAST)
    job_id = await add("visit", {"block_until": str(tmp_path / "end")}, lease_ttl_sec=LEASE_S)
    await until(ledger.visits)
    await raw.execute(BRIEF, job_id)
    await serve({"q": 1}, **FAST)
    row = await row_when(job_id, "succeeded", within_s=TAKEN_OVER_S)
    assert (row["attempt"], row["result"]) == (2, "2")
    before = await story_of(job_id)
    assert (await ledger.visits(job_id))[0]["ended_at"] is None
    (tmp_path / "end").touch()
    await blocked.logged("late outcomes had no effect: another worker has the jobs now")
    [old, _new] = await ledger.visits(job_id)
    assert old["how"] == "returned"

    async def stalls():
        return [line["stack"] for line in [*blocked.lines] if line["event"] == "the event loop is blocked"]

    await until(stalls, lambda stacks: any("service_tasks.py" in stack and "in visit" in stack for stack in stacks))
    assert await metric(blocked, "dataloader_loop_stall_seconds_count") >= 1
    assert await metric(blocked, "dataloader_loop_stall_seconds_sum") > LEASE_S
    assert await metric(blocked, "dataloader_writes_fenced_total") >= 1
    await goes_on(blocked)
    assert await story_of(job_id) == before


@pytest.mark.full
@pytest.mark.requirement("Q8")
async def test_f13_a_heartbeat_whose_connection_was_ended_costs_no_job_its_run(
    serve, add, raw, ledger, row_when, tmp_path
):
    await serve(**PATIENT)
    job_id = await add("visit", {"until": str(tmp_path / "end")}, lease_ttl_sec=PATIENT_LEASE_S)
    sessions = """
        SELECT array_agg(pid) FROM pg_stat_activity
        WHERE datname = current_database() AND application_name LIKE '% heartbeat'"""
    row = await row_when(job_id, "running")
    await until(partial(raw.fetchval, "SELECT heartbeat_at > $1 FROM dl_jobs", row["heartbeat_at"]))
    former = await raw.fetchval(sessions)
    assert await raw.fetchval(END_SESSIONS, "heartbeat", None) == 1
    await until(partial(raw.fetchval, "SELECT heartbeat_at > $1 FROM dl_jobs", row["lease_expires_at"]))
    (tmp_path / "end").touch()
    done = await row_when(job_id, "succeeded")
    assert (done["attempt"], done["crashes"]) == (1, 0)
    assert [visit["how"] for visit in await ledger.visits(job_id)] == ["returned"]
    assert await raw.fetchval(sessions) not in (None, former)


@pytest.mark.full
@pytest.mark.requirement("Q7", "Q8", "Q9")
async def test_f17_f29_a_worker_cut_off_stops_its_handlers_before_others_run_its_jobs(
    serve, add, raw, ledger, row_when, metric, story_of, goes_on, database
):
    async with open_proxy(database.dsn) as proxy:
        cut_off = await serve({"q": 2, "own": 1}, dsn=proxy.dsn, **PATIENT)
        still_running = await add("visit", {"s": 3_600}, lease_ttl_sec=PATIENT_LEASE_S)
        ended = await add("late", {"s": 3_600}, lease_ttl_sec=PATIENT_LEASE_S)
        await until(ledger.visits, lambda visits: len(visits) == 2)
        await serve({"q": 2}, **PATIENT)
        await raw.execute(BRIEF, ended)
        proxy.freeze()
        rows = await raw.fetch("SELECT job_id, lease_expires_at FROM dl_jobs")
        for job_id, lease_until in rows:
            visits = await until(partial(ledger.visits, job_id), lambda visits: visits[0]["ended_at"])
            assert visits[0]["ended_at"] < lease_until
        await row_when(ended, "succeeded", within_s=TAKEN_OVER_S)
        await until(partial(ledger.visits, still_running), lambda visits: len(visits) == 2)
        for job_id, lease_until in rows:
            assert (await ledger.visits(job_id))[1]["began_at"] > lease_until
        before = await story_of(still_running), await story_of(ended)
        assert [row["attempt"] for row, _ in before] == [2, 2]
        proxy.thaw()
        await cut_off.logged("late outcomes had no effect: another worker has the jobs now")
        await goes_on(cut_off)
        assert await metric(cut_off, "dataloader_writes_fenced_total") == 2
        assert (await story_of(still_running), await story_of(ended)) == before
    assert await ledger.overlaps() == []


@pytest.mark.full
@pytest.mark.requirement("Q8")
async def test_a_process_with_stopped_backends_stops_its_job_in_time_and_runs_it_again(serve, add, raw, row_when):
    frozen = await serve(**PATIENT)
    job_id = await add("sleep", {"s": 3_600}, lock_key="k", lease_ttl_sec=PATIENT_LEASE_S)
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
        stopped_at = datetime.fromisoformat((await frozen.logged("the job was stopped"))["timestamp"])
        assert stopped_at < lease_until
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    await row_when(job_id, "succeeded")
    picked = await raw.fetch("SELECT ts FROM dl_job_events WHERE kind = 'picked' ORDER BY event_id")
    assert len(picked) == 2
    assert picked[1]["ts"] > stopped_at


@pytest.mark.full
@pytest.mark.requirement("Q7", "Q8")
async def test_a_job_with_a_short_lease_stops_none_that_have_long_ones(serve, add, ledger, row_when):
    await serve()
    patient = await add("visit", {"s": 4}, lease_ttl_sec=60)
    await until(ledger.visits)
    hasty = await add("visit", {"s": 4}, lease_ttl_sec=2 * LEASE_S)
    for job_id in (patient, hasty):
        row = await row_when(job_id, "succeeded")
        assert (row["attempt"], row["refunds"]) == (1, 0)
        assert [visit["how"] for visit in await ledger.visits(job_id)] == ["returned"]


@pytest.mark.slow
@pytest.mark.requirement("Q7")
async def test_a_terminated_lock_session_loses_no_key_to_a_waiting_worker(serve, add, raw, ledger, row_when, tmp_path):
    keys, lease_s = [f"key {n}" for n in range(4)], PATIENT_LEASE_S
    await all_at_once(partial(serve, {"q": 4}, **PATIENT), partial(serve, {"others": 4}, **PATIENT))
    end = {"until": str(tmp_path / "end")}
    holding = [await add("visit", end, lock_key=key, lease_ttl_sec=lease_s) for key in keys]
    await until(ledger.visits, lambda visits: len(visits) == 4)
    waiting = [await add("visit", queue="others", lock_key=key, lease_ttl_sec=lease_s) for key in keys]
    for job_id in waiting:
        await until(partial(raw.fetchval, "SELECT waits_for = 'lock' FROM dl_jobs WHERE job_id = $1", job_id))
    [holder] = await raw.fetchval(HOLDERS)
    assert await raw.fetchval(END_SESSIONS, "locks", [holder]) == 1
    # The waiting job is checked now, not at the next sweep.
    await raw.execute("UPDATE dl_jobs SET waits_for = NULL, available_at = now() WHERE waits_for = 'lock'")
    await trio.sleep(3)
    (tmp_path / "end").touch()
    for job_id in holding + waiting:
        row = await row_when(job_id, "succeeded")
        assert (row["attempt"], row["crashes"]) == (1, 0)
    assert await ledger.overlaps() == []
    visits = {visit["job_id"]: visit for visit in await ledger.visits()}
    for first, then in zip(holding, waiting, strict=True):
        assert visits[then]["began_at"] > visits[first]["ended_at"]


@pytest.mark.full
@pytest.mark.requirement("Q7")
async def test_f15_terminated_lock_sessions_never_let_two_jobs_of_a_key_run(unmeasured, serve, raw, ledger, counts):
    await all_at_once(*[partial(serve, {"q": 4}, **PATIENT)] * 2)
    await raw.execute("""
        INSERT INTO dl_jobs (job_id, queue, task, lock_key, keyed, lease_ttl_sec, args)
        SELECT gen_random_uuid(), 'q', 'visit', 'key ' || n % 6, n % 4 > 0, 15, '{"s": 0.2}'
        FROM generate_series(1, 400) AS n""")
    ended = 0
    with trio.fail_after(60):
        while ended < 10:
            await trio.sleep(random.uniform(0.1, 0.5))
            ended += await raw.fetchval(END_SESSIONS, "locks", None)
    assert (await counts()).get("queued", 0) > 0, "the storm was over before the sessions were ended"
    await until(counts, lambda found: found == {"succeeded": 400}, within_s=180)
    assert await ledger.overlaps() == []
    assert await raw.fetch("SELECT * FROM dl_jobs WHERE attempt <> 1 OR crashes > 0") == []


@pytest.mark.slow
@pytest.mark.requirement("Q1", "Q7")
async def test_a_foreign_service_and_ours_never_run_two_jobs_of_a_key_concurrently(
    unmeasured, serve, raw, ledger, counts, database
):
    async def serve_as_a_foreigner():
        async with raw_connection(database.dsn) as own:
            while True:
                claimed = await own.fetchrow(CLAIM)
                if claimed is None:
                    await trio.sleep(0.05)
                elif await own.fetchval(LOCK, claimed["lock_key"]):
                    note = "INSERT INTO ledger (job_id, lock_key, attempt, pid) VALUES ($1, $2, $3, $4) RETURNING visit"
                    visit = await own.fetchval(note, *claimed, FOREIGN_PID)
                    await trio.sleep(0.01)
                    await own.execute(
                        "UPDATE ledger SET ended_at = clock_timestamp(), how = 'returned' WHERE visit = $1", visit
                    )
                    await own.execute(FINISH, claimed["job_id"])
                    await own.execute(UNLOCK, claimed["lock_key"])
                else:
                    await own.execute(BACK_OFF, claimed["job_id"], 1.0)
                    await trio.sleep(0.05)

    await serve({"q": 4}, **PATIENT | {"claim_backoff_sec": 1})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_as_a_foreigner)
        nursery.start_soon(serve_as_a_foreigner)
        await raw.execute("""
            INSERT INTO dl_jobs (job_id, queue, task, lock_key, keyed, lease_ttl_sec, max_attempts, args)
            SELECT gen_random_uuid(), 'q', 'visit', 'key ' || n % 6, n % 2 = 0, 15, 1000, '{"s": 0.01}'
            FROM generate_series(1, 300) AS n;
            UPDATE dl_jobs SET lock_key = job_id::text WHERE NOT keyed
            """)
        await until(counts, lambda found: found == {"succeeded": 300}, within_s=180)
        nursery.cancel_scope.cancel()
    assert await ledger.overlaps() == []
    visits = await ledger.visits()
    assert Counter(visit["how"] for visit in visits) == {"returned": 300}
    assert len({visit["job_id"] for visit in visits}) == 300
    foreign = sum(visit["pid"] == FOREIGN_PID for visit in visits)
    assert 1 <= foreign <= 299


@pytest.mark.full
@pytest.mark.requirement("Q8")
@pytest.mark.parametrize("task", ["deaf visit", "deaf thread visit"])
async def test_f08_f29_a_process_with_a_stuck_handler_exits_before_its_job_runs_again(
    serve, add, raw, ledger, row_when, database, task
):
    async with open_proxy(database.dsn) as proxy:
        cut_off = await serve(dsn=proxy.dsn, cancel_grace_sec=0.2, **FAST)
        job_id = await add(task, {"s": 3_600}, lease_ttl_sec=LEASE_S)
        await until(ledger.visits)
        await raw.execute(BRIEF, job_id)
        await serve(**FAST)
        proxy.freeze()
        # As if the machine's clock had ticks between the end of a lease and a sweep: their order matters.
        later = "UPDATE dl_jobs SET lease_expires_at = lease_expires_at + interval '6 s' WHERE status = 'running'"
        assert await raw.execute(later) == "UPDATE 1"
        assert await cut_off.exit_code(within_s=LEASE_S + 20) == 1
    last = cut_off.lines[-1]
    assert "a handler continues without its lease; exiting" in last["event"]
    assert (last["job_id"], last["task"]) == (str(job_id), task)
    assert (await row_when(job_id, "succeeded", within_s=TAKEN_OVER_S))["attempt"] == 2
    [_deaf, second] = await ledger.visits(job_id)
    assert second["began_at"] > datetime.fromisoformat(last["timestamp"])


async def confirms_cancel(client, job_id):
    """Cancel a job, and wait for a second if it runs; return whether it is canceled now."""
    answer = await client.post(f"/api/v1/jobs/{job_id}/cancel")
    if answer.json()["status"] == "running":
        answer = await client.get(f"/api/v1/jobs/{job_id}/status", params={"wait": 1})
    assert (answer.status_code, answer.json()["job_id"]) == (200, str(job_id))
    return answer.json()["status"] == "canceled"


@pytest.mark.full
@pytest.mark.requirement("Q4", "Q9", "Q11")
async def test_f43_confirmed_cancels_are_never_undone_by_races(unmeasured, serve, raw, ledger, counts, client_of):
    replicas = await all_at_once(*[partial(serve, {"q": 15}, **PATIENT)] * 2)
    jobs = [
        record["job_id"]
        for record in await raw.fetch("""
            INSERT INTO dl_jobs (job_id, queue, task, lock_key, lease_ttl_sec, args)
            SELECT gen_random_uuid(), 'q', 'visit', 'key ' || n % 150, 15,
                   jsonb_build_object('s', random() * 0.6, 'fails', CASE WHEN n % 3 = 0 THEN 2 ELSE 0 END)
            FROM generate_series(1, 400) AS n RETURNING job_id""")
    ]
    to_be_retried = set(jobs[::5])
    confirmed = {}

    async def cancel_some(client):
        for job_id in random.sample(jobs, 60):
            if await confirms_cancel(client, job_id):
                confirmed.setdefault(job_id, datetime.now(UTC))
                if job_id in to_be_retried:
                    answer = await client.post(f"/api/v1/jobs/{job_id}/retry")
                    assert answer.status_code in {200, 409}
            await trio.sleep(random.uniform(0, 0.02))

    async with client_of(replicas[0]) as one, client_of(replicas[1]) as other, trio.open_nursery() as nursery:
        for client in (one, one, one, one, other, other, other, other):
            nursery.start_soon(cancel_some, client)
    await until(counts, lambda found: not found.keys() & {"queued", "running"}, within_s=60)

    rows = {row["job_id"]: row for row in await raw.fetch("SELECT * FROM dl_jobs")}
    for job_id in confirmed.keys() - to_be_retried:
        assert rows[job_id]["status"] == "canceled"
        for visit in await ledger.visits(job_id):
            assert visit["ended_at"] < confirmed[job_id], "a job ran on after its cancel was confirmed"
    statuses, canceled_from = dict.fromkeys(rows, Status.QUEUED), Counter()
    journal = "SELECT job_id, kind, payload ->> 'reason' AS why FROM dl_job_events ORDER BY event_id"
    for event in await raw.fetch(journal):
        step = step_of(event["kind"], event["why"])
        assert step in STEPS
        if step is Step.CANCEL:
            canceled_from[statuses[event["job_id"]]] += 1
        statuses[event["job_id"]] = TRANSITIONS[statuses[event["job_id"]], step]
    assert statuses == {job_id: row["status"] for job_id, row in rows.items()}
    assert await ledger.overlaps() == []
    # Each race has occurred.
    too_late = sum(row["cancel_requested"] and row["status"] == "succeeded" for row in rows.values())
    revived = await raw.fetchval("SELECT count(*) FROM dl_audit WHERE action = 'retry'")
    told = f"{canceled_from}, {too_late} had returned before, {revived} were queued again"
    assert canceled_from[Status.QUEUED] > 10, told
    assert canceled_from[Status.RUNNING] > 5, told
    assert revived > 5, told

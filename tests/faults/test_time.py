"""Wrong clocks: a worker's (F31), and the database's (F32). Leases and due times go by the database's."""

from __future__ import annotations

import os
import signal
from datetime import UTC, datetime
from uuid import UUID

import pytest
from conditions import until
from proxy import open_proxy
from services import FAST, FOLDER, LEASE_S, PATIENT, PATIENT_LEASE_S

from dataloader.actors.reaper import BATCH, MAX_BATCHES

TEN_MINUTES_S, TWO_HOURS_S = 600, 7_200
END_SESSIONS = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'dataloader%'"
STATUS = "SELECT status::text FROM dl_jobs WHERE job_id = $1"


def wrong_clock(*, ahead_s=0, step_s=0):
    """Return the environment of a service whose clock is wrong, or will be after a SIGUSR1."""
    path = os.pathsep.join([str(FOLDER / "wrong_clock"), str(FOLDER)])
    return {"PYTHONPATH": path, "CLOCK_AHEAD_S": str(ahead_s), "CLOCK_STEP_S": str(step_s)}


async def clock_of(service, client):
    """Return the seconds by which the service's clock is ahead of ours, by its log."""
    before = len(service.lines)
    await client.get("/nowhere")

    async def line():
        return next((line for line in service.lines[before:] if line["event"] == "request"), None)

    return (datetime.fromisoformat((await until(line))["timestamp"]) - datetime.now(UTC)).total_seconds()


@pytest.mark.slow
@pytest.mark.requirement("Q8", "Q10")
@pytest.mark.parametrize(
    ("ahead_s", "step_s"),
    [(-TEN_MINUTES_S, 0), (TEN_MINUTES_S, 0), (0, -TEN_MINUTES_S), (0, TEN_MINUTES_S)],
    ids=["behind", "ahead", "steps back", "steps ahead"],
)
async def test_f31_a_worker_whose_clock_is_wrong_works_as_any_other(
    serve, add, row_when, raw, ledger, client_of, ahead_s, step_s
):
    wrong = await serve({"q": 2, "its own": 2}, environment=wrong_clock(ahead_s=ahead_s, step_s=step_s), **FAST)
    held = await add("visit", {"s": LEASE_S + 2}, lease_ttl_sec=LEASE_S)
    await row_when(held, "running")
    healthy = await serve({"q": 2, "others": 2}, **FAST)
    watched = await add("visit", {"s": LEASE_S + 2}, queue="others", lease_ttl_sec=LEASE_S)
    await row_when(watched, "running")
    async with client_of(wrong) as client:
        if step_s:
            wrong.signal(signal.SIGUSR1)
        assert await clock_of(wrong, client) == pytest.approx(ahead_s + step_s, abs=60)
        due_at = await raw.fetchval("SELECT clock_timestamp() + interval '2 s'")
        request = {"queue": "its own", "task": "visit", "lock_key": "delayed", "available_at": due_at.isoformat()}
        delayed = UUID((await client.post("/api/v1/jobs/trigger", json=request)).json()["job_id"])
    await row_when(delayed, "succeeded")
    [visit] = await ledger.visits(delayed)
    assert visit["began_at"] >= due_at
    for job_id, service in ((held, wrong), (watched, healthy)):
        row = await row_when(job_id, "succeeded")
        assert (row["attempt"], row["crashes"]) == (1, 0)
        assert (row["finished_at"] - row["started_at"]).total_seconds() > LEASE_S
        [visit] = await ledger.visits(job_id)
        assert (visit["pid"], visit["how"]) == (service.process.pid, "returned")


@pytest.mark.slow
async def test_f31_the_uptime_of_a_process_is_right_after_its_clock_has_stepped_back(serve, client_of):
    service = await serve(environment=wrong_clock(step_s=-TEN_MINUTES_S))
    async with client_of(service) as client:
        service.signal(signal.SIGUSR1)
        assert await clock_of(service, client) == pytest.approx(-TEN_MINUTES_S, abs=60)
        assert 0 <= (await client.get("/status")).json()["uptime_s"] < 60


async def jumped(service, by_s):
    """Return the line about this jump; a sweep that was seconds late reports a small one."""

    async def line():
        lines = [line for line in [*service.lines] if "skipping a sweep: the database's clock jumped" in line["event"]]
        return next((line for line in lines if abs(line["by_s"] - by_s) < 30), None)

    return await until(line)


@pytest.mark.full
@pytest.mark.requirement("Q8", "Q10")
@pytest.mark.parametrize("by_s", [TEN_MINUTES_S, -TEN_MINUTES_S], ids=["ahead", "back"])
async def test_f32_live_workers_keep_their_jobs_when_the_databases_clock_jumps(
    serve, add, row_when, raw, ledger, set_clock, by_s, tmp_path
):
    settings = FAST | {"reaper_period_sec": 3}
    services = [await serve({"q": 3}, **settings) for _ in range(2)]
    end = {"s": 2 * LEASE_S + 3, "until": str(tmp_path / "end")}
    jobs = [await add("visit", end, keyed=n % 2 == 0, lease_ttl_sec=LEASE_S) for n in range(6)]
    await until(ledger.visits, lambda visits: len(visits) == 6)
    # By then each reaper has read the former clock.
    await until(lambda: raw.fetchval("SELECT min(heartbeat_at - started_at) > interval '3.5 s' FROM dl_jobs"))
    await set_clock(by_s)
    for service in services:
        await jumped(service, by_s)
    (tmp_path / "end").touch()
    rows = [await row_when(job_id, "succeeded") for job_id in jobs]
    assert [(row["attempt"], row["crashes"]) for row in rows] == [(1, 0)] * 6
    # They needed their leases by the new clock: by the old one, these were over, or lasted for minutes.
    assert all(abs((row["finished_at"] - row["started_at"]).total_seconds() - by_s) < 60 for row in rows)
    visits = await ledger.visits()
    assert [visit["how"] for visit in visits] == ["returned"] * 6
    assert len({visit["pid"] for visit in visits}) == 2


@pytest.mark.full
@pytest.mark.requirement("Q7", "Q8", "Q10")
async def test_f32_a_worker_that_is_cut_off_when_the_clock_jumps_overlaps_no_other(
    serve, add, raw, ledger, set_clock, database, tmp_path
):
    """As when a server with another clock takes over: all sessions end, and by its clock all leases have ended."""
    end = {"until": str(tmp_path / "end")}
    async with open_proxy(database.dsn) as proxy:
        cut_off = await serve({"q": 2}, dsn=proxy.dsn, ready=None, **PATIENT)
        await cut_off.logged("serving", within_s=180)
        jobs = [await add("visit", end, lock_key="k", lease_ttl_sec=PATIENT_LEASE_S)]
        jobs.append(await add("visit", end, keyed=False, lease_ttl_sec=PATIENT_LEASE_S))
        await until(ledger.visits, lambda visits: len(visits) == 2)
        other = await serve({"q": 3}, ready=None, **PATIENT)
        await other.logged("serving", within_s=180)
        jobs.append(await add("visit", end, lock_key="k", lease_ttl_sec=PATIENT_LEASE_S))
        proxy.cut()
        await set_clock(TWO_HOURS_S, sessions_end=True)
        await raw.execute(END_SESSIONS)
        await until(ledger.visits, lambda visits: all(visit["how"] for visit in visits[:2]))
        (tmp_path / "end").touch()
        proxy.mend()
        for job_id in jobs:
            await until(lambda job_id=job_id: raw.fetchval(STATUS, job_id), lambda status: status == "succeeded")
    assert {visit["pid"] for visit in (await ledger.visits())[:2]} == {cut_off.process.pid}
    assert await ledger.overlaps() == []


@pytest.mark.slow
@pytest.mark.requirement("R7")
async def test_f32_schedules_go_on_when_the_databases_clock_was_ahead_and_is_put_right(
    serve, raw, set_clock, client_of
):
    service = await serve(ready=None, **FAST)
    await service.logged("serving", within_s=180)
    ticks = "SELECT count(*) FROM dl_jobs WHERE schedule = 'every' AND planned_at < now() + interval '10 s'"
    ahead = "SELECT count(*) FROM dl_jobs WHERE schedule = 'every' AND planned_at > now() + interval '1 h'"
    body = {"task": "quick", "every_s": 1, "overlap": "allow", "job": {"queue": "q"}}
    async with client_of(service) as client:
        assert (await client.put("/api/v1/schedules/every", json=body)).status_code in {200, 201}
    await until(lambda: raw.fetchval(ticks), lambda count: count > 1)
    await set_clock(TWO_HOURS_S)
    await until(lambda: raw.fetchval(ahead))
    await jumped(service, TWO_HOURS_S)
    before = await raw.fetchval(ticks)
    await set_clock(0)
    await service.logged("next times of schedules were too late and were corrected")
    await until(lambda: raw.fetchval(ticks), lambda count: count > before)


@pytest.mark.full
@pytest.mark.requirement("Q10")
async def test_f32_a_jump_of_the_database_clock_skips_a_sweep_and_sweeps_stay_bounded(serve, raw, set_clock):
    await raw.execute(
        "INSERT INTO dl_jobs (job_id, queue, task, lock_key, status, lease_expires_at)"
        " SELECT gen_random_uuid(), 'x', 'quick', 'key ' || n, 'running',"
        " now() + CASE n WHEN 0 THEN interval '-1 s' ELSE interval '5 min' END FROM generate_series(0, 5000) AS n"
    )
    service = await serve(**FAST | {"reaper_period_sec": 8})
    running = "SELECT count(*) FROM dl_jobs WHERE status = 'running'"
    # The job with the expired lease was reclaimed: the reaper has read the former clock.
    await until(lambda: raw.fetchval(running), lambda count: count == 5_000)
    await set_clock(TEN_MINUTES_S)
    told = await jumped(service, TEN_MINUTES_S)
    assert await raw.fetchval(running) == 5_000
    await until(lambda: raw.fetchval(running), lambda count: count == 0, within_s=120)
    batches = await raw.fetch("""
        SELECT ts, count(*) AS jobs FROM dl_job_events WHERE payload ->> 'reason' = 'lease expired'
        GROUP BY ts ORDER BY ts OFFSET 1""")
    assert batches[0]["ts"] > datetime.fromisoformat(told["timestamp"])
    sweeps, last_at = [], None
    for batch in batches:
        if last_at is None or (batch["ts"] - last_at).total_seconds() > 1.5:
            sweeps.append(0)
        sweeps[-1] += batch["jobs"]
        last_at = batch["ts"]
    assert sum(sweeps) == 5_000
    assert max(sweeps) <= BATCH * MAX_BATCHES


@pytest.mark.slow
@pytest.mark.requirement("Q2")
async def test_f32_delayed_jobs_start_when_the_databases_clock_says_so_also_after_a_jump(
    serve, raw, row_when, set_clock
):
    await serve(**FAST)
    insert = (
        "INSERT INTO dl_jobs (job_id, queue, task, lock_key, available_at)"
        " VALUES (gen_random_uuid(), 'q', 'quick', $1, now() + make_interval(secs => $2)) RETURNING job_id"
    )
    soon = await raw.fetchval(insert, "soon", TEN_MINUTES_S / 2)
    later = await raw.fetchval(insert, "later", 2 * TEN_MINUTES_S)
    await row_when(soon, "queued", within_s=0)
    await set_clock(TEN_MINUTES_S)
    await row_when(soon, "succeeded")
    assert (await row_when(later, "queued", within_s=0))["waits_for"] == "time"

"""Leases (Q8, Q10): renewing many at once past locked rows, never an expired one; taking back what expired."""

from __future__ import annotations

import pytest
import trio
from databases import raw_connection
from logged import capture_logs

from dataloader.actors import reaper as reaper_module
from dataloader.actors.outage import Outage
from dataloader.actors.reaper import Reaper
from dataloader.actors.wake import Wake
from dataloader.jobs.ids import uuid7
from dataloader.jobs.outcomes import Outcome
from dataloader.jobs.states import Step
from dataloader.jobs.telemetry import Telemetry
from dataloader.store.queue.leases import Beat, Pulse, Reaped, aio_beat, reap

EXPIRE = "UPDATE dl_jobs SET lease_expires_at = now() - interval '1 s' WHERE job_id = $1"


@pytest.fixture
async def ten(start_worker, add_job):
    """A worker and its ten running jobs."""
    for _ in range(10):
        await add_job()
    worker = start_worker("w")
    return worker, await worker.claim()


@pytest.mark.requirement("Q8")
async def test_one_heartbeat_renews_all(ten, raw):
    worker, jobs = ten
    await raw.execute("UPDATE dl_jobs SET lease_expires_at = now() + interval '1 s', heartbeat_at = NULL")
    assert await worker.beat(*jobs) == [Beat.RENEWED] * 10
    row = await raw.fetchrow(
        "SELECT count(*) AS n, min(lease_expires_at - heartbeat_at) AS lease, count(DISTINCT heartbeat_at) AS beats"
        " FROM dl_jobs WHERE lease_expires_at > now() + interval '50 s'"
    )
    assert (row["n"], row["lease"].total_seconds(), row["beats"]) == (10, 60, 1)


@pytest.mark.requirement("Q8")
async def test_a_row_that_somebody_has_locked_is_unknown_and_the_others_are_renewed(database, ten):
    worker, jobs = ten
    async with raw_connection(database.dsn) as psql:
        await psql.execute("BEGIN")
        await psql.execute("SELECT FROM dl_jobs WHERE job_id = $1 FOR UPDATE", jobs[4].job_id)
        with trio.fail_after(30):
            found = await worker.beat(*jobs)
        assert found == [Beat.UNKNOWN if job is jobs[4] else Beat.RENEWED for job in jobs]
        await psql.execute("ROLLBACK")
    assert await worker.beat(*jobs) == [Beat.RENEWED] * 10


@pytest.mark.requirement("Q8")
async def test_an_expired_lease_is_never_renewed(ten, raw, row_of):
    worker, jobs = ten
    await raw.execute(EXPIRE, jobs[0].job_id)
    before = await row_of(jobs[0].job_id)
    assert await worker.beat(*jobs[:2]) == [Beat.EXPIRED, Beat.RENEWED]
    assert await row_of(jobs[0].job_id) == before


@pytest.mark.requirement("Q8")
async def test_a_lease_that_a_jump_of_the_clock_has_ended_is_renewed_by_who_has_its_key(ten, raw, row_of):
    worker, [job, ended, *_others] = ten
    await worker.end(ended)
    for each in (job, ended):
        await raw.execute(EXPIRE, each.job_id)
    held = [(each.job_id, each.token) for each in (job, ended)]
    assert await worker.locks.revive(held, timeout_s=5) == {job.token}
    assert await worker.beat(job) == [Beat.RENEWED]
    assert await row_of(ended.job_id, "status") == "succeeded"


@pytest.mark.requirement("Q7", "Q8")
async def test_an_expired_lease_whose_key_went_to_another_is_not_renewed(
    ten, add_job, start_worker, raw, row_of, end_session
):
    worker, [job, *_others] = ten
    await raw.execute(EXPIRE, job.job_id)
    await end_session(worker)
    await add_job(lock_key=f"'{job.lock_key}'")
    [next_of_key] = await start_worker("other").claim()
    assert next_of_key.lock_key == job.lock_key
    assert await worker.locks.revive([(job.job_id, job.token)], timeout_s=5) == set()
    assert worker.lost == [job.token]
    assert await worker.beat(job) == [Beat.EXPIRED]


@pytest.mark.requirement("Q8", "Q10")
async def test_a_row_that_somebody_has_locked_holds_up_no_renewal_of_expired_leases(database, ten, raw):
    worker, [job, locked, *_others] = ten
    for each in (job, locked):
        await raw.execute(EXPIRE, each.job_id)
    async with raw_connection(database.dsn) as other:
        await other.execute("BEGIN")
        await other.execute("SELECT FROM dl_jobs WHERE job_id = $1 FOR UPDATE", locked.job_id)
        held = [(each.job_id, each.token) for each in (job, locked)]
        assert await worker.locks.revive(held, timeout_s=5) == {job.token}
        await other.execute("ROLLBACK")


@pytest.mark.requirement("Q8")
@pytest.mark.parametrize(
    "change",
    ["status = 'succeeded'", "status = 'queued'", "token = token + 1", "lease_expires_at = NULL", "job_id = "],
)
async def test_a_job_that_is_not_ours_any_more_is_lost(ten, raw, change):
    worker, [job, other, *_] = ten
    if change.startswith("job_id"):
        await raw.execute("DELETE FROM dl_jobs WHERE job_id = $1", job.job_id)
    else:
        await raw.execute(f"UPDATE dl_jobs SET {change} WHERE job_id = $1", job.job_id)
    before = await raw.fetch("SELECT j::text FROM dl_jobs j WHERE job_id = $1", job.job_id)
    assert await worker.beat(job, other) == [Beat.LOST, Beat.RENEWED]
    assert await raw.fetch("SELECT j::text FROM dl_jobs j WHERE job_id = $1", job.job_id) == before


@pytest.mark.requirement("Q4")
async def test_a_heartbeat_brings_the_cancel_request_also_of_a_locked_row(database, ten, raw, store):
    _worker, [job, other, *_] = ten
    await raw.execute("UPDATE dl_jobs SET cancel_requested = true WHERE job_id = $1", job.job_id)
    runs = [(job.job_id, job.token, False), (other.job_id, other.token, False)]
    expected = {Pulse(job.token, Beat.RENEWED, True), Pulse(other.token, Beat.RENEWED, False)}
    assert set(await store.write(aio_beat, runs)) == expected
    await raw.execute("BEGIN")
    await raw.execute("SELECT FROM dl_jobs WHERE job_id = $1 FOR UPDATE", job.job_id)
    expected = {Pulse(job.token, Beat.UNKNOWN, True), Pulse(other.token, Beat.RENEWED, False)}
    assert set(await store.write(aio_beat, runs)) == expected
    await raw.execute("ROLLBACK")


@pytest.mark.requirement("Q11")
async def test_heartbeats_are_journalled_only_when_asked(ten, journal_of):
    worker, [job, *_] = ten
    await worker.beat(job)
    await worker.beat(job, journal=True)
    assert await journal_of(job.job_id) == ["picked", "heartbeat"]


@pytest.mark.requirement("Q10")
async def test_an_expired_job_goes_back_to_the_queue(ten, store, raw, row_of, journal_of):
    _worker, [job, *others] = ten
    await raw.execute(EXPIRE, job.job_id)
    reaped = await reap(store, 100)
    assert (reaped.hashes, reaped.became) == ([job.lock_hash], [("q", "queued")])
    row = await row_of(job.job_id)
    assert (row["status"], row["attempt"], row["crashes"], row["waits_for"]) == ("queued", 1, 1, None)
    assert (row["claimed_by"], row["lease_expires_at"], row["finished_at"]) == (None, None, None)
    assert row["error"] == "worker lost: the lease of w ended in attempt 1"
    assert await journal_of(job.job_id) == ["picked", "requeue: lease expired"]
    assert await raw.fetchval("SELECT count(*) FROM dl_jobs WHERE status = 'running'") == len(others)
    assert (await reap(store, 100)).hashes == []


@pytest.mark.requirement("Q10")
@pytest.mark.parametrize(
    ("columns", "status"),
    [
        ({"max_attempts": "1"}, "lost"),
        ({"max_attempts": "3", "crashes": "2"}, "lost"),
        ({"max_attempts": "3", "attempt": "2"}, "lost"),
        ({"max_attempts": "3", "crashes": "1", "attempt": "1"}, "queued"),
        ({"max_attempts": "1", "cancel_requested": "true"}, "canceled"),
        ({"cancel_requested": "true"}, "canceled"),
    ],
    ids=str,
)
async def test_what_becomes_of_an_expired_job(store, add_job, start_worker, raw, row_of, journal_of, columns, status):
    cancel = "cancel_requested" in columns
    job_id = await add_job(**{name: value for name, value in columns.items() if name != "cancel_requested"})
    await start_worker().claim()
    if cancel:
        await raw.execute("UPDATE dl_jobs SET cancel_requested = true")
    await raw.execute(EXPIRE, job_id)
    await reap(store, 10)
    row = await row_of(job_id)
    assert (row["status"], row["crashes"]) == (status, int(columns.get("crashes", "0")) + 1)
    assert (row["finished_at"] is None) == (status == "queued")
    kind = "requeue" if status == "queued" else status
    assert (await journal_of(job_id))[-1] == f"{kind}: lease expired"


@pytest.mark.requirement("Q10")
async def test_a_job_that_kills_its_worker_each_time_is_lost_though_its_attempts_are_given_back(
    store, add_job, start_worker, raw, row_of
):
    job_id = await add_job(max_attempts="3")
    crashes = 0
    worker = start_worker()
    while await row_of(job_id, "status") == "queued":
        [job] = await worker.claim()
        worker.locks.forget(job.token)
        await raw.execute(EXPIRE, job_id)
        await reap(store, 10)
        crashes += 1
        assert crashes < 5
        # A foreign service, or a refund, touches the attempt number.
        await raw.execute("UPDATE dl_jobs SET attempt = 0")
    assert (await row_of(job_id, "status"), crashes) == ("lost", 3)


@pytest.mark.requirement("Q10")
async def test_reapers_share_the_work_and_pass_over_locked_rows(database, ten, store, raw):
    _worker, jobs = ten
    await raw.execute("UPDATE dl_jobs SET lease_expires_at = now() - interval '1 s'")
    async with raw_connection(database.dsn) as psql:
        await psql.execute("BEGIN")
        await psql.execute("SELECT FROM dl_jobs WHERE job_id = $1 FOR UPDATE", jobs[0].job_id)
        taken = []

        async def sweep():
            taken.extend((await reap(store, 3)).hashes)

        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(sweep)
                nursery.start_soon(sweep)
            taken.extend((await reap(store, 100)).hashes)
        await psql.execute("ROLLBACK")
    assert sorted(taken) == sorted(job.lock_hash for job in jobs[1:])
    assert (await reap(store, 100)).hashes == [jobs[0].lock_hash]


@pytest.mark.requirement("Q10")
async def test_the_longest_expired_are_taken_first(ten, store, raw):
    _worker, jobs = ten
    await raw.execute("UPDATE dl_jobs SET lease_expires_at = now() - interval '1 s'")
    await raw.execute("UPDATE dl_jobs SET lease_expires_at = now() - interval '1 h' WHERE job_id = $1", jobs[7].job_id)
    assert (await reap(store, 1)).hashes == [jobs[7].lock_hash]


@pytest.mark.requirement("Q10")
async def test_a_reaped_foreign_job_is_named_so(store, add_job, row_of):
    job_id = await add_job(status="'running'", attempt="2", lease_expires_at="now() - interval '1 s'")
    await reap(store, 10)
    assert (await row_of(job_id, "status")) == "queued"
    assert await row_of(job_id, "error") == "worker lost: the lease of a foreign worker ended in attempt 2"


@pytest.mark.requirement("Q10")
async def test_a_finish_that_comes_first_is_not_reaped_and_one_that_comes_later_is_void(ten, store, raw, row_of):
    worker, [first, later, *_] = ten
    await raw.execute("UPDATE dl_jobs SET lease_expires_at = now() - interval '1 s'")
    # Nobody took the job meanwhile, so its result still counts.
    await worker.record(Outcome(first.job_id, first.token, Step.SUCCEED))
    await reap(store, 100)
    assert await row_of(first.job_id, "status") == "succeeded"
    assert (await worker.record(Outcome(later.job_id, later.token, Step.SUCCEED))).void == [later.token]
    assert await row_of(later.job_id, "status") == "queued"


@pytest.mark.requirement("Q10")
@pytest.mark.parametrize("took_s", [0.0, 3.0])
async def test_after_a_jump_of_the_databases_clock_the_reaper_looks_twice(store, monkeypatch, took_s):
    """Also where each sweep takes so long from then on that it can't tell how far ahead the clock is."""
    looks, jumps = [], iter([0.0, 0.0, 100.0, 100.0])
    swept, jumped = trio.Event(), Wake()

    async def sweep(_database, _limit, *, ahead_s, jump_s):
        now_s = next(jumps, 100.0)
        has_jumped = ahead_s is not None and abs(now_s - ahead_s) > jump_s
        looks.append("jumped" if has_jumped else "sweep")
        if looks.count("sweep") == 3:
            swept.set()
        return Reaped([], now_s, has_jumped, [], took_s if now_s else 0.0)

    monkeypatch.setattr(reaper_module, "reap", sweep)
    async with trio.open_nursery() as nursery:
        telemetry = Telemetry()
        nursery.start_soon(
            Reaper(
                database=store, outage=Outage(), telemetry=telemetry, period_s=0.01, jumped=jumped, default_lease_s=60
            ).run
        )
        with trio.fail_after(30):
            await swept.wait()
        nursery.cancel_scope.cancel()
    assert looks[:4] == ["sweep", "sweep", "jumped", "sweep"]
    # The heartbeats are told.
    assert jumped.is_set


@pytest.mark.requirement("Q10")
async def test_a_sweep_that_has_waited_for_a_table_takes_that_for_no_jump_of_the_clock(
    ten, store, raw, monkeypatch, until, until_blocked
):
    _worker, [first, second, *_] = ten
    monkeypatch.setattr(reaper_module, "JUMP_S", 0.3)
    taken = "(SELECT status = 'queued' FROM dl_jobs WHERE job_id = $1)"
    jumped = Wake()
    with capture_logs() as lines:
        async with trio.open_nursery() as nursery:
            telemetry = Telemetry()
            nursery.start_soon(
                Reaper(
                    database=store,
                    outage=Outage(),
                    telemetry=telemetry,
                    period_s=0.05,
                    jumped=jumped,
                    default_lease_s=60,
                ).run
            )
            await raw.execute(EXPIRE, first.job_id)
            await until(taken, first.job_id)
            await raw.execute("BEGIN; LOCK TABLE dl_jobs IN ACCESS EXCLUSIVE MODE")
            # A statement that is prepared anew waits before the server looks at its clock.
            await raw.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE '% pool'"
            )
            await until_blocked()
            await trio.sleep(1)
            await raw.execute("ROLLBACK")
            await raw.execute(EXPIRE, second.job_id)
            await until(taken, second.job_id)
            nursery.cancel_scope.cancel()
    assert not jumped.is_set
    assert [line for line in lines if "jumped" in line["event"]] == []


@pytest.mark.requirement("Q10")
async def test_nothing_is_taken_when_the_databases_clock_is_not_where_it_was(ten, store, raw):
    _worker, [job, *_others] = ten
    await raw.execute(EXPIRE, job.job_id)
    ahead_s = (await reap(store, 0)).ahead_s
    for by_s in (-100, 100):
        reaped = await reap(store, 10, ahead_s=ahead_s + by_s, jump_s=2)
        assert (reaped.hashes, reaped.jumped) == ([], True)
        assert abs(reaped.ahead_s - ahead_s) < 1
    reaped = await reap(store, 10, ahead_s=ahead_s + 1, jump_s=2)
    assert (reaped.hashes, reaped.jumped) == ([job.lock_hash], False)


async def test_a_heartbeat_of_a_job_that_does_not_exist_is_lost(store):
    token = 7
    assert await store.write(aio_beat, [(uuid7(), token, False)]) == [Pulse(token, Beat.LOST, False)]

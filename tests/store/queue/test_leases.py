"""Leases (Q8, Q10): renewed together past locked rows, never once expired; expired ones are reclaimed."""

from __future__ import annotations

import pytest
import trio
from conditions import patience_s
from databases import raw_connection
from logged import capture_logs

from dataloader.actors.outage import Outage
from dataloader.actors.reaper import Reaper
from dataloader.actors.wake import Wake
from dataloader.jobs.ids import uuid7
from dataloader.jobs.outcomes import Outcome
from dataloader.jobs.states import Step
from dataloader.jobs.telemetry import Telemetry
from dataloader.store.connection.bridge import open_database
from dataloader.store.connection.options import DatabaseOptions
from dataloader.store.queue.leases import Beat, Pulse, aio_beat, reap

EXPIRE = "UPDATE dl_jobs SET lease_expires_at = now() - interval '1 s' WHERE job_id = $1"


@pytest.fixture
async def ten(start_worker, add_job):
    """Return a worker and its ten running jobs."""
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
async def test_a_locked_row_is_unknown_and_the_other_leases_are_renewed(database, ten):
    worker, jobs = ten
    async with raw_connection(database.dsn) as psql:
        await psql.execute("BEGIN")
        await psql.execute("SELECT FROM dl_jobs WHERE job_id = $1 FOR UPDATE", jobs[4].job_id)
        with trio.fail_after(patience_s()):
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
async def test_a_lease_ended_by_a_clock_jump_is_renewed_by_the_holder_of_its_key(ten, raw, row_of):
    worker, [job, ended, *_others] = ten
    await worker.end(ended)
    for each in (job, ended):
        await raw.execute(EXPIRE, each.job_id)
    held = [(each.job_id, each.token) for each in (job, ended)]
    assert await worker.locks.revive(held, timeout_s=5) == {job.token}
    assert await worker.beat(job) == [Beat.RENEWED]
    assert await row_of(ended.job_id, "status") == "succeeded"


@pytest.mark.slow
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
async def test_a_locked_row_delays_no_renewal_of_expired_leases(database, ten, raw):
    worker, [job, locked, *_others] = ten
    for each in (job, locked):
        await raw.execute(EXPIRE, each.job_id)
    async with raw_connection(database.dsn) as other:
        await other.execute("BEGIN")
        await other.execute("SELECT FROM dl_jobs WHERE job_id = $1 FOR UPDATE", locked.job_id)
        held = [(each.job_id, each.token) for each in (job, locked)]
        assert await worker.locks.revive(held, timeout_s=5) == {job.token}
        await other.execute("ROLLBACK")


@pytest.mark.slow
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


@pytest.mark.requirement("Q8")
async def test_of_two_runs_of_one_job_only_the_one_with_the_token_is_renewed(start_worker, add_job, raw):
    await add_job(keyed="false")
    worker = start_worker("w")
    [former] = await worker.claim()
    await raw.execute(
        "UPDATE dl_jobs SET status = 'queued', lease_expires_at = NULL, available_at = now() WHERE job_id = $1",
        former.job_id,
    )
    [again] = await worker.claim()
    assert (again.job_id, again.token == former.token) == (former.job_id, False)
    assert await worker.beat(former, again) == [Beat.LOST, Beat.RENEWED]
    assert await worker.beat(again, former) == [Beat.RENEWED, Beat.LOST]


@pytest.mark.requirement("Q8")
async def test_a_restored_database_gives_no_token_out_again(start_worker, add_for_both, raw, row_of):
    worker, tokens = start_worker("w"), set()
    await raw.execute("CREATE SEQUENCE former_tokens")  # only the broken builds use it
    for _ in range(3):
        # A restore in place: the rows, and their sequences, are as before.
        await raw.execute("TRUNCATE dl_jobs CASCADE; SELECT setval('former_tokens', 1, false)")
        job_id = await add_for_both()
        [job] = await worker.claim()
        # Another service claims it: the trigger assigns the token.
        await raw.execute("UPDATE dl_jobs SET status = 'queued', lease_expires_at = NULL")
        await raw.execute("UPDATE dl_jobs SET status = 'running', lease_expires_at = now() + interval '1 h'")
        tokens |= {job.token, (await row_of(job_id))["token"]}
    assert len(tokens) == 6
    assert all(0 < token < 2**53 for token in tokens)


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
async def test_a_count_of_crashes_at_its_end_stops_no_reaper(ten, store, raw, row_of):
    """Another role wrote it: each sweep would fail, and no lease of a dead worker would be reclaimed."""
    _worker, [worst, other, *_] = ten
    await raw.execute("UPDATE dl_jobs SET crashes = 2147483647 WHERE job_id = $1", worst.job_id)
    await raw.execute(EXPIRE, worst.job_id)
    await raw.execute(EXPIRE, other.job_id)
    await reap(store, 100)
    assert [(await row_of(job.job_id))["status"] for job in (worst, other)] == ["lost", "queued"]


@pytest.mark.slow
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
async def test_an_expired_job_is_queued_lost_or_canceled(
    store, add_job, start_worker, raw, row_of, journal_of, columns, status
):
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
async def test_a_job_that_kills_its_worker_each_time_is_lost_despite_refunded_attempts(
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
        # Another service, or a refund, changes the attempt number.
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

        with trio.fail_after(patience_s()):
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


@pytest.mark.slow
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
    # The job has not been claimed meanwhile, so its result still counts.
    await worker.record(Outcome(first.job_id, first.token, Step.SUCCEED))
    await reap(store, 100)
    assert await row_of(first.job_id, "status") == "succeeded"
    assert (await worker.record(Outcome(later.job_id, later.token, Step.SUCCEED))).void == [later.token]
    assert await row_of(later.job_id, "status") == "queued"


@pytest.mark.slow
@pytest.mark.requirement("Q10")
@pytest.mark.parametrize("look_s", [0.0, 0.4])
async def test_after_a_jump_of_the_databases_clock_the_reaper_looks_twice(ten, database, raw, until, look_s):
    """Also if each sweep takes so long from then on that it cannot measure how far ahead the clock is."""
    _worker, [first, second, *_] = ten
    # The statements of later connections find this clock before the server's own.
    await raw.execute("""
        CREATE SCHEMA clock;
        CREATE TABLE clock.jumps (ahead interval, look_s float8);
        INSERT INTO clock.jumps VALUES ('0', 0);
        CREATE FUNCTION clock.now() RETURNS timestamptz LANGUAGE plpgsql AS $$
        DECLARE jump clock.jumps; BEGIN
          SELECT * INTO jump FROM clock.jumps;
          PERFORM pg_sleep(jump.look_s);
          RETURN pg_catalog.now() + jump.ahead;
        END $$;
    """)
    await raw.execute(f"ALTER DATABASE {database.name} SET search_path = clock, pg_catalog, public")
    jumped, taken = Wake(), "(SELECT status = 'queued' FROM dl_jobs WHERE job_id = $1)"
    with capture_logs() as lines:
        async with open_database(DatabaseOptions(dsn=database.dsn)) as jumping, trio.open_nursery() as nursery:
            reaper = Reaper(
                database=jumping,
                outage=Outage(),
                telemetry=Telemetry(),
                period_s=0.05,
                jumped=jumped,
                default_lease_s=60,
                jump_s=1.5,
            )
            nursery.start_soon(reaper.run)
            await raw.execute(EXPIRE, first.job_id)
            await until(taken, first.job_id)
            assert not jumped.is_set
            await raw.execute("UPDATE clock.jumps SET ahead = '1 day', look_s = $1", look_s)
            await until(taken, second.job_id)
            nursery.cancel_scope.cancel()
    said = [word for line in lines for word in ("jumped", "recovered") if word in line["event"]]
    assert said == ["recovered", "jumped", "recovered"]
    # The heartbeats are notified.
    assert jumped.is_set


@pytest.mark.slow
@pytest.mark.requirement("Q10")
async def test_a_sweep_that_has_waited_for_a_table_takes_that_for_no_jump_of_the_clock(
    ten, store, raw, until, until_blocked
):
    _worker, [first, second, *_] = ten
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
                    jump_s=0.3,
                ).run
            )
            await raw.execute(EXPIRE, first.job_id)
            await until(taken, first.job_id)
            await raw.execute("BEGIN; LOCK TABLE dl_jobs IN ACCESS EXCLUSIVE MODE")
            # A statement that is prepared again waits before the server reads its clock.
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

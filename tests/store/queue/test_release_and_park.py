"""The end of a run wakes the next job of its key (Q7): finishing and parking in every order, and the sweep."""

from __future__ import annotations

import asyncpg
import pytest
import trio
from conditions import patience_s
from databases import raw_connection
from queue_workers import BACKOFF_S, LossyConnection

from dataloader.jobs.contract import Operator
from dataloader.jobs.errors import StoreUnavailable
from dataloader.jobs.outcomes import Outcome
from dataloader.jobs.states import Step
from dataloader.store.queue import control
from dataloader.store.queue.leases import reap
from dataloader.store.queue.make_ready import ready_free, unpark
from dataloader.store.queue.worker_rows import ALIVE_WITHIN_S, WorkerRow, aio_show

CLAIM = f"""SELECT verdict, lock_hash
FROM dl_claim_known('q', 10, 10, 'other', '{{t}}', '{{}}', {BACKOFF_S}, '{{}}', NULL, '{{}}', '{{}}')
WHERE verdict <> 'last'"""
PAUSE = "PERFORM pg_sleep(0.001 * 2 ^ attempt)"
ANY_STEP = [Step.SUCCEED, Step.FAIL, Step.RETRY, Step.SNOOZE, Step.CANCEL, Step.RETURN]


@pytest.fixture
async def other(database):
    """Open the connection of another worker, whose transactions the test ends."""
    async with raw_connection(database.dsn) as connection:
        yield connection


@pytest.fixture
async def held(start_worker, add_job):
    """Return a worker that runs a job with the key k, and a second job with k that is ready."""
    first, second = await add_job(lock_key="'k'", priority="1"), await add_job(lock_key="'k'")
    worker = start_worker("holder")
    [job] = await worker.claim(limit=1)
    assert job.job_id == first
    return worker, job, second


@pytest.mark.slow
@pytest.mark.requirement("Q7")
@pytest.mark.parametrize("step", ANY_STEP)
async def test_a_parked_job_starts_when_the_holder_ends(start_worker, held, row_of, step):
    worker, job, second = held
    other = start_worker()
    assert await other.claim() == []
    assert await row_of(second, "waits_for") == "lock"
    await worker.end(job, step, delay_s=60.0 if step in {Step.RETRY, Step.SNOOZE} else 0.0)
    [next_job] = await other.claim(limit=1) if step is not Step.RETURN else await other.claim()
    assert next_job.lock_key == "k"
    if step is not Step.RETURN:  # a released job is ready again itself, and may be first
        assert (next_job.job_id, next_job.attempt) == (second, 1)


@pytest.mark.requirement("Q7")
async def test_a_claim_frees_the_keys_of_ended_jobs_and_takes_their_next_ones(held):
    worker, job, second = held
    assert await worker.claim() == []
    await worker.record(Outcome(job.job_id, job.token, Step.SUCCEED))
    worker.locks.forget(job.token)
    [next_job] = await worker.claim()
    assert next_job.job_id == second


@pytest.mark.requirement("Q7")
async def test_keys_of_a_claim_that_was_rolled_back_are_freed_when_it_is_repeated(start_worker, held):
    worker, job, second = held
    other = start_worker()
    assert await other.claim() == []
    await worker.record(Outcome(job.job_id, job.token, Step.SUCCEED))
    worker.locks.forget(job.token)
    # Their locks are released by then; the wake-up of their next jobs is rolled back.
    session = worker.locks._session
    session._connection = LossyConnection(session._connection, "dl_claim", asyncpg.DeadlockDetectedError("a deadlock"))
    assert await worker.claim("another queue") == []
    [next_job] = await other.claim()
    assert next_job.job_id == second


@pytest.mark.requirement("Q7")
async def test_a_briefly_locked_parked_job_is_woken(held, start_worker, other, row_of, raw, until_blocked):
    worker, job, second = held
    assert await start_worker().claim() == []
    # The pause before the next check lasts until the test has seen it.
    source = await raw.fetchval("SELECT pg_get_functiondef('dl_ready_next'::regproc)")
    assert source.count(PAUSE) == 1
    await raw.execute(source.replace(PAUSE, "PERFORM pg_advisory_xact_lock_shared(4711, 4711)"))
    await raw.execute("SELECT pg_advisory_lock(4711, 4711)")
    await other.execute("BEGIN")
    await other.execute("UPDATE dl_jobs SET watched = true WHERE job_id = $1", second)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.end, job)
        await until_blocked()
        await other.execute("COMMIT")
        await raw.execute("SELECT pg_advisory_unlock(4711, 4711)")
    assert await row_of(second, "waits_for") is None


async def test_readying_a_keys_next_job_tries_a_locked_row_five_times_with_pauses(held, other, raw):
    _worker, _job, second = held
    [park] = await other.fetch(CLAIM)
    source = await raw.fetchval("SELECT pg_get_functiondef('dl_ready_next'::regproc)")
    await raw.execute("CREATE TABLE pauses (attempt int)")
    await raw.execute(source.replace(PAUSE, "INSERT INTO public.pauses VALUES (attempt)"))
    await other.execute("BEGIN")
    await other.execute("UPDATE dl_jobs SET watched = true WHERE job_id = $1", second)
    assert await raw.fetchval("SELECT dl_ready_next($1)", [park["lock_hash"]]) == 0
    await other.execute("COMMIT")
    assert [row["attempt"] for row in await raw.fetch("SELECT * FROM pauses")] == [1, 2, 3, 4]


@pytest.mark.requirement("Q7")
async def test_the_holders_end_notifies_the_queue_of_the_next_job(database, held, start_worker, other):
    worker, job, _second = held
    await start_worker().claim()
    heard = []
    await other._cross(other.asyncpg.add_listener, "dl_jobs", lambda *event: heard.append(event[3]))
    await worker.end(job)
    await other.execute("SELECT 1")
    assert heard == ["q"]


@pytest.mark.requirement("Q7")
async def test_a_park_that_is_committed_after_the_holders_end_is_looked_at_again(store, held, other, row_of):
    worker, job, second = held
    await other.execute("BEGIN")
    [park] = await other.fetch(CLAIM)
    assert park["verdict"] == "busy"
    await worker.end(job)  # does not see the park
    await other.execute("COMMIT")
    assert await row_of(second, "waits_for") == "lock"
    assert await unpark(store, [park["lock_hash"]]) == 1
    assert await row_of(second, "waits_for") is None


@pytest.mark.requirement("Q7")
async def test_a_park_between_the_outcome_and_the_unlocking_is_found_by_the_holder(store, held, other, row_of):
    worker, job, second = held
    await worker.record(Outcome(job.job_id, job.token, Step.SUCCEED))
    [park] = await other.fetch(CLAIM)
    assert park["verdict"] == "busy"
    assert await unpark(store, [park["lock_hash"]]) == 0  # still locked
    worker.locks.forget(job.token)
    await worker.locks.release()
    assert await row_of(second, "waits_for") is None


@pytest.mark.requirement("Q7")
async def test_a_park_before_the_outcome_is_found_by_the_holder(store, held, other, row_of):
    worker, job, second = held
    [park] = await other.fetch(CLAIM)
    assert await unpark(store, [park["lock_hash"]]) == 0
    await worker.end(job)
    assert await row_of(second, "waits_for") is None


@pytest.mark.requirement("Q7")
async def test_two_looks_at_a_free_key_do_not_take_each_other_for_its_holder(store, add_job, other, start_worker, raw):
    job_id = await add_job(lock_key="'k'")
    await other.execute("BEGIN")
    await other.execute("SELECT dl_free_keys(ARRAY[hashtext('k')])")  # a sweep, whose check continues
    worker = start_worker()
    claim = await worker.ask()
    if not claim.jobs:
        # The sweep's check blocked the key. It has no holder, so no end of a run will wake the job.
        assert await unpark(store, claim.to_test) == 1
    await other.execute("COMMIT")
    jobs = claim.jobs or await worker.claim()
    assert [job.job_id for job in jobs] == [job_id]


@pytest.mark.requirement("Q7")
async def test_a_check_of_a_key_without_waiting_jobs_blocks_no_claim(add_job, other, start_worker, row_of):
    job_id = await add_job(lock_key="'k'")
    await other.execute("BEGIN")
    await other.execute("SELECT dl_unpark(ARRAY[hashtext('k')])")  # a reaper, whose check continues
    assert [job.job_id for job in (await start_worker().ask()).jobs] == [job_id]
    assert await row_of(job_id, "waits_for") is None


@pytest.mark.requirement("Q7")
async def test_a_claim_takes_along_the_keys_that_are_to_be_freed(held, locks_of, row_of):
    worker, job, second = held
    await worker.ask(limit=1)
    assert await row_of(second, "waits_for") == "lock"
    await worker.record(Outcome(job.job_id, job.token, Step.SUCCEED))
    worker.locks.forget(job.token)
    [next_job] = await worker.claim()
    assert next_job.job_id == second
    assert await locks_of(worker) == [next_job.lock_hash]


@pytest.mark.requirement("Q7")
async def test_a_key_is_freed_once_however_often_it_is_asked(held, locks_of):
    worker, job, _second = held
    await worker.end(job)
    worker.locks.forget(job.token)
    await worker.locks.release()
    [again] = await worker.claim()
    worker.locks.forget(job.token)
    await worker.locks.release()
    assert await locks_of(worker) == [again.lock_hash]


@pytest.mark.slow
@pytest.mark.requirement("Q7")
async def test_the_next_job_wakes_with_a_new_session_if_the_old_one_was_lost(held, start_worker, end_session, row_of):
    worker, job, second = held
    await start_worker().claim()
    await worker.record(Outcome(job.job_id, job.token, Step.SUCCEED))
    await end_session(worker)
    worker.locks.forget(job.token)
    try:
        await worker.locks.release()
    except StoreUnavailable:
        await worker.locks.release()
    assert await row_of(second, "waits_for") is None


@pytest.mark.requirement("Q7")
async def test_a_release_that_fails_half_way_is_made_good(
    held, start_worker, other, row_of, locks_of, raw, until_blocked
):
    worker, job, second = held
    await start_worker().claim()
    await worker.record(Outcome(job.job_id, job.token, Step.SUCCEED))
    worker.locks.forget(job.token)
    # The unlocking has happened, the wake-up is refused: unlocking is not part of the transaction.
    await other.execute("ALTER FUNCTION dl_ready_next RENAME TO dl_ready_next_")
    with pytest.raises(Exception, match="dl_ready_next"):
        await worker.locks.release()
    await other.execute("ALTER FUNCTION dl_ready_next_ RENAME TO dl_ready_next")
    assert await locks_of(worker) == []
    await worker.locks.release()
    assert await row_of(second, "waits_for") is None


@pytest.mark.requirement("Q7")
async def test_reaping_the_holder_wakes_the_next_job(store, held, start_worker, raw, end_session, row_of):
    worker, job, second = held
    await start_worker().claim()
    await end_session(worker)
    await raw.execute("UPDATE dl_jobs SET lease_expires_at = now() - interval '1 s' WHERE job_id = $1", job.job_id)
    await reap(store, 10)
    assert await row_of(second, "waits_for") is None


@pytest.mark.requirement("Q7")
async def test_canceling_the_job_that_was_to_follow_wakes_the_one_after(store, held, start_worker, add_job, row_of):
    worker, job, second = held
    third = await add_job(lock_key="'k'", priority="200")
    await start_worker().claim()
    await worker.end(job)
    assert (await row_of(second, "waits_for"), await row_of(third, "waits_for")) == (None, "lock")
    await control.cancel(store, second, Operator("test"))
    assert await row_of(third, "waits_for") is None


@pytest.mark.requirement("Q7")
async def test_parking_again_and_again_burns_no_attempt(held, start_worker, row_of, raw):
    _worker, _job, second = held
    other = start_worker()
    for _ in range(5):
        assert await other.claim() == []
        await raw.execute("UPDATE dl_jobs SET waits_for = NULL, available_at = now() WHERE job_id = $1", second)
    assert (await row_of(second, "attempt"), await row_of(second, "refunds")) == (0, 0)


async def park(raw, number, lock_key="'k'"):
    await raw.execute(
        "INSERT INTO dl_jobs (job_id, queue, task, lock_key, waits_for, available_at, priority)"
        f" SELECT gen_random_uuid(), 'q', 't', {lock_key}, 'lock', now() + interval '30 s', 500 - i % 500"
        " FROM generate_series(1, $1) AS i",
        number,
    )


READY = "SELECT count(*) FROM dl_jobs WHERE waits_for IS NULL AND status = 'queued'"


@pytest.mark.requirement("Q7")
async def test_a_sweep_wakes_exactly_one_of_a_thousand_jobs_of_a_free_key(store, raw):
    await park(raw, 1_000)
    assert await ready_free(store) == 1
    row = await raw.fetchrow("SELECT priority, available_at <= now() AS due FROM dl_jobs WHERE waits_for IS NULL")
    assert dict(row) == {"priority": 1, "due": True}


@pytest.mark.slow
@pytest.mark.requirement("Q7")
@pytest.mark.parametrize("idle", ["paused", "unserved", "of the dead"])
async def test_jobs_of_an_unserved_queue_do_not_block_another_queue_with_their_key(store, raw, start_worker, idle):
    await store.write(aio_show, WorkerRow("dead", "h", 1, "1", {"of the dead": 1}, ()))
    await raw.execute("UPDATE dl_workers SET seen_at = now() - make_interval(secs => $1)", ALIVE_WITHIN_S + 1)
    await store.write(aio_show, WorkerRow("w", "h", 1, "1", {"q": 1, "paused": 1}, ()))
    await control.pause(store, "paused", Operator("test"))
    await park(raw, 300)
    await raw.execute("UPDATE dl_jobs SET queue = $1 WHERE priority % 3 > 0", idle)
    assert await ready_free(store) == 201
    rows = await raw.fetch("SELECT queue, count(*) AS n FROM dl_jobs WHERE waits_for IS NULL GROUP BY queue")
    assert {row["queue"]: row["n"] for row in rows} == {idle: 200, "q": 1}
    # From then on the end of each wakes the next one.
    worker = start_worker()
    for _ in range(5):
        [job] = await worker.claim()
        await worker.end(job, Step.SUCCEED)


@pytest.mark.requirement("Q7")
async def test_a_sweep_wakes_no_job_whose_key_is_held_by_a_lock_or_a_lease(store, raw, add_job):
    await park(raw, 10, "'locked'")
    await park(raw, 10, "'leased'")
    await raw.execute("SELECT pg_advisory_lock(hashtext('locked'))")
    running = await add_job(
        lock_key="'leased'", status="'running'", lease_expires_at="now() + interval '1 minute'", token="1"
    )
    assert await ready_free(store) == 0
    await raw.execute("SELECT pg_advisory_unlock_all()")
    assert await ready_free(store) == 1
    await raw.execute("UPDATE dl_jobs SET lease_expires_at = now() - interval '1 s' WHERE job_id = $1", running)
    assert await ready_free(store) == 2
    assert await raw.fetchval(READY) == 3


@pytest.mark.requirement("Q7")
async def test_a_sweep_reaches_every_key_in_small_steps(store, raw):
    await park(raw, 300, "'key ' || i % 100")
    assert await ready_free(store, most_keys=7) == 100
    keys = "SELECT count(DISTINCT lock_key) FROM dl_jobs WHERE waits_for IS NULL"
    assert await raw.fetchval(keys) == 100
    assert await raw.fetchval("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'") == 0


@pytest.mark.requirement("Q7")
async def test_a_locked_parked_row_does_not_block_the_sweep(store, raw, other):
    await park(raw, 2)
    await other.execute("BEGIN")
    best = await other.fetchval("SELECT job_id FROM dl_jobs ORDER BY priority LIMIT 1 FOR UPDATE")
    assert await ready_free(store) == 1
    await other.execute("ROLLBACK")
    assert await raw.fetchval("SELECT waits_for FROM dl_jobs WHERE job_id = $1", best) == "lock"


@pytest.mark.slow
@pytest.mark.requirement("Q7")
async def test_many_workers_on_few_keys_run_every_job_and_never_two_of_a_key(store, start_worker, raw, add_job, until):
    """Without a sweep, the holders' ends and the second checks must keep every key in use."""
    for number in range(60):
        await add_job(lock_key=f"'k{number % 3}'")
    workers = [start_worker() for _ in range(3)]
    running, ended = set(), 0

    async def work(worker):
        nonlocal ended
        while ended < 60:
            jobs = await worker.claim(limit=4)
            for job in jobs:
                assert job.lock_key not in running
                running.add(job.lock_key)
            for job in jobs:
                await trio.lowlevel.checkpoint()
                running.remove(job.lock_key)
                await worker.end(job)
                ended += 1

    with trio.fail_after(patience_s()):
        async with trio.open_nursery() as nursery:
            for worker in workers:
                nursery.start_soon(work, worker)
    assert await raw.fetchval("SELECT count(*) FROM dl_jobs WHERE status = 'succeeded' AND attempt = 1") == 60

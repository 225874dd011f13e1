"""Claims (Q6, Q7): the claimed jobs and their order, the locks, and the races between two workers."""

from __future__ import annotations

import asyncpg
import msgspec
import pytest
import trio
from conditions import patience_s
from databases import raw_connection
from queue_workers import ANY_CLAIM, BACKOFF_S, LossyConnection

from dataloader.jobs.errors import SchemaError, StoreUnavailable
from dataloader.jobs.ids import uuid7
from dataloader.jobs.listings import JobFilter
from dataloader.jobs.outcomes import Outcome
from dataloader.jobs.states import Step
from dataloader.store.connection.bridge import open_database
from dataloader.store.connection.options import DatabaseOptions
from dataloader.store.queue.leases import Beat, reap
from dataloader.store.queue.make_ready import Staged, ready_due
from dataloader.store.queue.reads import list_jobs

TRY_LOCK = "WHEN pg_try_advisory_lock(h)"
SECOND_LOOK = "SELECT array_agg(k.h) INTO v_live"


def ids(jobs):
    return {job.job_id for job in jobs}


@pytest.mark.requirement("Q6")
async def test_the_most_urgent_jobs_are_claimed_the_older_ones_first(start_worker, add_for_both):
    late = await add_for_both(priority="5")
    old = await add_for_both(priority="5", created_at="now() - interval '1 minute'")
    urgent = await add_for_both(priority="0")
    worker = start_worker()
    assert ids(await worker.claim(limit=2)) == {urgent, old}
    assert ids(await worker.claim(limit=2)) == {late}
    assert await worker.claim() == []


@pytest.mark.requirement("Q6")
async def test_a_job_with_extreme_values_of_another_service_is_claimed(start_worker, add_for_both, store, raw):
    jobs = [
        await add_for_both(available_at="'-infinity'"),
        await add_for_both(attempt="2147483647"),
        await add_for_both(created_at="'-infinity'"),
    ]
    assert ids(await start_worker().claim()) == set(jobs)
    # A job that is never due does not prevent others from becoming ready, either.
    await add_for_both(available_at="'infinity'")
    later = await add_for_both(queue="repeat('q', 8100)", available_at="now() + interval '60 s'")
    assert 0 < (await ready_due(store)).next_due_s <= 60
    await raw.execute("SET session_replication_role = replica")  # otherwise the trigger would make it ready
    await raw.execute("UPDATE dl_jobs SET available_at = now() WHERE job_id = $1", later)
    assert await ready_due(store) == Staged(1, None)


VARIED = "(SELECT jsonb_agg(md5(n::text || random()::text)) FROM generate_series(1, 30000) AS n)"
"""A megabyte that cannot be compressed to less than half."""


@pytest.mark.slow
@pytest.mark.requirement("Q6")
async def test_a_claim_ends_behind_a_megabyte_of_args(start_worker, add_for_both):
    jobs = [await add_for_both(args=VARIED, priority=str(number)) for number in range(3)]
    last = await add_for_both(priority="3")
    worker = start_worker()
    for job in jobs[:2]:
        claim = await worker.ask()
        assert ids(claim.jobs) == {job}
        assert (claim.more, claim.large) == (True, True)
    # The args of the last job are short, but it is behind the third one.
    assert ids(await worker.claim()) == {jobs[2]}
    assert ids(await worker.claim()) == {last}


@pytest.mark.slow
@pytest.mark.requirement("Q6", "Q9")
async def test_no_text_is_made_of_args_that_are_too_long(start_worker, add_for_both):
    # As text it would be six times as long, which is more than the server supports.
    too_long = await add_for_both(args="to_jsonb(repeat(chr(1), 200000000))")
    [job] = await start_worker().claim()
    assert (job.job_id, job.args) == (too_long, None)


LONG_NAME = "(SELECT string_agg(md5(i::text), '') FROM generate_series(1, 300) AS i)"
"""Longer than an index entry can be."""


async def test_names_of_another_service_that_no_index_can_hold_stop_nothing(start_worker, add_job, store, raw, row_of):
    worker, name = start_worker(), await raw.fetchval(f"SELECT {LONG_NAME}")
    ended = await add_job(lock_key=LONG_NAME)
    [job] = await worker.claim()
    await worker.end(job)
    lost = await add_job(lock_key=LONG_NAME, max_attempts="1")
    unknown = await add_job(task=LONG_NAME)
    assert ids(await worker.claim()) == {lost}
    await raw.execute("UPDATE dl_jobs SET lease_expires_at = now() - interval '1 s' WHERE status = 'running'")
    await reap(store, 10)
    assert [await row_of(job_id, "status") for job_id in (ended, lost, unknown)] == ["succeeded", "lost", "queued"]
    assert {job.job_id for job in (await list_jobs(store, JobFilter(lock_key=name))).jobs} == {ended, lost}
    assert ids(await worker.claim(tasks=(name,))) == {unknown}


async def test_a_claim_that_the_server_has_refused_leaves_no_row_in_doubt(start_worker, add_job, raw):
    worker = start_worker()
    await worker.claim()
    await add_job()
    await raw.execute("ALTER FUNCTION dl_claim_known RENAME TO gone")
    with pytest.raises(SchemaError):
        await worker.claim()
    assert worker.locks.settled


async def test_a_claim_continues_after_the_last_one_until_it_restarts_at_the_front(start_worker, add_for_both):
    jobs = [await add_for_both(created_at=f"now() - interval '{10 - n} minutes'") for n in range(5)]
    worker = start_worker()
    first = await worker.ask(limit=2)
    assert first.last == jobs[1]
    urgent = await add_for_both(priority="0")
    second = await worker.ask(limit=2, after=first.last)
    assert ids(second.jobs) == set(jobs[2:4])
    third = await worker.ask(limit=2, after=second.last)
    assert ids(third.jobs) == {jobs[4]}
    # The cursor, not the claim, handles jobs that may be in front.
    assert (third.more, third.last) == (False, jobs[4])
    fourth = await worker.ask(limit=2)
    assert ids(fourth.jobs) == {urgent}
    assert not fourth.more


async def test_a_job_whose_key_comes_free_is_not_passed_by_a_claim_further_behind(start_worker, add_job):
    hot = [await add_job(lock_key="'hot'", created_at=f"now() - interval '{10 - n} minutes'") for n in range(2)]
    later = [await add_job() for _ in range(2)]
    worker = start_worker()
    first = await worker.ask(limit=2)
    assert ids(first.jobs) == {hot[0]}
    await worker.record(Outcome(hot[0], first.jobs[0].token, Step.SUCCEED))
    worker.locks.forget(first.jobs[0].token)
    second = await worker.ask(limit=3, after=first.last)
    assert ids(second.jobs) == {hot[1], *later}


@pytest.mark.requirement("Q6")
async def test_a_claimed_job_carries_what_the_row_says(start_worker, add_job, raw, row_of, journal_of):
    job_id = await add_job(args="""'{"a": [1]}'""", partition_key="'p'", lease_ttl_sec="17", max_attempts="3")
    [job] = await start_worker("me").claim()
    row = await row_of(job_id)
    assert msgspec.structs.asdict(job) == {
        "job_id": job_id,
        "token": row["token"],
        "queue": "q",
        "task": "t",
        "args": '{"a": [1]}',
        "lock_key": str(job_id),
        "lock_hash": await raw.fetchval("SELECT hashtext($1)", str(job_id)),
        "partition_key": "p",
        "attempt": 1,
        "max_attempts": 3,
        "lease_s": 17,
        "more": None,
    }
    assert (row["status"], row["attempt"], row["claimed_by"]) == ("running", 1, "me")
    assert (row["lease_expires_at"] - row["heartbeat_at"]).total_seconds() == 17
    assert row["started_at"] == row["run_started_at"] == row["heartbeat_at"]
    assert await journal_of(job_id) == ["picked"]


@pytest.mark.requirement("Q6")
@pytest.mark.parametrize(
    "columns",
    [
        {"available_at": "now() + interval '1 hour'"},
        {"waits_for": "'lock'"},
        {"queue": "'other'"},
        {"status": "'running'"},
        {"status": "'lost'"},
    ],
    ids=str,
)
async def test_nothing_is_claimed_that_is_not_ready(start_worker, add_job, columns):
    await add_job(**columns)
    assert await start_worker().finds_nothing()


@pytest.mark.requirement("Q6")
async def test_two_workers_never_claim_the_same_job(start_worker, add_job, raw, locks_of):
    for _ in range(60):
        await add_job()
    workers = [start_worker(), start_worker(), start_worker()]
    claimed = []

    async def work(worker):
        while jobs := await worker.claim(limit=7):
            claimed.extend(jobs)

    async with trio.open_nursery() as nursery:
        for worker in workers:
            nursery.start_soon(work, worker)
    assert len(claimed) == len(ids(claimed)) == 60
    assert len({job.token for job in claimed}) == 60
    assert sum([len(await locks_of(worker)) for worker in workers]) == 60


@pytest.mark.requirement("Q6")
async def test_rows_locked_by_another_session_are_skipped(start_worker, add_job, raw):
    locked, free = await add_job(), await add_job()
    await raw.execute("BEGIN")
    await raw.execute("SELECT FROM dl_jobs WHERE job_id = $1 FOR UPDATE", locked)
    with trio.fail_after(patience_s()):
        assert ids(await start_worker().claim(limit=1)) == {free}
    await raw.execute("ROLLBACK")


@pytest.mark.requirement("Q7")
async def test_a_claim_locks_only_what_it_returns(start_worker, add_job, locks_of):
    for _ in range(30):
        await add_job()
    worker = start_worker()
    jobs = await worker.claim(limit=10)
    assert await locks_of(worker) == sorted(job.lock_hash for job in jobs)
    assert len(jobs) == 10


@pytest.mark.requirement("Q7")
async def test_of_several_jobs_of_a_key_in_one_claim_the_first_runs_and_the_others_wait(
    start_worker, add_job, row_of, journal_of, locks_of
):
    jobs = [await add_job(lock_key="'k'", priority=str(place)) for place in (3, 1, 2)]
    other = await add_job(priority="9")
    worker = start_worker()
    claim = await worker.ask()
    assert ids(claim.jobs) == {jobs[1], other}
    assert claim.to_test == []
    for parked in (jobs[0], jobs[2]):
        row = await row_of(parked)
        assert (row["status"], row["waits_for"], row["attempt"], row["token"]) == ("queued", "lock", 0, 0)
        assert await journal_of(parked) == ["requeue: lock_key"]
    assert len(await locks_of(worker)) == 2


@pytest.mark.requirement("Q7")
async def test_a_key_that_this_worker_holds_is_not_locked_a_second_time(start_worker, add_job, row_of, locks_of):
    await add_job(lock_key="'k'")
    worker = start_worker()
    [job] = await worker.claim()
    second = await add_job(lock_key="'k'")
    assert (await worker.ask()).jobs == []
    assert await row_of(second, "waits_for") == "lock"
    await worker.end(job)
    # Session locks are re-entrant: if it had been taken twice, it would still be held.
    assert await locks_of(worker) == []
    assert ids(await worker.claim()) == {second}


@pytest.mark.requirement("Q7")
async def test_a_key_held_elsewhere_parks_the_job_without_an_attempt(start_worker, add_job, raw, row_of, journal_of):
    job_id = await add_job(lock_key="'k'")
    await raw.execute("SELECT pg_advisory_lock(hashtext('k'))")  # as other services take it
    claim = await start_worker().ask()
    row = await row_of(job_id)
    assert claim.jobs == []
    assert claim.to_test == [await raw.fetchval("SELECT hashtext('k')")]
    assert (row["status"], row["waits_for"], row["attempt"]) == ("queued", "lock", 0)
    # Another service finds it again after the backoff.
    ahead_s = await raw.fetchval("SELECT extract(epoch FROM $1 - now())::float8", row["available_at"])
    assert 0 < ahead_s <= BACKOFF_S
    assert await journal_of(job_id) == ["requeue: lock_key"]


@pytest.mark.requirement("Q7")
async def test_two_keys_with_one_hash_exclude_each_other(start_worker, add_job, raw, locks_of):
    one, other = await raw.fetchval(
        "SELECT (array_agg(k))[:2] FROM (SELECT 'key ' || i AS k FROM generate_series(1, 300000) AS i) AS keys"
        " GROUP BY hashtext(k) HAVING count(*) > 1 LIMIT 1"
    )
    await add_job(lock_key=f"'{one}'")
    await add_job(lock_key=f"'{other}'")
    worker, second = start_worker(), start_worker()
    [job] = await worker.claim(limit=1)
    assert await second.claim() == []
    await worker.end(job)
    [job] = await second.claim()
    assert {job.lock_key} < {one, other}


@pytest.mark.requirement("Q7")
async def test_a_live_lease_blocks_its_key_when_the_lock_is_gone(start_worker, add_job, end_session, row_of):
    await add_job(lock_key="'k'")
    first, second = start_worker(), start_worker()
    await first.claim()
    await end_session(first)
    waiting = await add_job(lock_key="'k'")
    assert await second.claim() == []
    assert await row_of(waiting, "waits_for") == "lock"


@pytest.mark.slow
@pytest.mark.requirement("Q7")
@pytest.mark.parametrize("isolation", ["read committed", "repeatable read", "serializable"])
async def test_a_claim_committed_between_anothers_snapshot_and_its_lock_blocks_the_key(
    database, start_worker, add_job, raw, barrier, until_blocked, end_session, locks_of, row_of, isolation
):
    # For every default of the database.
    await raw.execute(f"ALTER DATABASE {database.name} SET default_transaction_isolation = '{isolation}'")
    first_job = await add_job(queue="'one'", lock_key="'k'")
    second_job = await add_job(queue="'two'", lock_key="'k'")
    quick, slow = start_worker(), start_worker("slow")
    await barrier(TRY_LOCK)
    claims = []

    async def claim_slowly():
        claims.append(await slow.ask("two"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(claim_slowly)
        await until_blocked()
        # The slow claim has seen no running job with the key; now there is one, and its lock has been released already.
        assert ids(await quick.claim("one")) == {first_job}
        await end_session(quick)
        await barrier.lift()
    assert claims[0].jobs == []
    assert await row_of(second_job, "waits_for") == "lock"
    assert await locks_of(slow) == []


@pytest.mark.requirement("Q7")
async def test_a_key_whose_lease_has_ended_is_free_once_it_is_reaped(start_worker, add_job, store, raw, end_session):
    held = await add_job(lock_key="'k'")
    first, second = start_worker(), start_worker()
    await first.claim()
    await end_session(first)
    waiting = await add_job(lock_key="'k'", priority="1")
    assert await second.claim() == []
    await raw.execute("UPDATE dl_jobs SET lease_expires_at = now() - interval '1 s' WHERE job_id = $1", held)
    await reap(store, 10)
    [job] = await second.claim()
    assert job.job_id == waiting


@pytest.mark.slow
@pytest.mark.requirement("Q7")
async def test_locks_of_a_claim_that_timed_out_are_given_back_and_the_jobs_run(
    database, start_worker, add_job, barrier, raw, locks_of, row_of
):
    jobs = {await add_job() for _ in range(3)}
    await barrier(SECOND_LOOK)
    async with open_database(DatabaseOptions(dsn=database.dsn, statement_timeout_s=0.5)) as impatient:
        slow = start_worker("slow", impatient)
        # The driver may notice its timeout first and close the connection; then the end of the session releases the
        # locks.
        with pytest.raises(StoreUnavailable):
            await slow.ask()
        assert [await row_of(job_id, "attempt") for job_id in jobs] == [0, 0, 0]
        await barrier.lift()
        claimed = await slow.claim(limit=1)
        assert await locks_of(slow) == [claimed[0].lock_hash]
        assert ids(claimed) | ids(await start_worker().claim()) == jobs
        await slow.locks.close()


@pytest.mark.requirement("Q7")
async def test_a_failed_claim_unlocks_its_surplus_locks_and_wakes_parked_jobs(
    start_worker, add_job, barrier, until_blocked, raw, locks_of, row_of
):
    await add_job(lock_key="'k'")
    slow, other = start_worker("slow"), start_worker()
    await slow.ask("elsewhere")
    await barrier(SECOND_LOOK)
    async with trio.open_nursery() as nursery:

        async def fail():
            with pytest.raises(StoreUnavailable):
                await slow.ask()

        nursery.start_soon(fail)
        await until_blocked()
        await raw.execute("SELECT pg_cancel_backend($1)", slow.pid)
    assert len(await locks_of(slow)) == 1
    parked = await add_job(lock_key="'k'", queue="'r'")
    assert await other.claim("r") == []
    assert await row_of(parked, "waits_for") == "lock"
    await barrier.lift()
    await slow.ping()
    assert await locks_of(slow) == []
    assert ids(await other.claim("r")) == {parked}


@pytest.mark.requirement("Q7")
@pytest.mark.requirement("Q12")
async def test_a_claim_whose_reply_was_lost_goes_back_with_its_attempt(
    start_worker, add_for_both, row_of, journal_of, locks_of, raw
):
    known = await add_for_both()
    worker = start_worker()
    [running] = await worker.claim()
    job_id, stopped = await add_for_both(), await add_for_both()
    session = worker.locks._session
    session._connection = LossyConnection(session._connection, ANY_CLAIM)
    with pytest.raises(StoreUnavailable):
        await worker.ask()
    assert await row_of(job_id, "status") == "running"  # committed, but unknown to the worker
    await raw.execute("UPDATE dl_jobs SET cancel_requested = true WHERE job_id = $1", stopped)
    await worker.ping()
    row = await row_of(job_id)
    assert (row["status"], row["attempt"], row["refunds"], row["waits_for"]) == ("queued", 0, 1, None)
    assert (row["claimed_by"], row["lease_expires_at"]) == (None, None)
    assert await journal_of(job_id) == ["picked", "requeue: the claim's reply was lost"]
    assert await row_of(stopped, "status") == "canceled"
    assert (await row_of(known, "status"), await worker.beat(running)) == ("running", [Beat.RENEWED])
    assert await locks_of(worker) == [running.lock_hash] * (running.lock_key is not None)
    [again] = await worker.claim()
    assert (again.job_id, again.attempt) == (job_id, 1)


@pytest.mark.requirement("Q7")
async def test_a_claim_repeated_after_a_deadlock_holds_each_key_once(start_worker, add_job, locks_of):
    await add_job()
    worker = start_worker()
    await worker.ask("elsewhere")
    session = worker.locks._session
    session._connection = LossyConnection(
        session._connection, "dl_claim", asyncpg.DeadlockDetectedError("deadlock detected")
    )
    [job] = await worker.claim()
    assert await locks_of(worker) == [job.lock_hash]
    await worker.end(job)
    assert await locks_of(worker) == []


@pytest.mark.requirement("Q4")
async def test_a_queued_job_that_is_to_be_canceled_ends_so_and_never_runs(
    start_worker, add_for_both, row_of, journal_of
):
    job_id = await add_for_both(cancel_requested="true")
    claim = await start_worker().ask()
    row = await row_of(job_id)
    assert claim.jobs == []
    assert (row["status"], row["attempt"], row["waits_for"]) == ("canceled", 0, None)
    assert row["finished_at"] is not None
    assert await journal_of(job_id) == ["canceled: cancel_requested"]


@pytest.mark.requirement("Q6")
async def test_a_claim_neither_locks_nor_writes_jobs_of_unknown_tasks(
    start_worker, add_for_both, raw, row_of, journal_of
):
    unknown, known = await add_for_both(task="'new'", priority="0"), await add_for_both()
    before = await raw.fetchval("SELECT ctid::text || xmax::text FROM dl_jobs WHERE job_id = $1", unknown)
    old, new = start_worker(), start_worker()
    first = await old.ask()
    assert (ids(first.jobs), first.passed_over, first.to_test) == ({known}, False, [])
    assert await old.finds_nothing()
    after = await raw.fetchval("SELECT ctid::text || xmax::text FROM dl_jobs WHERE job_id = $1", unknown)
    assert (after, await row_of(unknown, "waits_for"), await journal_of(unknown)) == (before, None, [])
    assert ids(await new.claim(tasks=("t", "new"))) == {unknown}


@pytest.mark.requirement("Q6")
async def test_a_locked_job_of_an_unknown_task_is_not_worth_another_claim(start_worker, add_for_both, raw):
    locked = {task: await add_for_both(task=f"'{task}'") for task in ("new", "t")}
    worker = start_worker()
    for task, job_id in locked.items():
        await raw.execute("BEGIN")
        await raw.execute("SELECT FROM dl_jobs WHERE job_id = $1 FOR UPDATE", job_id)
        claim = await worker.ask(tasks=("other", task) if task == "t" else ("other",))
        await raw.execute("ROLLBACK")
        assert (claim.jobs, claim.passed_over) == ([], task == "t")


@pytest.mark.requirement("Q6")
async def test_a_claim_reports_more_than_ten_thousand_unknown_jobs_at_the_front(start_worker, add_for_both, raw):
    await raw.execute("SET session_replication_role = replica")
    await raw.execute(
        "INSERT INTO dl_jobs (job_id, queue, task, lock_key, keyed, priority)"
        " SELECT gen_random_uuid(), 'q', 'new', n::text, false, 0 FROM generate_series(1, 10000) AS n"
    )
    known = [await add_for_both() for _ in range(3)]
    worker = start_worker()
    blocked = await worker.ask(limit=1)
    assert (ids(blocked.jobs), blocked.blocked) == ({known[0]}, True)
    behind = await worker.ask(limit=1, after=blocked.last)
    assert (ids(behind.jobs), behind.blocked) == ({known[1]}, False)
    await raw.execute("DELETE FROM dl_jobs WHERE ctid = (SELECT min(ctid) FROM dl_jobs)")
    free = await worker.ask(limit=1)
    assert (ids(free.jobs), free.blocked) == ({known[2]}, False)


@pytest.mark.requirement("Q7")
async def test_an_unknown_or_canceled_job_ahead_of_its_key_does_not_block_the_next(start_worker, add_job):
    await add_job(lock_key="'k'", task="'new'", priority="0")
    await add_job(lock_key="'k'", cancel_requested="true", priority="0")
    runnable = await add_job(lock_key="'k'")
    assert ids(await start_worker().claim()) == {runnable}


@pytest.mark.requirement("Q6")
async def test_nothing_is_claimed_from_a_paused_queue(start_worker, add_for_both, raw):
    await add_for_both()
    await raw.execute("INSERT INTO dl_queues (queue, paused) VALUES ('q', true)")
    worker = start_worker()
    assert await worker.finds_nothing()
    await raw.execute("UPDATE dl_queues SET paused = false")
    assert len(await worker.claim()) == 1


@pytest.mark.requirement("Q9")
async def test_every_claim_has_its_own_token_and_counts_an_attempt(start_worker, add_for_both, row_of):
    job_id = await add_for_both()
    worker, tokens = start_worker(), []
    for attempt in (1, 2, 3):
        [job] = await worker.claim()
        assert (job.job_id, job.attempt) == (job_id, attempt)
        tokens.append(job.token)
        await worker.end(job, Step.RETRY, error="no")
    assert len(set(tokens)) == 3


@pytest.mark.requirement("Q6")
async def test_a_job_deleted_during_a_claim_causes_no_error(database, start_worker, add_job, barrier, until_blocked):
    gone, stays = await add_job(), await add_job()
    await barrier(TRY_LOCK)
    slow = start_worker("slow")
    claims = []
    async with raw_connection(database.dsn) as operator, trio.open_nursery() as nursery:

        async def claim():
            claims.extend(await slow.claim())

        async def delete():
            await operator.execute("DELETE FROM dl_jobs WHERE job_id = $1", gone)

        nursery.start_soon(claim)
        await until_blocked()
        nursery.start_soon(delete)
        await barrier.lift()
    # The deletion waits for the claim's row lock, so both were claimed; the run's end then finds no row.
    assert ids(claims) == {gone, stays}
    for job in claims:
        finished = await slow.end(job)
        assert finished.void == ([job.token] if job.job_id == gone else [])


async def test_an_unknown_queue_is_empty(start_worker):
    claim = await start_worker().ask(str(uuid7()))
    assert (claim.jobs, claim.to_test, claim.more) == ([], [], False)


@pytest.mark.requirement("Q7")
async def test_many_jobs_of_one_key_are_parked_together_and_runnable_ones_stay_ready(start_worker, add_job, raw):
    worker = start_worker()
    first = await add_job(lock_key="'crowd'", priority="1")
    for _ in range(5):
        await add_job(lock_key="'crowd'", priority="2")
    others = [await add_job(priority="3") for _ in range(3)]
    claim = await worker.locks.claim("q", 1, ["t"], 3_600, look=8)
    assert ([job.job_id for job in claim.jobs], claim.more) == ([first], True)
    waiting = "SELECT job_id FROM dl_jobs WHERE status = 'queued' AND waits_for IS NULL ORDER BY created_at"
    assert [row["job_id"] for row in await raw.fetch(waiting)] == others
    # The jobs that were left for later are not locked.
    claim = await worker.locks.claim("q", 3, ["t"], 3_600)
    assert sorted(job.job_id for job in claim.jobs) == sorted(others)

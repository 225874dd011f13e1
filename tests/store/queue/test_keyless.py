"""Jobs without a lock_key: they take no lock, wait for none, and are in no index of keys (Q7)."""

from __future__ import annotations

import pytest
import trio
from databases import raw_connection
from foreign import BACK_OFF, CLAIM, FINISH, LOCK

from dataloader.jobs.contract import Operator
from dataloader.jobs.errors import IdempotencyConflict
from dataloader.jobs.listings import JobFilter
from dataloader.jobs.model import MAX_ARGS_BYTES, NewJob
from dataloader.jobs.outcomes import Outcome
from dataloader.jobs.states import Step
from dataloader.store.queue import control
from dataloader.store.queue.enqueue import enqueue
from dataloader.store.queue.leases import Beat, aio_revive, reap
from dataloader.store.queue.reads import get_job, list_jobs

pytestmark = pytest.mark.requirement("Q7")

KEY_INDEXES = """
SELECT c.relname, c.reltuples FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
WHERE indrelid = 'dl_jobs'::regclass AND pg_get_indexdef(indexrelid) LIKE '%hashtext(lock_key)%'
"""


@pytest.fixture
async def keyless(store):
    """Return a function that adds jobs without a key to the queue q, and returns their IDs."""

    async def keyless(count=1, **fields):
        added = await enqueue(store, [NewJob(queue="q", task="t", **fields) for _ in range(count)])
        return [one.job_id for one in added]

    return keyless


async def test_they_run_side_by_side_without_a_lock_and_leave_none_behind(keyless, start_worker, row_of, locks_of):
    jobs = await keyless(5)
    worker = start_worker()
    claimed = await worker.claim()
    assert [job.job_id for job in claimed] == jobs
    assert {(job.lock_key, job.lock_hash) for job in claimed} == {(None, None)}
    assert await locks_of(worker) == []
    assert set(worker.locks.tokens) == {job.token for job in claimed}
    assert not await worker.claim()
    for job in claimed:
        await worker.end(job)
    assert {(await row_of(job_id))["status"] for job_id in jobs} == {"succeeded"}
    assert worker.locks.tokens == {}


async def test_a_claim_takes_as_many_as_it_has_slots_of_both_kinds(keyless, add_job, start_worker, locks_of):
    first = await add_job(lock_key="'k'")
    keyless_ones = await keyless(2)
    await add_job(lock_key="'k'")
    more = await keyless(2)
    worker = start_worker()
    claim = await worker.ask(limit=4)
    assert [job.job_id for job in claim.jobs] == [first, *keyless_ones]
    assert len(await locks_of(worker)) == 1
    assert [job.job_id for job in await worker.claim()] == more


async def test_the_id_of_a_job_and_an_empty_text_are_keys_of_others(keyless, add_job, start_worker):
    [job_id] = await keyless()
    [job] = await start_worker().claim()
    same = [await add_job(lock_key=f"'{job_id}'") for _ in range(2)]
    empty = [await add_job(lock_key="''") for _ in range(2)]
    claimed = await start_worker().claim()
    assert [job.job_id for job in claimed] == [same[0], empty[0]]
    assert [job.lock_key for job in (job, *claimed)] == [None, str(job_id), ""]
    assert await start_worker().claim() == []


@pytest.mark.requirement("Q3")
async def test_a_job_without_a_key_shows_none(keyless, store):
    [job_id] = await keyless()
    assert (await get_job(store, job_id)).lock_key is None
    assert (await list_jobs(store, JobFilter(lock_key=str(job_id)))).jobs == []
    [with_key] = await enqueue(store, [NewJob(queue="q", task="t", lock_key=str(job_id))])
    [listed] = (await list_jobs(store, JobFilter(lock_key=str(job_id)))).jobs
    assert (listed.job_id, listed.lock_key) == (with_key.job_id, str(job_id))


@pytest.mark.requirement("Q2")
async def test_a_request_that_names_the_id_as_its_key_is_another_one(store, raw, keyless):
    [job_id] = await keyless(idempotency_key="once")
    await raw.execute("UPDATE dl_jobs SET request_hash = NULL")
    assert await keyless(idempotency_key="once") == [job_id]
    with pytest.raises(IdempotencyConflict):
        await keyless(idempotency_key="once", lock_key=str(job_id))


async def test_they_stand_in_no_index_of_keys(keyless, raw, add_job):
    await keyless(40)
    await raw.execute(
        "UPDATE dl_jobs SET status = (CASE WHEN job_id::text < (SELECT max(job_id::text) FROM dl_jobs) THEN 'running'"
        " ELSE 'succeeded' END)::dl_status, finished_at = now()"
    )
    await add_job(lock_key="'k'", status="'running'")
    await add_job(lock_key="'k'", status="'failed'", finished_at="now()")
    await add_job(lock_key="'k'", waits_for="'lock'")
    indexes = [row["relname"] for row in await raw.fetch(KEY_INDEXES)]
    assert set(indexes) == {"ix_dl_jobs_parked", "ix_dl_jobs_running_keys", "ix_dl_jobs_ended_keys"}
    for index in indexes:
        await raw.execute(f"REINDEX INDEX {index}")  # which counts its entries
    assert {row["reltuples"] for row in await raw.fetch(KEY_INDEXES)} == {1}


async def test_the_end_of_the_lock_session_takes_no_key_from_them(keyless, start_worker, end_session, raw, row_of):
    [job_id] = await keyless()
    worker = start_worker()
    [job] = await worker.claim()
    await end_session(worker)
    # A holder of that lock does not block the job.
    assert await raw.fetchval(LOCK, str(job_id))
    await worker.ping()
    assert worker.lost == []
    assert await worker.beat(job) == [Beat.RENEWED]
    await worker.end(job)
    assert await row_of(job_id, "status") == "succeeded"


@pytest.mark.requirement("Q8")
async def test_their_expired_leases_are_renewed_by_the_token_alone(keyless, start_worker, store, raw):
    await keyless(2)
    [ours, others] = await start_worker().claim()
    expire = "UPDATE dl_jobs SET lease_expires_at = now() - interval '1 s'"
    await raw.execute(expire)
    await reap(store, 1)
    runs = [(ours.job_id, ours.token), (others.job_id, others.token)]
    [again] = await start_worker().claim()
    await raw.execute(expire)
    [left] = {job_id for job_id, _ in runs} - {again.job_id}
    assert await store.write(aio_revive, runs) == {token for job_id, token in runs if job_id == left}


@pytest.mark.requirement("Q10")
async def test_the_end_of_a_job_without_a_key_wakes_no_other(keyless, add_job, start_worker, store, raw):
    reaped, canceled = await keyless(2)
    parked = [await add_job(lock_key=f"'{job_id}'", waits_for="'lock'") for job_id in (reaped, canceled)]
    await control.cancel(store, canceled, Operator("operator"))
    assert [job.job_id for job in await start_worker().claim()] == [reaped]
    await raw.execute("UPDATE dl_jobs SET lease_expires_at = now() - interval '1 s' WHERE status = 'running'")
    taken = await reap(store, 10)
    assert (taken.hashes, taken.became) == ([], [("q", "queued")])
    assert await raw.fetchval("SELECT count(*) FROM dl_jobs WHERE waits_for = 'lock'") == len(parked)


async def test_one_of_an_unknown_task_and_a_canceled_one_are_nobodys_keys(keyless, start_worker, raw):
    await keyless(2)
    await raw.execute("UPDATE dl_jobs SET cancel_requested = true WHERE ctid = (SELECT min(ctid) FROM dl_jobs)")
    claim = await start_worker().ask(tasks=("u",))
    assert (claim.jobs, claim.to_test) == ([], [])
    assert await raw.fetchval("SELECT array_agg(waits_for) FROM dl_jobs WHERE status = 'queued'") == [None]


@pytest.mark.requirement("Q1")
@pytest.mark.parametrize("way", ["general", "plain"])
async def test_a_foreign_service_and_we_never_claim_the_same_one(
    keyless, database, start_worker, barrier, until_blocked, raw, row_of, general_claims_only, way
):
    """Both claims run concurrently, each of them first once: the row's lock decides, and then its status."""
    if way == "general":
        general_claims_only()
    first, second = await keyless(2)
    claimed = []

    async def claim():
        claimed.extend(await start_worker("slow").claim())

    async with raw_connection(database.dsn) as foreign, trio.open_nursery() as nursery:
        # The other service's claim has its row and has not committed yet.
        await foreign.execute("BEGIN")
        [taken] = await foreign.fetch(CLAIM)
        assert taken["job_id"] == first
        await (barrier("WHEN h IS NULL") if way == "general" else barrier.in_plain_claim(has_locked=True))
        nursery.start_soon(claim)
        await until_blocked()
        await foreign.execute("COMMIT")
        # Our claim has its row and has not committed yet, and another service claims.
        assert await foreign.fetch(CLAIM) == []
        assert await foreign.fetchval(LOCK, taken["lock_key"])
        await barrier.lift()
    assert [job.job_id for job in claimed] == [second]
    await raw.execute(FINISH, first)
    assert [await row_of(job_id, "status") for job_id in (first, second)] == ["succeeded", "running"]


@pytest.mark.requirement("Q1")
async def test_one_that_a_foreign_service_gives_back_runs_under_another_token(keyless, raw, start_worker, row_of):
    [job_id] = await keyless()
    worker = start_worker()
    [job] = await worker.claim()
    await raw.execute(BACK_OFF, job_id, 0.0)
    [again] = await worker.claim()
    assert again.token != job.token
    assert await worker.beat(job) == [Beat.LOST]
    assert (await worker.record(Outcome(job.job_id, job.token, Step.SUCCEED))).void == [job.token]
    assert await row_of(job_id, "status") == "running"


@pytest.mark.slow
@pytest.mark.requirement("Q2")
@pytest.mark.parametrize("compressible", [True, False])
async def test_args_that_no_worker_should_hold_are_left_where_they_are(add_job, raw, start_worker, compressible):
    varied = "(SELECT string_agg(md5(n::text), '') FROM generate_series(1, $2 / 32) AS n)"
    text = "repeat('x', $2::int)" if compressible else varied
    for length in (MAX_ARGS_BYTES, MAX_ARGS_BYTES - 4_096, 100_000):
        job_id = await add_job()
        await raw.execute(
            f"UPDATE dl_jobs SET args = jsonb_build_object('a', {text}) WHERE job_id = $1", job_id, length
        )
    # After a megabyte of stored size, a claim leaves the rest for the next one.
    worker = start_worker()
    claimed = [job for _ in range(3) for job in await worker.claim()]
    assert [job.args is not None and len(job.args) > 90_000 for job in claimed] == [False, True, True]

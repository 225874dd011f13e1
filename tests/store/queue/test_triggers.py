"""Other services on the same tables (Q1) run the document's SQL, do not know ours, and both sides stay correct."""

from __future__ import annotations

import pytest
import trio
from conditions import patience_s
from databases import raw_connection
from foreign import BACK_OFF, CLAIM, FINISH, LOCK, REAP, UNLOCK

from dataloader.jobs.ids import uuid7
from dataloader.jobs.outcomes import Outcome
from dataloader.jobs.states import Step
from dataloader.store.queue.leases import Beat, reap
from dataloader.store.queue.make_ready import ready_due, ready_free
from dataloader.store.queue.reads import get_job

INSERT = """
INSERT INTO dl_jobs (job_id, queue, task, args, lock_key, priority, available_at)
VALUES ($1, 'q', 't', '{}', $2, 100, COALESCE($3, now())) ON CONFLICT (idempotency_key) DO NOTHING RETURNING job_id
"""
HEARTBEAT = """
UPDATE dl_jobs SET heartbeat_at = now(), lease_expires_at = now() + make_interval(secs => lease_ttl_sec)
WHERE job_id = $1 AND status = 'running' RETURNING cancel_requested
"""
RETRY = """
UPDATE dl_jobs SET status = CASE WHEN attempt < max_attempts THEN 'queued'::dl_status ELSE 'failed'::dl_status END,
  available_at = CASE WHEN attempt < max_attempts THEN now() + make_interval(secs => 30 * attempt)
                      ELSE available_at END,
  error = $2, lease_expires_at = NULL, finished_at = CASE WHEN attempt >= max_attempts THEN now() END
WHERE job_id = $1
"""
CANCEL = "UPDATE dl_jobs SET cancel_requested = true WHERE job_id = $1"

ROLE = """
DO $$ BEGIN CREATE ROLE foreign_service NOLOGIN; EXCEPTION WHEN duplicate_object THEN NULL; END $$;
GRANT SELECT, INSERT, UPDATE, DELETE ON dl_jobs, dl_job_events TO foreign_service;
SET ROLE foreign_service;
"""


@pytest.fixture(params=["owner", "granted"])
async def foreign(request, database):
    """Open another service's connection: as the tables' owner, or as a role with rights on two tables only."""
    async with raw_connection(database.dsn) as connection:
        if request.param == "granted":
            await connection.execute(ROLE)
        yield connection


@pytest.fixture
async def hear(database):
    """Return a function that reads the notifications on each of our channels."""
    heard = {"dl_jobs": [], "dl_due": [], "dl_cancel": [], "dl_stop": [], "dl_changed": []}

    async with raw_connection(database.dsn) as connection:
        for channel in heard:
            await connection._cross(
                connection.asyncpg.add_listener, channel, lambda *event: heard[event[2]].append(event[3])
            )

        async def hear():
            """Return the payloads since the last call, as (channel, payload)."""
            await connection.execute("SELECT 1")
            found = [(channel, payload) for channel, payloads in heard.items() for payload in payloads]
            for payloads in heard.values():
                payloads.clear()
            return found

        yield hear


async def insert(foreign, key=None, at=None):
    job_id = uuid7()
    assert await foreign.fetchval(INSERT, job_id, key or str(job_id), at) == job_id
    return job_id


@pytest.mark.requirement("Q1")
async def test_a_job_that_a_foreign_service_inserts_is_run_by_us(foreign, start_worker, hear):
    job_id = await insert(foreign)
    assert await hear() == [("dl_jobs", "q")]
    [job] = await start_worker().claim()
    assert job.job_id == job_id


@pytest.mark.requirement("Q1")
async def test_a_delayed_job_of_a_foreign_service_waits_for_its_time(foreign, start_worker, hear, row_of, raw, store):
    at = await raw.fetchval("SELECT now() + interval '10 minutes'")
    job_id = await insert(foreign, at=at)
    assert await hear() == [("dl_due", str(int(at.timestamp())))]
    assert await row_of(job_id, "waits_for") == "time"
    assert await start_worker().finds_nothing()
    # The document's way to make it due.
    await foreign.execute("UPDATE dl_jobs SET available_at = now() WHERE job_id = $1", job_id)
    assert await hear() == [("dl_jobs", "q")]
    assert len(await start_worker().claim()) == 1


@pytest.mark.requirement("Q1")
async def test_a_job_of_ours_is_run_by_a_foreign_service(foreign, add_job, store, row_of, start_worker):
    job_id = await add_job()
    row = await foreign.fetchrow(CLAIM)
    assert (row["job_id"], row["attempt"]) == (job_id, 1)
    claimed = await row_of(job_id)
    assert (claimed["status"], claimed["claimed_by"], claimed["waits_for"]) == ("running", None, None)
    assert claimed["token"] > 0
    await foreign.fetchval(HEARTBEAT, job_id)
    assert await row_of(job_id, "token") == claimed["token"]
    await foreign.execute(FINISH, job_id)
    assert await row_of(job_id, "status") == "succeeded"
    assert await start_worker().finds_nothing()


@pytest.mark.slow
@pytest.mark.requirement("Q1")
@pytest.mark.requirement("Q9")
async def test_a_foreign_claim_fences_our_former_run(foreign, add_job, start_worker, raw, row_of):
    job_id = await add_job()
    worker = start_worker()
    [job] = await worker.claim()
    await raw.execute("UPDATE dl_jobs SET lease_expires_at = now() - interval '1 s'")
    assert await foreign.fetchval(REAP) == job_id
    await foreign.fetchrow(CLAIM)
    before = await row_of(job_id)
    assert before["token"] not in {0, job.token}
    assert await worker.beat(job) == [Beat.LOST]
    assert (await worker.record(Outcome(job_id, job.token, Step.SUCCEED))).void == [job.token]
    assert await row_of(job_id) == before


@pytest.mark.slow
@pytest.mark.requirement("Q1")
@pytest.mark.parametrize("write", [FINISH, BACK_OFF, RETRY], ids=["finish", "back off", "retry"])
async def test_a_foreign_write_to_our_running_job_ends_our_run(foreign, add_job, start_worker, row_of, write):
    job_id = await add_job()
    worker = start_worker()
    [job] = await worker.claim()
    arguments = {FINISH: [], BACK_OFF: [5.0], RETRY: ["no"]}[write]
    await foreign.execute(write, job_id, *arguments)
    before = await row_of(job_id)
    assert before["status"] == ("succeeded" if write == FINISH else "queued")
    assert await worker.beat(job) == [Beat.LOST]
    assert (await worker.end(job, Step.FAIL, error="late")).written == {}
    assert await row_of(job_id) == before


@pytest.mark.requirement("Q1")
@pytest.mark.requirement("Q7")
async def test_a_foreign_service_that_holds_a_key_parks_our_job_and_the_sweep_wakes_it(
    foreign, start_worker, row_of, store
):
    first, second = await insert(foreign, "k"), await insert(foreign, "k")
    worker = start_worker()
    claimed = await foreign.fetchrow(CLAIM)
    assert claimed["job_id"] == first
    assert await foreign.fetchval(LOCK, "k")
    assert await worker.claim() == []
    assert await row_of(second, "waits_for") == "lock"
    assert await ready_free(store) == 0
    await foreign.execute(FINISH, first)
    await foreign.fetchval(UNLOCK, "k")
    assert await ready_free(store) == 1
    assert [job.job_id for job in await worker.claim()] == [second]


@pytest.mark.slow
@pytest.mark.requirement("Q1")
@pytest.mark.requirement("Q7")
async def test_a_foreign_service_backs_off_from_our_key_and_its_job_comes_back_in_time(
    foreign, start_worker, raw, row_of, store, hear
):
    first = await insert(foreign, "k")
    worker = start_worker()
    [job] = await worker.claim()
    second = await insert(foreign, "k")
    assert (await foreign.fetchrow(CLAIM))["job_id"] == second
    assert not await foreign.fetchval(LOCK, "k")
    await hear()
    await foreign.execute(BACK_OFF, second, 0.3)
    row = await row_of(second)
    # In the document a backoff uses an attempt; the service decides this.
    assert (row["status"], row["waits_for"], row["attempt"]) == ("queued", "time", 1)
    assert [channel for channel, _ in await hear()] == ["dl_due"]
    await worker.end(job)
    with trio.fail_after(patience_s()):
        while not (await ready_due(store)).readied:  # noqa: ASYNC110 - the database has no event
            await trio.sleep(0.02)
    assert [job.job_id for job in await worker.claim()] == [second]
    assert await row_of(first, "status") == "succeeded"


@pytest.mark.requirement("Q1")
async def test_a_foreign_service_takes_a_job_that_we_parked_when_its_backoff_is_over(
    foreign, start_worker, raw, row_of
):
    job_id = await insert(foreign, "k")
    await raw.execute("SELECT pg_advisory_lock(hashtext('k'))")
    await start_worker().claim()
    assert await row_of(job_id, "waits_for") == "lock"
    assert await foreign.fetchrow(CLAIM) is None
    await raw.execute("UPDATE dl_jobs SET available_at = now() - interval '1 s'")
    assert (await foreign.fetchrow(CLAIM))["job_id"] == job_id
    assert await row_of(job_id, "waits_for") is None
    await foreign.execute(RETRY, job_id, "no")
    assert await row_of(job_id, "waits_for") == "time"


@pytest.mark.slow
@pytest.mark.requirement("Q1")
@pytest.mark.parametrize("later_s", [3600, 10], ids=["later than our park", "sooner than our park"])
async def test_a_foreign_service_can_postpone_a_parked_job_and_the_next_one_runs(
    foreign, add_job, start_worker, row_of, store, later_s
):
    worker = start_worker()
    await add_job(lock_key="'k'", priority="0")
    [job] = await worker.claim()
    postponed, following = await add_job(lock_key="'k'", priority="1"), await add_job(lock_key="'k'", priority="2")
    assert await worker.claim() == []
    assert [await row_of(job_id, "waits_for") for job_id in (postponed, following)] == ["lock", "lock"]
    due = await foreign.fetchval(
        "UPDATE dl_jobs SET available_at = now() + make_interval(secs => $2)"
        " WHERE job_id = $1 AND status = 'queued' RETURNING available_at",
        postponed,
        later_s,
    )
    assert await row_of(postponed, "waits_for") == "time"
    await worker.end(job)
    [job] = await worker.claim()
    assert job.job_id == following
    await worker.end(job)
    await ready_free(store)
    assert await row_of(postponed, "available_at") == due
    await foreign.execute("UPDATE dl_jobs SET available_at = now() WHERE job_id = $1", postponed)
    [job] = await worker.claim()
    assert job.job_id == postponed


@pytest.mark.slow
@pytest.mark.requirement("Q1")
@pytest.mark.requirement("Q10")
async def test_each_reaper_takes_back_the_others_jobs(foreign, add_job, start_worker, raw, row_of, store):
    ours, theirs = await add_job(priority="1"), await add_job()
    await start_worker().claim(limit=1)
    assert (await foreign.fetchrow(CLAIM))["job_id"] == theirs

    async def our_reaper():
        return (await reap(store, 10)).hashes

    for reap_all in (our_reaper, lambda: foreign.fetch(REAP)):
        await raw.execute("UPDATE dl_jobs SET status = 'running', lease_expires_at = now() - interval '1 s'")
        assert len(await reap_all()) == 2
        assert [await row_of(job_id, "status") for job_id in (ours, theirs)] == ["queued", "queued"]
        assert [await row_of(job_id, "waits_for") for job_id in (ours, theirs)] == [None, None]


@pytest.mark.slow
@pytest.mark.requirement("Q4")
async def test_a_cancel_request_of_anybody_is_notified_while_the_job_runs(foreign, add_job, start_worker, hear):
    running = await add_job()
    [job] = await start_worker().claim()
    queued = await add_job()
    await hear()
    await foreign.execute(CANCEL, running)
    await foreign.execute(CANCEL, running)
    await foreign.execute(CANCEL, queued)
    assert await hear() == [("dl_cancel", str(running)), ("dl_stop", str(job.token))]
    assert await start_worker().claim() == []  # the queued one ends as canceled


@pytest.mark.slow
@pytest.mark.requirement("Q1")
async def test_the_documents_ddl_may_be_applied_again(database, document_ddl, start_worker, raw, hear, row_of, foreign):
    delayed = await insert(foreign, at=await raw.fetchval("SELECT now() + interval '1 hour'"))
    replayed = document_ddl
    for made in ("TYPE dl_status", "TABLE dl_jobs", "TABLE dl_job_events", "INDEX ix_dl_jobs_claim"):
        assert f"CREATE {made}" in replayed
    # Services guard the creations and always run the rest: functions and triggers.
    await raw.execute(replayed[replayed.index("CREATE OR REPLACE FUNCTION") :])
    await hear()
    job_id = await insert(foreign)
    # Ours and theirs: both have the queue's name; PostgreSQL merges equal notifications of a transaction.
    assert await hear() == [("dl_jobs", "q")]
    worker = start_worker()
    [job] = await worker.claim()
    assert job.job_id == job_id
    await hear()
    await worker.end(job, Step.RETRY, delay_s=60.0)
    assert [channel for channel, _ in await hear()] == ["dl_due"]
    assert await row_of(delayed, "waits_for") == "time"


@pytest.mark.requirement("Q1")
@pytest.mark.requirement("Q8")
async def test_common_writes_send_no_notification_and_change_no_token(start_worker, add_job, hear, store, row_of):
    job_id = await add_job()
    await hear()
    worker = start_worker()
    [job] = await worker.claim()
    assert await row_of(job_id, "token") == job.token
    await worker.beat(job)
    await worker.end(job)
    assert await hear() == []


@pytest.mark.requirement("Q1")
async def test_a_statement_that_inserts_many_notifies_each_queue_once(raw, hear):
    await raw.execute(
        "INSERT INTO dl_jobs (job_id, queue, task, lock_key, available_at)"
        " SELECT gen_random_uuid(), 'q' || i % 3, 't', 'k', CASE WHEN i % 2 = 0 THEN now() ELSE '2030-01-01Z' END"
        " FROM generate_series(1, 600) AS i"
    )
    assert sorted(await hear()) == [("dl_due", "1893456000"), ("dl_jobs", "q0"), ("dl_jobs", "q1"), ("dl_jobs", "q2")]


@pytest.mark.requirement("Q1")
async def test_an_inserted_running_row_has_its_own_token(add_job, row_of):
    one, other = await add_job(status="'running'"), await add_job(status="'running'")
    tokens = {await row_of(job_id, "token") for job_id in (one, other)}
    assert len(tokens - {0}) == 2


@pytest.mark.slow
@pytest.mark.requirement("Q1")
async def test_an_unknown_waiting_reason_is_removed_from_any_write(foreign, add_job, start_worker, row_of, store, raw):
    """No index contains such a row: it would wait forever."""
    ready = await add_job(waits_for="'garbage'")
    delayed = await add_job(waits_for="''", available_at="'2040-01-01Z'")
    assert [await row_of(job_id, "waits_for") for job_id in (ready, delayed)] == [None, "time"]
    worker = start_worker()
    [job] = await worker.claim()
    assert job.job_id == ready
    await foreign.execute("UPDATE dl_jobs SET waits_for = 'garbage'")
    assert [await row_of(job_id, "waits_for") for job_id in (ready, delayed)] == [None, "time"]
    # The run continues: this is not a claim.
    await worker.end(job)
    assert await row_of(ready, "status") == "succeeded"
    # A row from before the trigger can still be read, and the next write corrects it.
    await raw.execute("SET session_replication_role = replica")
    old = await add_job(waits_for="'garbage'")
    await raw.execute("RESET session_replication_role")
    assert (await get_job(store, old)).waits_for is None
    await foreign.execute("UPDATE dl_jobs SET priority = 7 WHERE job_id = $1", old)
    [job] = await worker.claim()
    assert job.job_id == old


@pytest.mark.slow
@pytest.mark.requirement("Q3")
@pytest.mark.parametrize(("watched", "expected"), [(True, 1), (False, 0)])
async def test_a_watched_row_notifies_of_its_next_change_and_of_no_other(
    foreign, add_job, hear, row_of, watched, expected
):
    job_id = await add_job(watched=str(watched))
    await hear()
    # A write that changes nothing for waiting callers keeps the mark.
    await foreign.execute("UPDATE dl_jobs SET priority = 7 WHERE job_id = $1", job_id)
    assert await hear() == []
    assert await row_of(job_id, "watched") is watched
    await foreign.fetchrow(CLAIM)
    assert (await hear()).count(("dl_changed", str(job_id))) == expected
    await foreign.execute("""UPDATE dl_jobs SET progress = '{"rows": 1}' WHERE job_id = $1""", job_id)
    await foreign.fetchval(HEARTBEAT, job_id)
    await foreign.execute(FINISH, job_id)
    assert await hear() == []
    assert await row_of(job_id, "watched") is False

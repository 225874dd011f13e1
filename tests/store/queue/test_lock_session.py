"""Life of the lock session (Q7): lost, silent, a surviving former session, a new one.

And keys that another has taken.
"""

from __future__ import annotations

import pytest
import trio
import trio.testing
from conditions import patience_s, until
from databases import raw_connection
from proxy import open_proxy

from dataloader.jobs.errors import StoreUnavailable
from dataloader.jobs.ids import uuid7
from dataloader.jobs.states import Step
from dataloader.store.connection.bridge import open_database
from dataloader.store.connection.options import DatabaseOptions
from dataloader.store.queue.leases import Beat
from dataloader.store.queue.lock_session import IDLE_SHARE


@pytest.fixture
async def holder(start_worker, add_job):
    """Return a worker that runs two jobs, with the keys k and l."""
    for key in ("k", "l"):
        await add_job(lock_key=f"'{key}'")
    worker = start_worker("holder")
    jobs = {job.lock_key: job for job in await worker.claim()}
    return worker, jobs["k"], jobs["l"]


async def ping(worker, lease_s=60.0):
    """Ping until it succeeds, like the keeper."""
    with trio.fail_after(patience_s()):
        while True:
            try:
                return await worker.ping(lease_s)
            except StoreUnavailable:
                await trio.sleep(0.01)


@pytest.mark.requirement("Q7")
async def test_a_lost_session_takes_its_locks_again(holder, end_session, locks_of, add_job, start_worker):
    worker, k, l = holder  # noqa: E741 - the keys' names
    former = worker.pid
    await end_session(worker)
    await ping(worker)
    assert worker.pid != former
    assert await locks_of(worker) == sorted([k.lock_hash, l.lock_hash])
    assert worker.lost == []
    await add_job(lock_key="'k'")
    assert await start_worker().claim() == []
    for job in (k, l):
        assert (await worker.end(job)).void == []
    assert await locks_of(worker) == []


@pytest.mark.requirement("Q7")
async def test_the_end_of_the_session_is_reported_immediately(holder, end_session):
    worker, *_ = holder
    terminated = trio.Event()
    worker.locks.on_termination = terminated.set
    await end_session(worker)
    with trio.fail_after(patience_s()):
        await terminated.wait()
    assert not worker.locks.connected


@pytest.mark.requirement("Q7")
async def test_a_stale_former_session_is_terminated_and_does_not_keep_our_keys(holder, locks_of, raw):
    worker, k, l = holder  # noqa: E741 - the keys' names
    # A dead network: the server does not notice the end and keeps the session, and with it the keys.
    session = worker.locks._session
    ghost, session._connection, ghost_pid = session._connection, None, worker.pid
    try:
        await ping(worker)
        assert not await raw.fetchval("SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1)", ghost_pid)
        assert worker.lost == []
        assert await locks_of(worker) == sorted([k.lock_hash, l.lock_hash])
    finally:
        ghost.terminate()


@pytest.mark.slow
@pytest.mark.requirement("Q7")
async def test_a_key_that_went_to_another_is_reported_and_never_unlocked_for_him(
    database, holder, end_session, raw, add_job, locks_of, row_of
):
    worker, k, l = holder  # noqa: E741 - the keys' names
    async with raw_connection(database.dsn) as foreign:
        await end_session(worker)
        await foreign.execute("SELECT pg_advisory_lock(hashtext('k'))")
        await ping(worker)
        assert worker.lost == [k.token]
        assert await locks_of(worker) == [l.lock_hash]
        # The row is still ours: heartbeats continue until the handler has stopped, then the job is released.
        assert await worker.beat(k, l) == [Beat.RENEWED, Beat.RENEWED]
        await worker.end(k, Step.RETURN)
        assert await row_of(k.job_id, "attempt") == 0
        assert await raw.fetchval("SELECT pg_try_advisory_lock(hashtext('k'))") is False
        assert await worker.claim() == []
        await foreign.execute("SELECT pg_advisory_unlock_all()")
    assert await locks_of(worker) == [l.lock_hash]


@pytest.mark.requirement("Q7")
async def test_a_key_held_briefly_by_another_session_does_not_cost_us_the_job(database, holder, end_session, locks_of):
    worker, k, l = holder  # noqa: E741 - the keys' names
    async with raw_connection(database.dsn) as other:
        await end_session(worker)
        await other.execute("BEGIN")
        await other.execute("SELECT dl_free_keys(ARRAY[hashtext('k'), hashtext('l')])")  # the check of a sweep
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ping, worker)
            await trio.testing.wait_all_tasks_blocked(0.01)
            await other.execute("COMMIT")
    assert worker.lost == []
    assert await locks_of(worker) == sorted([k.lock_hash, l.lock_hash])


@pytest.mark.slow
@pytest.mark.requirement("Q7")
async def test_the_server_ends_a_session_that_is_silent_for_less_than_the_lease(holder, raw, until):
    worker, *_ = holder
    lease_s = 1.0
    before = trio.current_time()
    await ping(worker, lease_s)
    assert before + IDLE_SHARE * lease_s <= worker.locks.safe_until <= trio.current_time() + IDLE_SHARE * lease_s
    await until("NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1)", worker.pid)
    # No session got the key before the time until which it was safe.
    assert trio.current_time() >= worker.locks.safe_until
    assert trio.current_time() < before + 3 * lease_s


@pytest.mark.slow
@pytest.mark.requirement("Q7")
async def test_pings_keep_the_session(holder):
    worker, *_ = holder
    pid = worker.pid
    # For longer than the server tolerates silence, and much more often.
    for _ in range(14):
        await worker.locks.ping(3)
        await trio.sleep(0.2)
    assert worker.pid == pid


@pytest.mark.requirement("Q7")
async def test_a_new_session_has_the_former_ones_patience(holder, end_session):
    worker, *_ = holder
    await ping(worker, 20.0)
    await end_session(worker)
    with trio.fail_after(patience_s()):
        while worker.locks.connected:  # noqa: ASYNC110 - the driver notices it soon
            await trio.sleep(0.01)
    await worker.ask()
    shown = await worker.locks._session.write(lambda connection: connection.fetchval("SHOW idle_session_timeout"))
    assert shown == "16s"


@pytest.mark.requirement("Q7")
async def test_a_job_that_ended_while_the_session_was_away_leaves_no_lock_behind(holder, end_session, locks_of):
    worker, k, l = holder  # noqa: E741 - the keys' names
    await end_session(worker)
    worker.locks.forget(k.token)
    await ping(worker)
    assert await locks_of(worker) == [l.lock_hash]


@pytest.mark.requirement("Q7")
async def test_a_job_that_ends_while_the_locks_are_taken_again_leaves_no_lock_behind(
    database, add_job, start_worker, end_session, locks_of
):
    jobs = [await add_job(lock_key=f"'{key}'") for key in ("k", "l")]
    async with open_proxy(database.dsn) as proxy, open_database(DatabaseOptions(dsn=proxy.dsn)) as slow:
        worker = start_worker("holder", slow)
        k, l = await worker.claim()  # noqa: E741 - the keys' names
        assert [k.job_id, l.job_id] == jobs
        await end_session(worker)
        proxy.freeze_at("locks", b"pg_try_advisory_lock")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ping, worker)
            await until(proxy.is_frozen)
            worker.locks.forget(k.token)
            proxy.thaw()
        assert await locks_of(worker) == [l.lock_hash]
        await worker.locks.close()


@pytest.mark.requirement("Q7")
async def test_the_capacity_of_the_servers_lock_table_is_known(holder, raw):
    worker, *_ = holder
    expected = await raw.fetchval(
        "SELECT current_setting('max_locks_per_transaction')::int * (current_setting('max_connections')::int"
        " + current_setting('max_prepared_transactions')::int)"
    )
    assert worker.locks.capacity == expected


@pytest.mark.requirement("Q7")
async def test_closing_frees_all_keys(holder, raw, until):
    worker, *_ = holder
    pid = worker.pid
    await worker.locks.close()
    await until("NOT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND pid = $1)", pid)


@pytest.mark.requirement("Q7")
async def test_a_locked_row_of_a_lost_claim_delays_no_claim_and_is_released_later(start_worker, add_job, raw, row_of):
    worker = start_worker()
    orphan = await add_job(
        status="'running'",
        claimed_by=f"'{worker.locks.worker}'",
        token="999999",
        attempt="1",
        lease_expires_at="now() + interval '1 hour'",
    )
    other = await add_job(lock_key="'other'")
    await raw.execute("BEGIN")
    await raw.execute("SELECT FROM dl_jobs WHERE job_id = $1 FOR UPDATE", orphan)
    with trio.fail_after(patience_s()):
        assert [job.job_id for job in await worker.claim()] == [other]
    await raw.execute("ROLLBACK")
    assert orphan in [job.job_id for job in await worker.claim()]
    assert await row_of(orphan, "attempt") == 1


@pytest.mark.requirement("Q7")
async def test_a_server_without_session_tracking_fails_no_claim_that_waits_for_a_table(
    database, raw, start_worker, add_job, until_blocked
):
    await raw.execute(f"ALTER DATABASE {database.name} SET track_activities = off")
    await add_job()
    worker = start_worker()
    await worker.ping()
    claims = []

    async def claim():
        claims.append(await worker.ask())

    with trio.fail_after(patience_s()):
        async with trio.open_nursery() as nursery:
            await raw.execute("BEGIN; LOCK TABLE dl_jobs IN ACCESS EXCLUSIVE MODE")
            nursery.start_soon(claim)
            await until_blocked()
            for _ in range(3):
                # The state is unknown, so the keys are not safe any longer.
                assert not await worker.locks.watch(5)
            await raw.execute("ROLLBACK")
    await worker.locks.end_watch()
    [claimed] = claims
    assert len(claimed.jobs) == 1


@pytest.mark.slow
@pytest.mark.requirement("Q7")
async def test_a_job_in_doubt_is_looked_for_until_its_statement_must_be_over(start_worker, add_job, row_of, journal_of):
    worker = start_worker(doubt_s=0.5)
    await worker.ping()
    job_id = uuid7()
    assert worker.locks.expect(job_id)
    assert not worker.locks.expect(job_id)
    worker.locks.doubt(job_id)
    await worker.ping()
    # Its transaction continues behind the lost connection.
    assert not worker.locks.settled
    assert not worker.locks.expect(job_id)
    await add_job(
        job_id=f"'{job_id}'",
        status="'running'",
        claimed_by="'w1'",
        token="999999",
        attempt="1",
        lease_expires_at="now() + interval '1 hour'",
    )
    with trio.fail_after(patience_s()):
        while not worker.locks.settled:
            await worker.ping()
    assert await row_of(job_id, "status") == "queued"
    assert await journal_of(job_id) == ["requeue: the claim's reply was lost"]


@pytest.mark.requirement("Q7")
async def test_no_job_is_expected_while_a_repair_may_be_under_way_that_does_not_know_of_it(
    start_worker, raw, until_blocked, end_session
):
    worker = start_worker()
    await worker.ping()
    assert worker.locks.expect(uuid7())
    await end_session(worker)
    refused = []
    with trio.fail_after(patience_s()):
        await raw.execute("BEGIN; LOCK TABLE dl_jobs IN ACCESS EXCLUSIVE MODE")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ping, worker)
            await until_blocked()
            refused.append(not worker.locks.expect(uuid7()))
            # It may still run in the server, although its session is gone.
            await worker.locks._session.drop()
            refused.append(not worker.locks.expect(uuid7()))
            await raw.execute("ROLLBACK")
        await worker.ping()
    assert refused == [True, True]
    assert worker.locks.expect(uuid7())

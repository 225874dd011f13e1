"""Outages of the database: service resumes by itself, and reports its state correctly meanwhile (Q5, Q6, Q8, Q12).

Each fault is caused outside of the service: on a separate server, by SQL of another session, or in the network. A
steady load of jobs is sent by HTTP, each with an idempotency key until it is accepted, and all of them succeed in the
end. None runs twice concurrently; the process never ends, and no part of it fails.
"""

from __future__ import annotations

import errno
import os
import random
import signal
import statistics
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
import httpx2
import pytest
import trio
from conditions import IDLE_SESSIONS, until
from databases import raw_connection
from proxy import open_proxy
from services import FAST, LEASE_S, LISTENER_BOUND_S, PATIENT, PATIENT_LEASE_S

from dataloader.store.queue.enqueue import ANSWER_S

ROLES = ("locks", "listener", "heartbeat", "recorder", "pool", "transaction")
BACKENDS = """
SELECT pid FROM pg_stat_activity
WHERE datname = current_database() AND application_name LIKE 'dataloader%' AND application_name LIKE '% ' || $1
"""
END = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE pid = ANY ($1::int[])"
OURS = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'dataloader%'"
SUCCEEDED = "SELECT count(*) FROM dl_jobs WHERE status = 'succeeded'"
NEXT_ID = "SELECT pg_current_xact_id()"
UNHURRIED = {"reaper_period_sec": 60, "heartbeat_sec": 30, "claim_backoff_sec": 60}
"""Settings that leave the whole pool to requests."""
IMPATIENT = {"connect_timeout_sec": 2, "statement_timeout_sec": 2}
"""Half-open connections are noticed when a statement on them takes too long."""
WRITE_BOUND_S = 2 + 2 + 2
"""Maximum duration of a write with these settings: connecting, the statement, and a little (`DatabaseOptions`)."""


async def worked(visits, number=5):
    """Wait until `number` jobs have begun."""
    await until(visits, lambda visits: len(visits) >= number)


@pytest.mark.full
@pytest.mark.requirement("Q5", "Q12")
@pytest.mark.parametrize("mode", ["fast", "immediate"])
async def test_f14_a_restart_of_the_server_is_waited_for(serve, load, asking, calm, ledger, own_server, mode):
    service = await serve(dsn=own_server.dsn, **FAST)
    async with load(service) as jobs, asking(service) as ask:
        await worked(ledger.visits)
        await own_server.stop(mode)
        await ask.ready(503, within_s=20)
        await ask.refused(within_s=15)
        await ask.shows("database_up", 0, within_s=20)
        await ask.shows("listener_connected", 0, within_s=20)
        await ask.healthy()
        await until(_refusals_of(jobs), within_s=20)
        await own_server.start()
        await ask.ready(200, within_s=30)
        await ask.shows("listener_connected", 1, within_s=30)
        await ask.shows("database_up", 1, within_s=30)
        await jobs.more()
    await jobs.succeeded(own_server.fetch)
    assert jobs.slowest_s < 19
    assert await ledger.overlaps() == []
    calm(service)


@pytest.mark.full
@pytest.mark.requirement("Q5", "Q12")
async def test_f14_a_database_that_crashes_under_load_costs_no_job(serve, own_server):
    await own_server.fetch(
        "INSERT INTO dl_jobs (job_id, queue, task, lock_key, lease_ttl_sec)"
        " SELECT gen_random_uuid(), 'q', 'churn', 'k' || n % 50, 5 FROM generate_series(1, 600) AS n"
    )

    async def succeeded():
        count = -1
        try:
            [[count]] = await own_server.fetch(SUCCEEDED)
        except* (asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
            pass  # it is recovering
        return count

    service = await serve({"q": 10}, dsn=own_server.dsn, **FAST)
    await until(succeeded, lambda count: count > 200)
    # The death of any backend ends all sessions; the server recovers and accepts connections again.
    [[pid]] = await own_server.fetch("SELECT pid FROM pg_stat_activity WHERE application_name ~ 'recorder'")
    os.kill(pid, signal.SIGKILL)
    await until(succeeded, lambda count: count == 600, within_s=240)
    assert service.process.poll() is None


@pytest.mark.full
@pytest.mark.requirement("Q7", "Q8")
async def test_f15_sessions_terminated_role_by_role_cost_a_long_job_no_attempt(
    serve, add, load, calm, ledger, raw, row_when
):
    service = await serve({"q": 6}, **FAST)
    long_jobs = [
        await add("visit", {"s": 2 * LEASE_S + 2}, keyed=keyed, lease_ttl_sec=LEASE_S) for keyed in (True, False)
    ]
    for long_job in long_jobs:
        await row_when(long_job, "running")
    async with load(service, tasks=("visit", "visit", "ledger")) as jobs:
        for role in 2 * ROLES:
            before = await until(partial(_backends, raw, role))
            assert all(record[0] for record in await raw.fetch(END, list(before)))
            done = await raw.fetchval(SUCCEEDED)
            await until(partial(_backends, raw, role), lambda pids, before=before: pids and not pids & before)
            await until(partial(raw.fetchval, SUCCEEDED), lambda count, done=done: count > done + 1)
    await jobs.succeeded(raw.fetch)
    for long_job in long_jobs:
        assert (await row_when(long_job, "succeeded"))["attempt"] == 1
    assert await ledger.overlaps() == []
    calm(service)


async def _backends(raw, role):
    return {record["pid"] for record in await raw.fetch(BACKENDS, role)}


@pytest.mark.full
@pytest.mark.requirement("Q2", "Q12")
async def test_f16_requests_repeated_after_network_cuts_add_one_job_per_key(
    serve, load, asking, calm, ledger, raw, database
):
    async with open_proxy(database.dsn) as proxy:
        service = await serve(dsn=proxy.dsn, **FAST)
        async with load(service, period_s=0.04, s=0.05, keys=8) as jobs, asking(service) as ask:
            for _ in range(10):
                await jobs.more(2)
                await trio.sleep(random.uniform(0, 0.5))
                assert proxy.links("locks") | proxy.links("pool")
                proxy.cut()
                await trio.sleep(random.uniform(0, 0.3))
                proxy.mend()
            await ask.ready(200, within_s=15)
        await jobs.succeeded(raw.fetch)
    assert jobs.refusals, "no request was ever cut off"
    assert await ledger.overlaps() == []
    calm(service)


@pytest.mark.full
@pytest.mark.requirement("Q2", "Q12")
async def test_f16_replies_lost_after_the_commit_add_no_second_job_or_run(
    serve, asking, calm, ledger, raw, row_when, database
):
    async with open_proxy(database.dsn) as proxy:
        service = await serve(dsn=proxy.dsn, pool_size=1, **UNHURRIED)
        async with asking(service) as ask, trio.open_nursery() as nursery:
            once = partial(ask.trigger, "visit", lock_key="k", idempotency_key="asked for twice", args={"s": 3})
            proxy.freeze_at("pool", b"asked for twice")
            nursery.start_soon(once)
            [[job_id]] = await until(
                partial(raw.fetch, "SELECT job_id FROM dl_jobs WHERE idempotency_key = 'asked for twice'")
            )
            proxy.cut("pool")
            proxy.thaw()
            answer = await once()
            assert (answer.status_code, answer.json()["job_id"]) == (200, str(job_id))
            proxy.freeze_at("recorder", job_id.bytes)
            await row_when(job_id, "succeeded")
            proxy.cut("recorder")
            proxy.thaw()
            # The recorder continues, and has recognized its former writes.
            await row_when(await ask.added("visit", lock_key="k"), "succeeded")
            assert await ask.metric("writes_fenced_total") == 0
    assert len(await ledger.visits(job_id)) == 1
    kinds = "SELECT kind FROM dl_job_events WHERE job_id = $1 ORDER BY event_id"
    assert [record[0] for record in await raw.fetch(kinds, job_id)] == ["queued", "picked", "done"]
    calm(service)


@pytest.mark.full
@pytest.mark.requirement("Q5", "Q8")
async def test_f17_a_network_that_swallows_everything_is_noticed_by_an_idle_service(
    serve, add, asking, calm, ledger, row_when, database
):
    async with open_proxy(database.dsn) as proxy:
        # Only a notification starts a job here.
        service = await serve(dsn=proxy.dsn, poll_sec=60, **IMPATIENT, **FAST)
        async with asking(service) as ask:
            await row_when(await add("visit", lease_ttl_sec=LEASE_S), "succeeded")
            before = {role: proxy.links(role) for role in ("locks", "listener", "pool")}
            assert all(before.values())
            proxy.freeze()
            await ask.ready(503, within_s=WRITE_BOUND_S + 6)
            await ask.refused(within_s=2 * WRITE_BOUND_S + 6)
            await ask.healthy()
            for role, links in before.items():
                # A role that has noticed the outage has tried to connect again.
                await until(_new_links(proxy, role, links), within_s=LISTENER_BOUND_S + 20)
            await ask.shows("listener_connected", 0, within_s=10)
            await ask.shows("database_up", 0, within_s=10)
            proxy.thaw()
            await ask.ready(200, within_s=30)
            await ask.shows("listener_connected", 1, within_s=30)
            row = await row_when(await add("visit", lease_ttl_sec=LEASE_S), "succeeded", within_s=30)
            assert row["attempt"] == 1
    calm(service)


@pytest.mark.full
@pytest.mark.requirement("Q8")
async def test_f17_connections_dropped_by_a_firewall_are_replaced_and_cost_no_attempt(
    serve, add, asking, calm, ledger, row_when, database
):
    roles = ("locks", "listener", "heartbeat", "recorder", "pool")
    async with open_proxy(database.dsn) as proxy:
        service = await serve(dsn=proxy.dsn, poll_sec=1, **IMPATIENT, **PATIENT)
        async with asking(service) as ask:
            await row_when(await add("visit", {"s": 2.5}, lease_ttl_sec=PATIENT_LEASE_S), "succeeded")
            before = {role: proxy.links(role) for role in roles}
            assert all(before.values())
            proxy.forget()
            row = await row_when(await add("visit", {"s": 3}, lease_ttl_sec=PATIENT_LEASE_S), "succeeded")
            assert (row["attempt"], row["refunds"]) == (1, 0)
            for role, links in before.items():
                await until(_new_links(proxy, role, links), within_s=LISTENER_BOUND_S + 20)
            await ask.ready(200, within_s=WRITE_BOUND_S + 6)
            await ask.shows("listener_connected", 1, within_s=20)
            assert await ask.metric("leases_lost_total") == 0
    calm(service)


@pytest.mark.full
@pytest.mark.requirement("Q2")
async def test_f17_a_trigger_that_the_network_swallows_is_answered_within_its_deadline(
    serve, asking, calm, raw, database
):
    async with open_proxy(database.dsn) as proxy:
        # With the default timeouts of a service.
        service = await serve(dsn=proxy.dsn, **UNHURRIED)
        async with asking(service) as ask:
            await until(partial(raw.fetchval, IDLE_SESSIONS, "pool", 0.5))
            proxy.freeze()
            async with trio.open_nursery() as nursery:
                for fields in ({}, {"idempotency_key": "once"}):
                    nursery.start_soon(partial(ask.refused, within_s=ANSWER_S + 6, **fields))
            await ask.healthy()
    calm(service)


def _new_links(proxy, role, before):
    async def new_links():
        return proxy.links(role) - before

    return new_links


async def _refusals(jobs):
    return jobs.refusals


@pytest.mark.slow
@pytest.mark.requirement("Q12")
async def test_f18_a_failover_to_a_server_that_only_reads_is_waited_for(
    serve, load, asking, calm, ledger, raw, database
):
    service = await serve(poll_sec=0.5, **FAST)
    async with load(service) as jobs, asking(service) as ask:
        await worked(ledger.visits)
        await _fail_over(raw, database, "SET default_transaction_read_only = on")
        await until(_failed_with(service, "ReadOnlySQLTransactionError"))
        await ask.refused(within_s=5)
        await until(partial(_refusals, jobs))
        await _fail_over(raw, database, "RESET default_transaction_read_only")
        await ask.ready(200, within_s=15)
        await jobs.more()
    await jobs.succeeded(raw.fetch)
    assert await ledger.overlaps() == []
    calm(service)


@pytest.mark.slow
@pytest.mark.requirement("Q5")
async def test_f18_a_service_whose_database_only_reads_is_not_ready(serve, asking, calm, raw, database):
    service = await serve(poll_sec=0.5, **FAST)
    async with asking(service) as ask:
        await _fail_over(raw, database, "SET default_transaction_read_only = on")
        await ask.refused(within_s=5)
        await ask.ready(503, within_s=5)
        await ask.shows("database_up", 0, within_s=10)
        await _fail_over(raw, database, "RESET default_transaction_read_only")
        await ask.ready(200, within_s=15)
    calm(service)


async def _fail_over(raw, database, change):
    """Make all new sessions differ by `change`, and end the existing ones."""
    await raw.execute(f"ALTER DATABASE {database.name} {change}")
    pids = [record["pid"] for record in await raw.fetch(OURS)]
    assert pids
    await raw.fetch(END, pids)


def _failed_with(service, error):
    async def failed():
        return any(error in str(line.get("error")) for line in [*service.lines])

    return failed


def _refusals_of(jobs):
    async def refusals():
        return jobs.refusals

    return refusals


SECONDS_A_TRY = {"": 1, "lock_timeout": 0, "statement_timeout": 1}


@pytest.mark.full
@pytest.mark.requirement("Q6", "Q12")
@pytest.mark.parametrize("of_the_role", SECONDS_A_TRY, ids=lambda name: name or "nothing")
async def test_f19_a_locked_table_is_retried_with_growing_pauses(
    serve, load, asking, calm, ledger, raw, database, of_the_role
):
    async with raw_connection(database.dsn) as other:
        if of_the_role:
            # Our statement timeout takes precedence over the role's; we set none for locks.
            await raw.execute(f"ALTER ROLE postgres IN DATABASE {database.name} SET {of_the_role} = '300ms'")
        # More slots than concurrent jobs: without a free one, nothing is claimed, and no claim is tried.
        service = await serve(
            {"q": 100}, statement_timeout_sec=1, connect_timeout_sec=2, poll_sec=0.2, log_level="debug", **FAST
        )
        async with load(service) as jobs, asking(service) as ask:
            await worked(ledger.visits)
            began = trio.current_time()
            known = len(tries_of(service, "claims of q"))
            await other.execute("BEGIN; LOCK TABLE dl_jobs IN ACCESS EXCLUSIVE MODE")

            async def tried():
                return tries_of(service, "claims of q")[known:]

            tries = await until(tried, lambda tries: len(tries) >= 4)
            took_s = trio.current_time() - began
            waiting = "SELECT count(*) FROM pg_locks WHERE relation = 'dl_jobs'::regclass AND NOT granted"
            assert await raw.fetchval(waiting) <= 10, "statements that nobody waits for any more have piled up"
            # A turn in the pool, the statement, and a connection for its cancellation.
            await ask.refused(within_s=2 + 1 + 2 + 6)
            await other.execute("ROLLBACK")
            await ask.ready(200, within_s=30)
            await jobs.more()
    pauses = [line["again_in_s"] for line in tries]
    # The first may be that of a statement that was slow before.
    assert all(1.2 < after / before < 3.2 for before, after in [*pairwise(pauses)][-2:]), "twice, up to a fifth off"
    assert len(tries) * SECONDS_A_TRY[of_the_role] <= took_s + 1
    await jobs.succeeded(raw.fetch)
    assert await ledger.overlaps() == []
    calm(service)


def tries_of(service, part):
    """Return the failed attempts of a part."""
    return [line for line in [*service.lines] if line["event"] == "an attempt failed" and line["part"] == part]


@pytest.mark.full
@pytest.mark.requirement("Q5", "Q6")
async def test_f22_jobs_start_within_the_poll_until_notifications_return(
    serve, add, asking, calm, row_when, no_claim_is_due, database
):
    poll_s = 4
    async with open_proxy(database.dsn) as proxy:
        service = await serve(dsn=proxy.dsn, poll_sec=poll_s, **(FAST | {"claim_backoff_sec": 60}))

        async def one_after_another(number, *, within_s):
            began = trio.current_time()
            for _ in range(number):
                await row_when(await add("quick", lease_ttl_sec=LEASE_S), "succeeded", within_s=within_s)
            return trio.current_time() - began

        async with asking(service) as ask:
            await until(partial(no_claim_is_due, service, proxy))
            proxy.freeze("listener")
            # Polls are up to 20 % earlier or later.
            took_s = await one_after_another(3, within_s=poll_s * 1.2 + 15)
            assert took_s > 2 * poll_s * 0.8, "something else than the poll has started them"
            # A job that falls due later must be made ready first; the next sweep is a minute away.
            soon = (datetime.now(UTC) + timedelta(seconds=1)).isoformat()
            await row_when(await ask.added("quick", available_at=soon), "succeeded", within_s=2 * poll_s * 1.2 + 15)
            await ask.shows("listener_connected", 0, within_s=LISTENER_BOUND_S + 20)
            await ask.ready(200, within_s=10)
            proxy.thaw()
            await ask.shows("listener_connected", 1, within_s=30)
            took_s = await one_after_another(5, within_s=30)
            assert took_s < 4 * poll_s * 0.8, "polls have started them"
    calm(service)


@pytest.mark.full
@pytest.mark.requirement("Q2", "Q12")
@pytest.mark.parametrize("own_server", [{"max_notify_queue_pages": "64"}], indirect=True, ids=["64 pages"])
async def test_f23_a_full_queue_of_notifications_is_an_outage_that_passes(serve, asking, calm, ledger, own_server):
    service = await serve(dsn=own_server.dsn, poll_sec=0.5, **FAST)
    async with (
        asking(service) as ask,
        raw_connection(own_server.dsn) as sleeper,
        raw_connection(own_server.dsn) as writer,
    ):
        await sleeper.execute("LISTEN nobody")
        await sleeper.execute("BEGIN")
        await sleeper.execute("SELECT 1")
        # The ends of these cause notifications: the next job of the key becomes ready, and the other one runs again.
        held = await ask.added("visit", lock_key="k", args={"s": 8})
        fails = await ask.added("visit", lock_key="f", args={"s": 8, "fails": 1})
        await worked(ledger.visits, 2)
        waits = await ask.added("visit", lock_key="k")
        parked = "SELECT 1 FROM dl_jobs WHERE waits_for = 'lock'"
        await until(partial(writer.fetch, parked))
        with pytest.raises(asyncpg.ProgramLimitExceededError, match="too many notifications"):
            await _notify_on_and_on(writer)
        await ask.refused(within_s=5)
        await until(_failed_with(service, "too many notifications"), within_s=20)
        await until(ledger.visits, lambda visits: all(visit["ended_at"] for visit in visits))
        await ask.healthy()
        # The session that kept the queue full ends. Nothing else is done about it.
        await sleeper.execute("ROLLBACK")

        async def taken():
            return (await ask.trigger("visit", lock_key="after", idempotency_key="after")).status_code

        await until(taken, lambda status: status in {200, 201}, within_s=20)
        unfinished = (
            "SELECT job_id, status::text, attempt, error FROM dl_jobs WHERE status <> 'succeeded' AND queue = 'q'"
        )
        await until(partial(writer.fetch, unfinished), lambda rows: not rows, within_s=30)
        attempts = {str(row["job_id"]): row["attempt"] for row in await writer.fetch("SELECT * FROM dl_jobs")}
    assert attempts[fails] >= 2
    assert {held, waits} <= attempts.keys()
    assert await ledger.overlaps() == []
    calm(service)


async def _notify_on_and_on(connection):
    for number in range(200):
        await connection.execute("SELECT pg_notify('nobody', rpad($1, 7900, 'x'))", str(number))


@pytest.mark.full
@pytest.mark.requirement("Q8")
async def test_f25_leases_are_renewed_and_jobs_run_while_the_pool_is_stuck(
    serve, add, asking, calm, ledger, raw, row_when, database
):
    # By their statements: other sessions that wait for this lock have a `lock_timeout`, and soon free their connection.
    stuck = """
        SELECT count(*) FROM pg_stat_activity
        WHERE datname = current_database() AND application_name LIKE '% pool' AND wait_event_type = 'Lock'
          AND query ~ 'INSERT INTO dl_workers|SELECT worker, host'"""
    service = await serve(connect_timeout_sec=2, pool_size=2, **FAST)
    async with asking(service) as ask, raw_connection(database.dsn) as other, trio.open_nursery() as nursery:
        long_job = await add("visit", {"s": LEASE_S + 3}, lease_ttl_sec=LEASE_S)
        await row_when(long_job, "running")
        await other.execute("BEGIN; LOCK TABLE dl_workers IN ACCESS EXCLUSIVE MODE")
        # The process writes its heartbeat, and this request reads it: those are the two connections of the pool.
        nursery.start_soon(_read_workers_on_and_on, ask.client)
        await until(partial(raw.fetchval, stuck), lambda count: count == 2)
        await ask.refused(within_s=2 + 3)
        row = await row_when(await add("visit", lease_ttl_sec=LEASE_S), "succeeded")
        assert row["attempt"] == 1
        row = await row_when(long_job, "succeeded")
        assert (row["attempt"], row["refunds"]) == (1, 0)
        assert (row["finished_at"] - row["started_at"]).total_seconds() > LEASE_S
        assert await raw.fetchval(stuck) == 2
        await other.execute("ROLLBACK")
        await ask.ready(200, within_s=5)
        assert await ask.metric("leases_lost_total") == 0
        nursery.cancel_scope.cancel()
    calm(service)


async def _read_workers_on_and_on(client):
    while True:
        await client.get("/api/v1/workers")
        await trio.sleep(0.2)


@pytest.mark.slow
@pytest.mark.requirement("Q5")
@pytest.mark.parametrize("own_server", [{"max_connections": "16"}], indirect=True, ids=["16 connections"])
async def test_f26_a_server_without_a_free_connection_is_waited_for_at_the_start_and_later(
    serve, load, asking, calm, ledger, own_server, crowd
):
    async with crowd(own_server.dsn) as others:
        service = await serve(dsn=own_server.dsn, ready="the database is unavailable", log_level="debug", **FAST)

        async def waits():
            return tries_of(service, "start")

        waited = await until(waits, lambda lines: len(lines) >= 3)
        assert all("TooManyConnections" in line["error"] for line in waited)
        pauses = [line["again_in_s"] for line in waited]
        assert pauses == sorted(set(pauses)), "the pauses don't grow"
        async with httpx2.AsyncClient(base_url=_address_of(service), timeout=20) as client:
            assert (await client.get("/ready")).status_code == 503
            assert (await client.get("/health")).status_code == 200
        await others.go()
        await service.logged("serving")
        async with load(service) as jobs, asking(service) as ask:
            await ask.ready(200, within_s=5)
            await worked(ledger.visits)
            await others.come()
            await others.push_out()
            await ask.ready(503, within_s=5)
            await ask.refused(within_s=5)
            await ask.shows("database_up", 0, within_s=5)
            await others.go()
            await ask.ready(200, within_s=15)
            await jobs.more()
    await jobs.succeeded(own_server.fetch)
    assert await ledger.overlaps() == []
    calm(service)


def _address_of(service):
    """Return the address of a service that has not logged it yet."""
    process = Path("/proc", str(service.process.pid))
    sockets = {str(file.readlink()) for file in (process / "fd").iterdir()}
    for line in (process / "net/tcp").read_text().splitlines()[1:]:
        local, state, inode = (line.split()[column] for column in (1, 3, 9))
        if state == "0A" and f"socket:[{inode}]" in sockets:
            return f"http://127.0.0.1:{int(local.partition(':')[2], 16)}"
    raise AssertionError("it listens nowhere")


@pytest.mark.full
@pytest.mark.requirement("Q12")
async def test_f27_a_full_disk_is_waited_for(serve, load, asking, calm, ledger, small_disk, server_on_a_small_disk):
    server = server_on_a_small_disk
    postmaster = server.cluster.postmaster().pid
    service = await serve(dsn=server.dsn, **FAST)
    filler = small_disk / "filler"
    # Large rows, so that the free space in the tables' pages is soon used up.
    async with load(service, ballast=700, period_s=0.05, s=0.05, keys=8) as jobs, asking(service) as ask:
        await worked(ledger.visits)
        # Make space in the write-ahead log, without which the server would end; often the two have different disks.
        await server.fetch("SELECT pg_switch_wal()::text")
        await server.fetch("CHECKPOINT")
        try:
            await trio.to_thread.run_sync(_fill, filler)
            await until(_refusals_of(jobs), lambda refusals: len(refusals) > 10, within_s=25)
            # Process heartbeats are updates in place, which need no space.
            await ask.ready(503, within_s=20)
            await ask.healthy()
            with pytest.RaisesGroup(asyncpg.DiskFullError, flatten_subgroups=True):
                await server.fetch("CREATE TABLE more AS SELECT generate_series(1, 1000000)")
            assert service.process.poll() is None
        finally:
            filler.unlink(missing_ok=True)
        await ask.ready(200, within_s=15)
        await jobs.more(within_s=30)
    await jobs.succeeded(server.fetch)
    assert server.cluster.postmaster().pid == postmaster
    assert await ledger.overlaps() == []
    calm(service)


@pytest.mark.full
@pytest.mark.requirement("Q5", "Q12")
async def test_a_server_that_accepts_no_writes_before_a_wraparound_is_waited_for(
    serve, asking, calm, ledger, own_server
):
    await own_server.fetch("CREATE TABLE pin (n int)")
    await _bring_close_to_the_wraparound(own_server, left=3_000)
    async with raw_connection(own_server.dsn) as pin:
        # A vacuum against the wraparound waits for this lock, so that the oldest ID stays in use.
        await pin.execute("BEGIN")
        await pin.execute("LOCK TABLE pin IN SHARE UPDATE EXCLUSIVE MODE")
        assert await pin.fetchval("SELECT age(relfrozenxid) FROM pg_class WHERE relname = 'pin'") > 2_000_000_000
        service = await serve(dsn=own_server.dsn, **FAST)
        async with asking(service) as ask, raw_connection(own_server.dsn) as raw:

            async def ended(job_id, within_s):
                status = partial(raw.fetchval, "SELECT status FROM dl_jobs WHERE job_id = $1::uuid", job_id)
                await until(status, lambda found: found == "succeeded", within_s=within_s)

            for _ in range(2_500):
                await raw.execute(NEXT_ID)
            runs = await ask.added("visit", args={"s": 3})
            await worked(ledger.visits, 1)
            with pytest.raises(asyncpg.ProgramLimitExceededError, match="not accepting commands"):
                await _use_up_transaction_ids(raw)
            await ask.refused(within_s=10)
            await ask.ready(503, within_s=25)
            await ask.healthy()
            # The handler has returned meanwhile; its outcome waits.
            await until(ledger.visits, lambda visits: all(visit["ended_at"] for visit in visits), within_s=30)
            assert await raw.fetchval("SELECT status FROM dl_jobs WHERE job_id = $1::uuid", runs) == "running"
            await pin.execute("ROLLBACK")
            await _freeze_all(own_server)
            await ask.ready(200, within_s=30)
            await ended(runs, 40)
            await ended(await ask.added("visit"), 30)
    assert await ledger.overlaps() == []
    calm(service)


async def _bring_close_to_the_wraparound(server, *, left):
    """Move the server's next transaction ID to `left` before the stop limit."""
    [[oldest]] = await server.fetch("SELECT min(datfrozenxid::text::bigint) FROM pg_database")
    await server.stop("fast")
    next_id = oldest + 2**31 - 1 - 3_000_000 - left
    directory = server.cluster.directory
    # The states of the transactions around this ID: a server that has reached it normally has created the file.
    segment = directory / "pg_xact" / f"{next_id // 2**20:04X}"
    segment.write_bytes(bytes(256 * 1024))
    owner = (directory / "PG_VERSION").stat()
    os.chown(segment, owner.st_uid, owner.st_gid)
    arguments = (f"--next-transaction-id={next_id}", "--pgdata=.")
    reset = partial(server.cluster.programs.run_as_server, "pg_resetwal", *arguments, cwd=directory)
    await trio.to_thread.run_sync(reset)
    await server.start()


async def _use_up_transaction_ids(raw):
    while True:
        await raw.execute(NEXT_ID)


async def _freeze_all(server):
    """Give the server transaction IDs again, in the way that its log recommends to an operator."""
    address = urlsplit(server.dsn)
    for row in await server.fetch("SELECT datname FROM pg_database WHERE datallowconn"):
        async with raw_connection(address._replace(path=f"/{row['datname']}").geturl()) as raw:
            await raw.execute("VACUUM (FREEZE)")


@pytest.mark.full
@pytest.mark.requirement("Q12")
async def test_f27_a_full_disk_that_ends_the_server_costs_no_job(
    serve, load, asking, calm, ledger, small_disk, server_on_a_small_disk
):
    server = server_on_a_small_disk
    service = await serve(dsn=server.dsn, **FAST)
    filler = small_disk / "filler"
    async with load(service) as jobs, asking(service) as ask:
        await worked(ledger.visits)
        try:
            await trio.to_thread.run_sync(_fill, filler)
            # The write-ahead log cannot grow, which ends the server, and it cannot start either.
            with pytest.RaisesGroup(pytest.RaisesExc((asyncpg.PostgresError, OSError)), flatten_subgroups=True):
                while True:
                    await server.fetch("SELECT pg_logical_emit_message(true, '', repeat('x', 1000000))")
            await ask.ready(503, within_s=10)
            await ask.refused(within_s=10)
            await ask.shows("database_up", 0, within_s=5)
            await ask.healthy()
            await until(partial(trio.to_thread.run_sync, server.cluster.state), lambda state: state == "absent")
        finally:
            filler.unlink(missing_ok=True)
        await server.start()
        await ask.ready(200, within_s=15)
        await jobs.more(within_s=30)
    await jobs.succeeded(server.fetch)
    assert await ledger.overlaps() == []
    calm(service)


def _fill(path):
    """Write a file that fills the disk."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 4_096):
            with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
                _write_on_and_on(file, bytes(size))


def _write_on_and_on(file, data):
    while True:
        file.write(data)


@pytest.mark.full
@pytest.mark.requirement("Q4", "Q5", "Q8")
async def test_f30_a_slow_and_jittery_network_costs_no_attempt_and_no_lease(
    unmeasured, serve, load, add, asking, calm, ledger, raw, row_when, database
):
    async with open_proxy(database.dsn) as proxy:
        service = await serve(dsn=proxy.dsn, **FAST)
        proxy.delay_s, proxy.jitter_s = 0.1, 0.05
        long_job = await add("visit", {"s": LEASE_S + 2}, lease_ttl_sec=LEASE_S)
        canceled_job = await add("sleep", {"s": 3_600}, lease_ttl_sec=LEASE_S)
        async with load(service, period_s=0.5) as jobs, asking(service) as ask:
            await row_when(canceled_job, "running")
            took_s = []
            for _ in range(50):
                began = trio.current_time()
                await ask.healthy()
                took_s.append(trio.current_time() - began)
            assert statistics.median(took_s) < proxy.delay_s, "it waits for the database"
            answer = await ask.client.post(f"/api/v1/jobs/{canceled_job}/cancel")
            assert answer.status_code == 200
            await row_when(canceled_job, "canceled", within_s=5)
            await row_when(long_job, "succeeded", within_s=20)
            await ask.ready(200, within_s=30)
            assert await ask.metric("leases_lost_total") == 0
        await until(partial(raw.fetch, "SELECT job_id FROM dl_jobs WHERE status IN ('queued', 'running')"), _nothing)
    assert await raw.fetch("SELECT * FROM dl_jobs WHERE attempt <> 1 OR refunds > 0 OR crashes > 0") == []
    assert len(jobs.jobs) == await raw.fetchval(f"{SUCCEEDED} AND idempotency_key IS NOT NULL")
    assert jobs.refusals == []
    assert await ledger.overlaps() == []
    calm(service)


def _nothing(rows):
    return not rows

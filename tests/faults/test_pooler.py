"""Behind a pooler in transaction mode, configured by docs/postgresql.md: sessions are shared, none is lost (F24).

With the tests' own pooler, which assigns its connections in turn, and with PgBouncer 1.21 or later if it is installed.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
import trio
from bouncer import open_bouncer
from conditions import until
from pooler import open_pooler
from proxy import open_proxy
from services import FAST, LEASE_S, LISTENER_BOUND_S

from dataloader.store.connection.bridge import open_database
from dataloader.store.connection.connect import PLANNER, PLANNER_OF_USERS
from dataloader.store.connection.options import DatabaseOptions
from dataloader.store.queue.transaction import Transactions

pytestmark = [pytest.mark.full, pytest.mark.requirement("Q7", "Q8", "Q14")]

CONNECTIONS = 3
OF_THE_ROLE = {
    "statement_timeout": "30s",
    "idle_in_transaction_session_timeout": "30s",
    "default_transaction_isolation": "read committed",
    **PLANNER,
}


@pytest.fixture
def documented():
    """Return the parameters that a pooler must ignore."""
    text = Path(__file__).parents[2].joinpath("docs/postgresql.md").read_text()
    [listed] = re.findall(r"`ignore_startup_parameters = ([^`]+)`", text)
    return frozenset(name.strip() for name in listed.split(","))


@pytest.fixture(params=["the tests' own", "PgBouncer"])
def program(request):
    """Return PgBouncer, or None. Separate from `pooled`: pytest knows no skip while Trio's fixtures are set up."""
    return request.getfixturevalue("new_bouncer") if request.param == "PgBouncer" else None


@pytest.fixture
def pooled(program, raw, database, documented):
    """Open a pooler with few connections to the test's database; the role has the settings that the pooler ignores."""

    async def pooled():
        for name, value in OF_THE_ROLE.items():
            await raw.execute(f"ALTER ROLE postgres IN DATABASE {database.name} SET {name} = '{value}'")
        if program is not None:
            return open_bouncer(database.dsn, size=CONNECTIONS, ignored=documented, program=program)
        return open_pooler(database.dsn, size=CONNECTIONS, ignored=documented)

    return pooled


def test_f24_the_documented_startup_parameters_are_those_that_are_sent(documented):
    assert documented == OF_THE_ROLE.keys()


async def test_f24_two_replicas_run_each_key_one_at_a_time_and_one_of_them_may_be_killed(
    serve, add, calm, kill, ledger, raw, database, pooled
):
    async with await pooled() as pooler:
        victim = await serve(dsn=pooler.dsn, direct_dsn=database.dsn, **FAST)
        survivor = await serve(dsn=pooler.dsn, direct_dsn=database.dsn, **FAST)
        for number in range(240):
            await add("visit", {"s": 0.1}, lock_key=f"k{number % 6}", lease_ttl_sec=LEASE_S)
        done = "SELECT count(*) FROM dl_jobs WHERE status = 'succeeded'"
        running = "SELECT count(*) FROM dl_jobs WHERE status = 'running' AND claimed_by LIKE '%:' || $1 || ':%'"
        await until(lambda: raw.fetchval(done), lambda count: count > 20)
        await until(lambda: raw.fetchval(running, str(victim.process.pid)))
        await kill(victim)
        await until(lambda: raw.fetchval(done), lambda count: count == 240, within_s=120)
        assert await pooler.is_shared("pool", "heartbeat", "recorder")
    assert len({visit["pid"] for visit in await ledger.visits()}) == 2
    assert await ledger.overlaps() == []
    calm(survivor)


async def test_f24_trigger_progress_wait_and_cancel_work_through_it(
    serve, asking, calm, raw, database, pooled, row_when
):
    async with await pooled() as pooler:
        service = await serve(dsn=pooler.dsn, direct_dsn=database.dsn, **FAST)
        async with asking(service) as ask:
            # Longer than its lease: the heartbeat goes through the pooler, too.
            job_id = await ask.added("sleep", args={"s": LEASE_S + 2}, lease_ttl_sec=LEASE_S)
            stopped_id = await ask.added("sleep", args={"s": 3_600})

            async def shown():
                return (await ask.client.get(f"/api/v1/jobs/{stopped_id}/status")).json()

            await until(shown, lambda job: job["progress"] == {"sleeping": True})
            await ask.client.post(f"/api/v1/jobs/{stopped_id}/cancel")
            await until(shown, lambda job: job["status"] == "canceled")
            ended = (await ask.client.get(f"/api/v1/jobs/{job_id}/status?wait=15")).json()
            while ended["status"] == "running":
                ended = (await ask.client.get(f"/api/v1/jobs/{job_id}/status?wait=15")).json()
            assert (ended["status"], ended["attempt"]) == ("succeeded", 1)
            await ask.ready(200, within_s=20)
        assert await pooler.is_shared("pool", "heartbeat", "recorder")
    calm(service)


async def test_f24_lost_notifications_cost_latency_only_behind_it_too(
    serve, add, asking, calm, row_when, no_claim_is_due, database, pooled
):
    poll_s = 4
    async with await pooled() as pooler, open_proxy(database.dsn) as direct:
        options = FAST | {"claim_backoff_sec": 60}
        service = await serve(dsn=pooler.dsn, direct_dsn=direct.dsn, poll_sec=poll_s, **options)

        async def one_after_another(number):
            began = trio.current_time()
            for _ in range(number):
                await row_when(await add("quick", lease_ttl_sec=LEASE_S), "succeeded", within_s=poll_s * 1.2 + 15)
            return trio.current_time() - began

        async with asking(service) as ask:
            await until(partial(no_claim_is_due, service, direct))
            direct.freeze("listener")
            assert await one_after_another(3) > 2 * poll_s * 0.8, "something else than the poll has started them"
            await ask.shows("listener_connected", 0, within_s=LISTENER_BOUND_S + 20)
            await ask.ready(200, within_s=10)
            direct.thaw()
            await ask.shows("listener_connected", 1, within_s=30)
            assert await one_after_another(5) < 4 * poll_s * 0.8, "polls have started them"
        assert await pooler.is_shared("pool", "heartbeat", "recorder")
    calm(service)


SETTINGS = "SELECT name, setting FROM pg_settings WHERE name = ANY ($1)"


async def settings(connection):
    return dict(await connection.fetch(SETTINGS, list(OF_THE_ROLE)))


async def test_f24_a_handler_s_transaction_has_its_own_limits_and_the_planner_as_it_is(database, pooled):
    async with await pooled() as pooler:
        options = DatabaseOptions(dsn=pooler.dsn, direct_dsn=database.dsn, transaction_timeout_s=77)
        async with open_database(options) as db:
            transactions = Transactions(db)
            of_handlers = await transactions.run(settings)
            transactions.close()
            of_the_queue = await db.run(settings)
    timeouts = {"statement_timeout": "77000", "idle_in_transaction_session_timeout": "77000"}
    assert of_handlers == {**of_the_queue, **PLANNER_OF_USERS, **timeouts}
    assert of_the_queue == {**OF_THE_ROLE, "statement_timeout": "30000", "idle_in_transaction_session_timeout": "30000"}


async def test_f24_rows_and_success_of_a_job_commit_together_on_a_shared_connection(
    serve, add, calm, raw, database, pooled
):
    await raw.execute("CREATE TABLE target (job_id uuid, n int)")
    async with await pooled() as pooler:
        victim = await serve(dsn=pooler.dsn, direct_dsn=database.dsn, **FAST)
        added = 0

        async def is_time():
            """Return whether jobs have ended, run and wait, and share connections with the queue's own statements."""
            nonlocal added
            rows = await raw.fetch("SELECT status, count(*) AS n FROM dl_jobs GROUP BY status")
            count = {row["status"]: row["n"] for row in rows}
            if count.get("queued", 0) < 20:
                for _ in range(20):
                    await add("fill", lease_ttl_sec=LEASE_S)
                    added += 1
            shared = await pooler.is_shared("pool", "transaction")
            return shared and count.get("succeeded", 0) >= 10 and count.get("running")

        await until(is_time)
        victim.process.kill()
        survivor = await serve(dsn=pooler.dsn, direct_dsn=database.dsn, **FAST)
        for _ in range(50):
            await add("fill", lease_ttl_sec=LEASE_S)
        done = "SELECT count(*) FROM dl_jobs WHERE status = 'succeeded'"
        await until(lambda: raw.fetchval(done), lambda count: count == added + 50, within_s=120)
    # If rows were committed without their success, or vice versa, there would be more or fewer.
    assert await raw.fetchval("SELECT count(*) FROM target") == (added + 50) * 20
    assert await raw.fetchval("SELECT count(*) FROM dl_jobs WHERE crashes = 1") > 0
    calm(survivor)

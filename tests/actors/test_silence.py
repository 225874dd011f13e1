"""A silent lock session stops runs, a waiting one does not; a commit is abandoned before its lease ends (Q7, Q12)."""

from __future__ import annotations

from functools import partial

import pytest
import trio
from conditions import until, when_ended
from databases import raw_connection
from proxy import open_proxy

from dataloader import Tasks
from dataloader.actors.job_runs import Runs
from dataloader.actors.lock_session_keeper import Keeper
from dataloader.actors.outage import Outage

LOCK = "BEGIN; LOCK TABLE dl_jobs IN ACCESS EXCLUSIVE MODE"
WAITING = """
SELECT count(*) FROM pg_stat_activity
WHERE application_name LIKE '% ' || $1 AND state = 'active' AND wait_event_type = 'Lock'
"""
"""Number of sessions of role $1 that wait for a lock."""
HELD = """
SELECT count(*) FROM pg_locks
WHERE locktype = 'advisory' AND granted AND objid::bigint::bit(32)::int = hashtext($1)
"""


class Holds:
    """A task whose runs wait for `release`, and record how each began and ended."""

    def __init__(self):
        self.tasks, self.began, self.ended, self.release = Tasks(), [], {}, trio.Event()
        self.ask = None
        self.tasks.task("hold")(self.hold)

    async def hold(self, job):
        self.began.append(job.lock_key)
        try:
            await self.release.wait()
        finally:
            with trio.move_on_after(5, shield=True):
                self.ended.setdefault(job.lock_key, self.ask and await self.ask())

    async def wait(self, count):
        async def began():
            return self.began

        await until(began, lambda began: len(began) == count)


@pytest.mark.full
@pytest.mark.requirement("Q7", "Q8")
async def test_a_claim_that_waits_for_a_table_stops_no_job_whose_own_lease_holds(open_worker, raw, database, row_of):
    holds = Holds()
    async with (
        raw_connection(database.dsn) as other,
        open_worker(holds.tasks, poll_s=0.2, heartbeat_s=1, default_lease_s=60) as supervisor,
    ):
        with trio.fail_after(60):
            long_job = await supervisor.jobs.enqueue("hold", queue="q", lock_key="long")
            await supervisor.jobs.enqueue("hold", queue="q", lock_key="short", lease_ttl_sec=5)
            await holds.wait(2)
            await other.execute(LOCK)
            await until(lambda: raw.fetchval(WAITING, "locks"))
            # Longer than the server would tolerate silence.
            await trio.sleep(6)
            assert await raw.fetchval(HELD, "long") == 1
            assert "long" not in holds.ended
            await other.execute("ROLLBACK")
            holds.release.set()
            assert (await when_ended(supervisor, long_job.job_id)).status == "succeeded"
    row = await row_of(long_job.job_id)
    assert (row["attempt"], row["refunds"]) == (1, 0)


@pytest.mark.slow
@pytest.mark.requirement("Q7")
async def test_a_network_loss_during_a_waiting_claim_stops_runs_before_keys_are_free(open_worker, raw, database):
    holds = Holds()
    holds.ask = partial(raw.fetchval, HELD, "long")
    async with (
        raw_connection(database.dsn) as other,
        open_proxy(database.dsn) as proxy,
        open_worker(
            holds.tasks,
            dsn=proxy.dsn,
            poll_s=0.2,
            heartbeat_s=1,
            default_lease_s=60,
            statement_timeout_s=20,
            drain_timeout_s=1,
        ) as supervisor,
    ):
        with trio.fail_after(60):
            await supervisor.jobs.enqueue("hold", queue="q", lock_key="long")
            await supervisor.jobs.enqueue("hold", queue="q", lock_key="short", lease_ttl_sec=5)
            await holds.wait(2)
            await other.execute(LOCK)
            await until(lambda: raw.fetchval(WAITING, "locks"))
            # Until the other connection has seen this.
            keys_safe = supervisor.signals.keys_safe
            before = keys_safe.last
            await keys_safe.wait_until(lambda until: until > before)
            proxy.freeze()
            await other.execute("ROLLBACK")  # the claim ends, and the server waits for the next message
            await until(lambda: _ended(holds, "long"))
            await until(lambda: raw.fetchval(HELD, "long"), lambda count: count == 0)
            proxy.thaw()
    assert holds.ended["long"] == 1, "the body was stopped after the server had given its key away"


class SlowToClose:
    """Lock session whose first ping waits for its turn, and whose other connection is slow to close."""

    def __init__(self):
        self.safe_until, self.pings, self.is_pinging, self.watched = 0.0, 0, False, []

    async def ping(self, _lease_s):
        self.pings += 1
        self.is_pinging = True
        await trio.sleep(3 if self.pings == 1 else 0.01)
        self.is_pinging, self.safe_until = False, trio.current_time() + 6

    async def repair(self): ...

    async def watch(self, _timeout_s):
        self.watched.append(self.is_pinging)
        return True

    async def end_watch(self):
        await trio.sleep(5)


@pytest.mark.requirement("Q7")
async def test_no_other_connection_asks_after_a_ping_that_has_been_answered(autojump_clock):
    locks = SlowToClose()
    with trio.move_on_after(60):
        await Keeper(locks=locks, runs=Runs(8), outage=Outage(), period_s=10).run()
    assert locks.pings > 20
    assert locks.watched
    assert all(locks.watched)


async def _ended(holds, key):
    return key in holds.ended


@pytest.mark.full
@pytest.mark.requirement("Q7", "Q12")
async def test_a_claim_lost_in_the_network_is_abandoned_before_runs_must_stop(open_worker, database, row_of):
    holds = Holds()
    async with (
        open_proxy(database.dsn) as proxy,
        open_worker(holds.tasks, dsn=proxy.dsn, poll_s=0.1, heartbeat_s=10, default_lease_s=15) as supervisor,
    ):
        with trio.fail_after(120):
            job = await supervisor.jobs.enqueue("hold", queue="q", lock_key="k")
            await holds.wait(1)
            [former] = proxy.links("locks")
            # The next claim is sent long before the next ping.
            proxy.forget()
            await until(lambda: _links(proxy), lambda links: links - {former})
            await supervisor.signals.keys_safe.wait_until(lambda until: until > trio.current_time() + 5)
            holds.release.set()
            # Not through the supervisor: its pool also has forgotten connections.
            row = await until(lambda: row_of(job.job_id), lambda row: row["status"] != "running")
    assert row["status"] == "succeeded"
    assert (row["attempt"], row["refunds"]) == (1, 0)


async def _links(proxy):
    return proxy.links("locks")


@pytest.mark.slow
@pytest.mark.requirement("Q8", "Q12")
async def test_a_waiting_commit_is_abandoned_before_the_lease_ends(open_worker, raw, database, row_of):
    tasks, entered, commit, left = Tasks(), trio.Event(), trio.Event(), []
    await raw.execute("CREATE TABLE target (attempt int)")
    async with raw_connection(database.dsn) as other:

        @tasks.task("fill")
        async def fill(job):
            try:
                async with job.transaction() as transaction:
                    await transaction.execute("INSERT INTO target VALUES ($1)", job.attempt)
                    entered.set()
                    await commit.wait()
            finally:
                if job.attempt == 1:
                    with trio.move_on_after(5, shield=True):
                        asked = "SELECT extract(epoch FROM lease_expires_at - clock_timestamp()) FROM dl_jobs"
                        left.append(await other.fetchval(asked))

        async with open_worker(tasks, heartbeat_s=1, default_lease_s=4) as supervisor:
            with trio.fail_after(60):
                job = await supervisor.jobs.enqueue("fill", queue="q", max_attempts=3)
                await entered.wait()
                await other.execute(LOCK)
                commit.set()
                await until(lambda: raw.fetchval(WAITING, "transaction"))
                await until(lambda: _length(left))
                # No session locks its rows any more, although the table is still locked.
                await until(lambda: raw.fetchval(WAITING, "transaction"), lambda count: count == 0)
                await other.execute("ROLLBACK")
                assert (await when_ended(supervisor, job.job_id)).status == "succeeded"
    assert left[0] > 0, "the body went on after its lease had ended"
    assert [row["attempt"] for row in await raw.fetch("SELECT attempt FROM target")] == [2]
    assert "no heartbeat succeeded" in (
        await raw.fetchval("SELECT payload ->> 'error' FROM dl_job_events WHERE kind = 'requeue'")
    )


async def _length(items):
    return len(items)

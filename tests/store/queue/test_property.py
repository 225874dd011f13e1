"""Random histories of several workers, operators, another service and lost sessions against the real database.

After every step, the promises about our own writes are checked (Q6, Q7, Q9, Q10): never two live leases of a job or of
a key, never too many runs, no effect of an old token, the same locks in the server as in memory, and an event history
that agrees with the row by the table of transitions. After a sweep, no job stays parked for a free key, and each job
that runs after others waits for one that has not ended; none is claimed before those have succeeded, or ended. In the
end every job ends.

The histories are the same each time; `PROPERTY_EXAMPLES=500 PROPERTY_SEED=1234` draws others. Hypothesis shrinks a
failure to a short list of steps and prints it.
"""

from __future__ import annotations

import os
from datetime import datetime
from uuid import UUID

import attrs
import pytest
import trio
from conditions import patience_s
from databases import RawConnection, raw_connection
from foreign import BACK_OFF, CLAIM, FINISH, LOCK, REAP, UNLOCK
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from journal import step_of
from queue_workers import ANY_CLAIM, LossyConnection, Worker

from dataloader.jobs.contract import Operator
from dataloader.jobs.errors import Conflict, StoreUnavailable
from dataloader.jobs.ids import uuid7
from dataloader.jobs.model import ClaimedJob, NewJob
from dataloader.jobs.outcomes import Outcome
from dataloader.jobs.states import TRANSITIONS, Status, Step
from dataloader.store.queue import control
from dataloader.store.queue.enqueue import enqueue
from dataloader.store.queue.leases import Beat, aio_revive, reap
from dataloader.store.queue.make_ready import ready_after, ready_due, ready_free, unpark

pytestmark = pytest.mark.full

EXAMPLES = int(os.environ.get("PROPERTY_EXAMPLES", "25"))
SEED = int(os.environ.get("PROPERTY_SEED", "0"))
KEYS = ("k0", "k1", "k2")
KEYS_OR_NONE = (*KEYS, None)
TASKS = ("t", "u")
STEPS = (Step.SUCCEED, Step.FAIL, Step.RETRY, Step.SNOOZE, Step.RETURN, Step.CANCEL)
NEVER = datetime.max  # noqa: DTZ901 - as asyncpg gives it
"""asyncpg's value for an infinite timestamp."""
OPERATOR = Operator("operator")


@attrs.define(eq=False)
class Body:
    """Running handler, as far as its process knows."""

    worker: Worker
    job: ClaimedJob


@attrs.define(eq=False)
class World:
    """State of the history: running handlers, old tokens, and jobs that other services have changed."""

    store: object
    raw: RawConnection
    service: RawConnection
    workers: list[Worker] = attrs.field(factory=list)
    bodies: list[Body] = attrs.field(factory=list)
    old: list[ClaimedJob] = attrs.field(factory=list)
    jobs: list[UUID] = attrs.field(factory=list)
    foreign_runs: list[tuple[UUID, str]] = attrs.field(factory=list)
    foreign_touched: set[UUID] = attrs.field(factory=set)
    raw_turn: trio.Lock = attrs.field(factory=trio.Lock)
    starts: int = 0
    after: dict[UUID, NewJob] = attrs.field(factory=dict)
    ended: set[UUID] = attrs.field(factory=set)
    succeeded: set[UUID] = attrs.field(factory=set)

    # Possible steps. `a` and `b` choose among the existing objects.

    async def enqueue(self, a, b):
        jobs = [
            NewJob(
                queue="q",
                task=TASKS[b == 7],
                lock_key=KEYS_OR_NONE[(a + n) % 4],
                max_attempts=1 + b % 3,
                lease_ttl_sec=60,
            )
            for n in range(1 + a % 4)
        ]
        await enqueue(self.store, jobs)
        self.jobs.extend(job.job_id for job in jobs)

    async def enqueue_plain(self, a, b):
        """Add jobs without a key, which the plain claim takes if there is no other job among them."""
        jobs = [NewJob(queue="q", task="t", max_attempts=1 + b % 3, lease_ttl_sec=60) for _ in range(1 + a)]
        await enqueue(self.store, jobs)
        self.jobs.extend(job.job_id for job in jobs)

    async def enqueue_after(self, a, b):
        """Add jobs that run after some of the latest ones, including those of their own list."""
        jobs = []
        for n in range(1 + a % 4):
            known = [*self.jobs, *(job.job_id for job in jobs)][-6:]
            jobs.append(
                NewJob(
                    queue="q", task="t", lock_key=KEYS[a % 3] if n == 1 else None, max_attempts=1 + b % 3,
                    after=[known[(a + n + i * b) % len(known)] for i in range(b % 4)] if known else None,
                    when_failed="run" if (a + b) % 3 == 0 else "cancel",
                )
            )  # fmt: skip
        await enqueue(self.store, jobs)
        self.jobs.extend(job.job_id for job in jobs)
        self.after |= {job.job_id: job for job in jobs if job.after}

    async def delete(self, a, _b):
        """Delete a job that has not run, by hand."""
        job_id = self.pick(self.jobs, a)
        if job_id and await self.sql("DELETE FROM dl_jobs WHERE job_id = $1 AND token = 0 RETURNING job_id", job_id):
            self.jobs.remove(job_id)
            self.ended.add(job_id)

    async def judge(self, _a, _b):
        await ready_after(self.store)

    async def claim(self, a, b):
        worker = self.workers[a % len(self.workers)]
        claim = await self.insist(worker, lambda: worker.ask(limit=1 + b, tasks=TASKS[: 1 + (a % 2)]))
        for job in claim.jobs:
            # The most important promise: no other handler of that job or key runs now.
            assert job.job_id not in {body.job.job_id for body in self.bodies}
            assert job.lock_hash is None or job.lock_hash not in {body.job.lock_hash for body in self.bodies}
            self.bodies.append(Body(worker, job))
            await self.check_turn(job.job_id)
        if b != 3:  # otherwise the process is too slow with its second check, and the sweep must follow
            await unpark(self.store, claim.to_test)

    async def claim_without_reply(self, a, _b):
        worker = self.workers[a % len(self.workers)]
        await self.insist(worker, lambda: worker.ask("nothing here"))
        session = worker.locks._session
        session._connection = LossyConnection(session._connection, ANY_CLAIM)
        with pytest.raises(StoreUnavailable):
            await worker.ask()

    async def end(self, a, b):
        body = self.pick(self.bodies, a)
        if body is not None:
            await self.stop(body, STEPS[b % len(STEPS)], delay_s=60.0 if b % 4 == 3 else 0.0)

    async def end_again(self, a, b):
        """Write an outcome of a worker that was declared dead, or one of a batch that is sent a second time."""
        job = self.pick(self.old, a)
        if job is None:
            return
        async with self.raw_turn:
            row = "SELECT j::text, token, status::text AS status FROM dl_jobs j WHERE job_id = $1"
            before = await self.raw.fetchrow(row, job.job_id)
            if (before["token"], before["status"]) == (job.token, "running"):
                return  # its process is dead or has given up, and the job has not been reclaimed yet
            outcome = Outcome(job.job_id, job.token, STEPS[b % len(STEPS)], error="late", result="1")
            assert (await self.workers[0].record(outcome)).written == {}
            assert await self.raw.fetchrow(row, job.job_id) == before

    async def beat(self, a, _b):
        worker = self.workers[a % len(self.workers)]
        bodies = [body for body in self.bodies if body.worker is worker]
        if bodies:
            found = await worker.beat(*(body.job for body in bodies))
            found_of = list(zip(bodies, found, strict=True))
            expired = [body.job for body, beat in found_of if beat is Beat.EXPIRED]
            runs = [(job.job_id, job.token) for job in expired]
            revived = await self.insist(worker, lambda: worker.locks.revive(runs, timeout_s=5))
            keyless = [(job.job_id, job.token) for job in expired if job.lock_hash is None]
            if keyless:
                revived = revived | await self.store.write(aio_revive, keyless)
            for body, beat in found_of:
                lost = beat is Beat.LOST or (beat is Beat.EXPIRED and body.job.token not in revived)
                if lost and body in self.bodies:
                    await self.give_up(body)

    async def jump(self, _a, _b):
        """Make the database's clock jump: all leases have ended. Heartbeats come before the reapers' second check."""
        await self.sql(
            "UPDATE dl_jobs SET lease_expires_at = now() - interval '1 s'"
            " WHERE status = 'running' AND claimed_by IS NOT NULL"
        )
        for index in range(len(self.workers)):
            await self.beat(index, 0)

    async def expire(self, a, b):
        """End a lease after its handler was stopped; its process releases the key immediately, or slowly."""
        body = self.pick(self.bodies, a)
        if body is not None:
            self.remove(body)
            await self.sql(
                "UPDATE dl_jobs SET lease_expires_at = now() - interval '1 s'"
                " WHERE job_id = $1 AND token = $2 AND status = 'running'",
                body.job.job_id,
                body.job.token,
            )
            if b % 2:
                await self.let_go(body)

    async def reap(self, _a, _b):
        await reap(self.store, 100)

    async def cancel(self, a, _b):
        job_id = self.pick(self.jobs, a)
        if job_id is not None:
            await control.cancel(self.store, job_id, OPERATOR)

    async def retry(self, a, _b):
        job_id = self.pick(self.jobs, a)
        if job_id is not None:
            try:
                await control.retry(self.store, job_id, OPERATOR)
            except Conflict:
                return

    async def lose_session(self, a, _b):
        worker = self.workers[a % len(self.workers)]
        if worker.locks._ghost is not None:
            await self.sql("SELECT pg_terminate_backend($1, 5000)", worker.pid)

    async def kill(self, a, _b):
        """Kill a process (kill -9): its handlers end with it, the rows stay."""
        index = a % len(self.workers)
        worker = self.workers[index]
        for body in [body for body in self.bodies if body.worker is worker]:
            self.remove(body)
        self.workers[index] = self.start()
        await worker.locks.close()

    async def drain(self, a, _b):
        worker = self.workers[a % len(self.workers)]
        for body in [body for body in self.bodies if body.worker is worker]:
            await self.stop(body, Step.RETURN)

    async def sweep(self, _a, _b):
        while (await ready_after(self.store)).jobs:
            pass
        await ready_free(self.store)
        await ready_due(self.store)

    async def let_time_pass(self, _a, _b):
        """Make all waiting jobs due, without the trigger."""
        async with self.raw_turn:
            await self.raw.execute("SET session_replication_role = replica")
            await self.raw.execute(
                "UPDATE dl_jobs SET available_at = now()"
                " WHERE status = 'queued' AND available_at > now() AND waits_for IS DISTINCT FROM 'after'"
            )
            await self.raw.execute("SET session_replication_role = origin")
        await ready_due(self.store)

    async def foreign_insert(self, a, _b):
        job_id = uuid7()
        await self.foreign(
            "INSERT INTO dl_jobs (job_id, queue, task, lock_key) VALUES ($1, 'q', 't', $2)", job_id, KEYS[a % 3]
        )
        self.jobs.append(job_id)

    async def foreign_claim(self, _a, _b):
        for row in await self.foreign(CLAIM):
            self.foreign_touched.add(row["job_id"])
            await self.check_turn(row["job_id"])
            [got] = await self.foreign(LOCK, row["lock_key"])
            if got[0]:
                self.foreign_runs.append((row["job_id"], row["lock_key"]))
            else:
                await self.foreign(BACK_OFF, row["job_id"], 5.0)

    async def foreign_finish(self, a, b):
        run = self.pick(self.foreign_runs, a)
        if run is not None:
            self.foreign_runs.remove(run)
            await (self.foreign(BACK_OFF, run[0], 5.0) if b % 2 else self.foreign(FINISH, run[0]))
            await self.foreign(UNLOCK, run[1])

    async def foreign_reap(self, _a, _b):
        self.foreign_touched.update(row["job_id"] for row in await self.foreign(REAP))

    # Helpers of the steps.

    @staticmethod
    def pick(items, index):
        return items[index % len(items)] if items else None

    def start(self):
        self.starts += 1
        return Worker(self.store, f"w{self.starts}")

    async def sql(self, sql, *args):
        async with self.raw_turn:
            return await self.raw.fetch(sql, *args)

    async def foreign(self, sql, *args):
        return await self.service.fetch(sql, *args)

    async def insist(self, worker, operation):
        """Do something on a worker's lock session that may be lost; stop runs whose key is lost."""
        with trio.fail_after(patience_s()):
            while True:
                try:
                    result = await operation()
                    break
                except StoreUnavailable:
                    await trio.sleep(0.005)
        while worker.lost:
            token = worker.lost.pop()
            for body in [body for body in self.bodies if body.job.token == token]:
                await self.stop(body, Step.RETURN)
        return result

    def remove(self, body):
        if body in self.bodies:
            self.bodies.remove(body)
            self.old.append(body.job)

    async def stop(self, body, step, **outcome):
        """End the handler, then write its outcome, then free its key."""
        if body in self.bodies:
            self.bodies.remove(body)
            await body.worker.record(Outcome(body.job.job_id, body.job.token, step, **outcome))
            self.old.append(body.job)
            await self.let_go(body)

    async def give_up(self, body):
        self.remove(body)
        await self.let_go(body)

    async def let_go(self, body):
        if body.worker in self.workers:
            body.worker.locks.forget(body.job.token)
            await self.insist(body.worker, body.worker.locks.release)

    # Invariants.

    async def check(self):
        rows = {row["job_id"]: row for row in await self.sql(
            "SELECT *, status::text AS status, CASE WHEN keyed THEN hashtext(lock_key) END AS h,"
            " lease_expires_at > now() AS live,"
            " available_at <= now() AS due FROM dl_jobs"
        )}  # fmt: skip
        ours = [row for row in rows.values() if row["status"] == "running" and row["claimed_by"] is not None]
        live = [row["h"] for row in ours if row["live"] and row["h"] is not None]
        assert len(live) == len(set(live)), "two live leases of one key"
        tokens = [row["token"] for row in rows.values() if row["token"]]
        assert len(tokens) == len(set(tokens)), "two rows with one token"
        for row in rows.values():
            status = Status(row["status"])
            assert (row["finished_at"] is not None) == status.is_final, row
            assert (row["lease_expires_at"] is not None) == (status is Status.RUNNING), row
            assert status is Status.QUEUED or row["waits_for"] is None, row
            assert status is not Status.QUEUED or row["waits_for"] is not None or row["due"], row
            if status.is_final:
                self.ended.add(row["job_id"])
            if status is Status.SUCCEEDED:
                self.succeeded.add(row["job_id"])
            assert (row["waits_for"] == "after") <= (row["available_at"] == NEVER), row
            if row["job_id"] not in self.foreign_touched:
                assert row["attempt"] <= row["max_attempts"], row
                assert row["crashes"] <= row["max_attempts"], row
        for body in self.bodies:
            row = rows[body.job.job_id]
            assert (row["token"], row["status"]) == (body.job.token, "running"), "a body whose job is not its own"
        await self.check_journal(rows)
        await self.check_locks()

    async def check_journal(self, rows):
        statuses = dict.fromkeys(rows, Status.QUEUED)
        for event in await self.sql(
            "SELECT job_id, kind, payload ->> 'reason' AS reason FROM dl_job_events ORDER BY event_id"
        ):
            if event["job_id"] not in self.foreign_touched and event["kind"] not in {"queued", "heartbeat"}:
                step = step_of(event["kind"], event["reason"])
                statuses[event["job_id"]] = TRANSITIONS[statuses[event["job_id"]], step]
        for job_id, status in statuses.items():
            assert job_id in self.foreign_touched or rows[job_id]["status"] == status, "the journal tells another story"

    async def check_turn(self, job_id):
        """Check that a job does not begin before those that it runs after."""
        job = self.after.get(job_id)
        if job is not None:
            rows = await self.sql(
                "SELECT job_id, status::text AS status FROM dl_jobs WHERE job_id = ANY ($1::uuid[])", list(job.after)
            )
            succeeded = {row["job_id"] for row in rows if row["status"] == Status.SUCCEEDED} | self.succeeded
            ended = {row["job_id"] for row in rows if Status(row["status"]).is_final} | self.ended
            assert job.after <= (succeeded if job.when_failed == "cancel" else ended), "it was not its turn"

    async def check_after(self):
        """Check, after a sweep, that each job that waits for others waits for one that has not ended."""
        idle = await self.sql("""
            SELECT w.job_id FROM dl_jobs w WHERE w.status = 'queued' AND w.waits_for = 'after' AND NOT EXISTS (
              SELECT FROM dl_job_after a JOIN dl_jobs p ON p.job_id = a.after_id
              WHERE a.job_id = w.job_id AND p.status IN ('queued', 'running'))""")
        assert not idle, "a job waits for others that have all ended"

    async def check_locks(self):
        for worker in self.workers:
            locks = worker.locks
            if locks.connected and not locks._suspect:
                rows = await self.sql(
                    "SELECT objid::bigint::bit(32)::int AS h FROM pg_locks WHERE locktype = 'advisory' AND pid = $1",
                    worker.pid,
                )
                alive = await self.sql("SELECT FROM pg_stat_activity WHERE pid = $1", worker.pid)
                if alive:
                    assert {row["h"] for row in rows} == {*locks._held(), *locks._to_release}, "locks that nobody knows"

    async def check_parked(self):
        """Check, after a sweep, that each free key with parked jobs has a ready job."""
        stuck = await self.sql("""
            SELECT h FROM (SELECT DISTINCT hashtext(lock_key) AS h FROM dl_jobs WHERE waits_for = 'lock') AS parked
            WHERE NOT EXISTS (SELECT FROM dl_jobs r WHERE r.status = 'running' AND r.lease_expires_at > now()
                              AND hashtext(r.lock_key) = h)
              AND NOT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND objid::bigint::bit(32)::int = h)
              AND NOT EXISTS (SELECT FROM dl_jobs n WHERE n.status = 'queued' AND n.waits_for IS NULL
                              AND hashtext(n.lock_key) = h)""")
        assert not stuck, "parked without a holder"

    async def come_to_an_end(self):
        """Check that every job ends, whatever has happened, if there are no faults from here on."""
        for run in list(self.foreign_runs):
            await self.foreign(UNLOCK, run[1])
        for body in list(self.bodies):
            await self.stop(body, Step.SUCCEED)
        for worker in self.workers:
            for token in list(worker.locks.tokens):
                worker.locks.forget(token)
            await self.insist(worker, worker.ping)
            await self.insist(worker, worker.locks.release)
        await self.sql("UPDATE dl_jobs SET lease_expires_at = now() - interval '1 s' WHERE status = 'running'")
        await self.reap(0, 0)
        rounds = 0
        while await self.sql("SELECT FROM dl_jobs WHERE status IN ('queued', 'running')"):
            rounds += 1
            assert rounds < 2 * len(self.jobs) + 2, "jobs that neither end nor run"
            await self.let_time_pass(0, 0)
            await self.sweep(0, 0)
            await self.check_parked()
            await self.check_after()
            await self.claim(1, 7)
            for body in list(self.bodies):
                await self.stop(body, Step.SUCCEED)
        await self.check()


# The first ones are the most common steps; hypothesis prefers them when it shrinks.
COMMON = ("enqueue", "claim", "end", "enqueue", "claim", "end", "enqueue_plain", "claim")
RARE = (
    "sweep", "expire", "reap", "jump", "cancel", "retry", "beat", "end_again", "let_time_pass", "drain", "kill",
    "lose_session", "claim_without_reply", "foreign_insert", "foreign_claim", "foreign_finish", "foreign_reap",
    "enqueue_after", "enqueue_after", "judge", "delete",
)  # fmt: skip
CHOICES = st.integers(0, 7)
ONE = st.tuples(st.sampled_from(COMMON + RARE), CHOICES, CHOICES)
ON_THE_STORE = st.tuples(
    st.sampled_from(
        ["claim", "end", "reap", "sweep", "beat", "cancel", "enqueue", "enqueue_plain", "enqueue_after", "judge"]
    ),
    CHOICES,
    CHOICES,
)
TWO_AT_ONCE = st.tuples(ON_THE_STORE, ON_THE_STORE)
HISTORIES = st.lists(st.one_of(st.tuples(ONE), st.tuples(ONE), st.tuples(ONE), TWO_AT_ONCE), min_size=10, max_size=60)


async def play(store, raw, service, history):
    await raw.execute("DELETE FROM dl_jobs")
    world = World(store, raw, service)
    world.workers = [world.start() for _ in range(3)]
    try:
        with trio.fail_after(60):
            for steps in history:
                async with trio.open_nursery() as nursery:
                    for name, a, b in steps:
                        nursery.start_soon(getattr(world, name), a, b)
                await world.check()
                if steps[0][0] == "sweep" and len(steps) == 1:
                    await world.check_parked()
                    await world.check_after()
            await world.come_to_an_end()
    finally:
        with trio.move_on_after(20, shield=True):
            await service.execute("SELECT pg_advisory_unlock_all()")
            for worker in world.workers:
                await worker.locks.close()


@pytest.mark.requirement("Q6")
@pytest.mark.requirement("Q7")
@pytest.mark.requirement("Q9")
@pytest.mark.requirement("Q10")
@pytest.mark.requirement("Q11")
@pytest.mark.parametrize(
    ("part", "examples"), [(0, EXAMPLES // 4)] + [pytest.param(n, EXAMPLES, marks=pytest.mark.slow) for n in (1, 2, 3)]
)
async def test_every_history_keeps_the_promises(database, store, raw, part, examples, monkeypatch):
    monkeypatch.setattr("dataloader.store.queue.plain_claim.GENERAL_CLAIMS", 2)
    async with raw_connection(database.dsn) as service:

        @seed(SEED + part)
        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            suppress_health_check=[
                HealthCheck.too_slow,
                HealthCheck.data_too_large,
                HealthCheck.function_scoped_fixture,
            ],
            phases=[Phase.generate, Phase.shrink],
        )
        @given(history=HISTORIES)
        def histories(history):
            trio.from_thread.run(play, store, raw, service, history)

        await trio.to_thread.run_sync(histories)

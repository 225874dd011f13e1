"""Waiting jobs become ready when they are due, in order and in batches.

Wrong clocks make no job early, and lose none.
"""

from __future__ import annotations

from datetime import timedelta

import attrs
import pytest
import trio
from conditions import patience_s
from databases import raw_connection
from watched_database import WatchedDatabase

from dataloader.actors.outage import Outage
from dataloader.actors.stager import MAX_REST_S, REST, Stager
from dataloader.jobs.model import NewJob
from dataloader.store.queue import make_ready, poll
from dataloader.store.queue.enqueue import enqueue
from dataloader.store.queue.make_ready import BATCH, Judged, Staged, ready_due
from dataloader.store.queue.poll import Parked

SOON = "now() + interval '50 milliseconds'"
LATER = "now() + interval '1 hour'"


async def age(raw, job_id, seconds):
    """Make a waiting job due since `seconds`, without the trigger, like the passage of time."""
    await raw.execute("SET session_replication_role = replica")
    await raw.execute(
        "UPDATE dl_jobs SET available_at = now() - make_interval(secs => $2) WHERE job_id = $1", job_id, float(seconds)
    )
    await raw.execute("SET session_replication_role = origin")


@pytest.mark.requirement("Q2")
async def test_due_jobs_become_ready_and_the_next_ones_time_is_told(store, raw, add_job, row_of):
    due, later = await add_job(available_at=LATER), await add_job(available_at=LATER)
    await age(raw, due, 1)
    staged = await ready_due(store)
    assert staged.readied == 1
    assert 3590 < staged.next_due_s <= 3600
    assert (await row_of(due, "waits_for"), await row_of(later, "waits_for")) == (None, "time")


@pytest.mark.requirement("Q2")
async def test_with_nothing_waiting_for_its_time_there_is_no_next(store, add_job):
    await add_job()
    staged = await ready_due(store)
    assert (staged.readied, staged.next_due_s) == (0, None)


@pytest.mark.requirement("Q2")
async def test_a_storm_is_staged_in_batches_oldest_first(store, raw, add_job, row_of):
    jobs = [await add_job(available_at=LATER) for _ in range(5)]
    for seconds, job_id in enumerate(jobs, start=1):
        await age(raw, job_id, seconds)
    staged = await ready_due(store, most=2)
    assert staged.next_due_s == 0
    sizes = [staged.readied]
    assert [await row_of(job_id, "waits_for") for job_id in jobs] == ["time", "time", "time", None, None]
    while sizes[-1]:
        staged = await ready_due(store, most=2)
        sizes.append(staged.readied)
    assert (sizes, staged.next_due_s) == ([2, 2, 1, 0], None)


@pytest.mark.requirement("Q2")
@pytest.mark.parametrize("locked", [0, 1, 2])
async def test_locked_due_jobs_are_reported_as_due(database, store, raw, add_job, locked):
    jobs = [await add_job(available_at=LATER) for _ in range(4)]
    for seconds, job_id in enumerate(jobs[:3]):
        await age(raw, job_id, 1 + seconds)
    async with raw_connection(database.dsn) as psql:
        await psql.execute("BEGIN")
        await psql.execute("SELECT FROM dl_jobs WHERE job_id = $1 FOR UPDATE", jobs[locked])
        staged = await ready_due(store)
        assert (staged.readied, staged.next_due_s) == (2, 0)
        await psql.execute("ROLLBACK")
    staged = await ready_due(store)
    assert staged.readied == 1
    assert 3590 < staged.next_due_s <= 3600


@pytest.mark.requirement("Q2")
async def test_two_stagers_share_the_work_and_pass_over_locked_rows(database, store, raw, add_job):
    jobs = [await add_job(available_at=LATER) for _ in range(6)]
    for job_id in jobs:
        await age(raw, job_id, 1)
    readied = []

    async def sweep():
        readied.append((await ready_due(store)).readied)

    async with raw_connection(database.dsn) as psql:
        await psql.execute("BEGIN")
        await psql.execute("SELECT FROM dl_jobs WHERE job_id = $1 FOR UPDATE", jobs[0])
        with trio.fail_after(patience_s()):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(sweep)
                nursery.start_soon(sweep)
        await psql.execute("ROLLBACK")
    assert sum(readied) == 5


@pytest.mark.requirement("Q2")
async def test_a_job_is_not_claimed_before_its_time(start_worker, add_job, store, raw):
    job_id = await add_job(available_at=LATER)
    worker = start_worker()
    await ready_due(store)
    assert await worker.claim() == []
    await age(raw, job_id, 1)
    await ready_due(store)
    assert len(await worker.claim()) == 1


@pytest.mark.slow
@pytest.mark.requirement("Q2")
async def test_a_stager_that_sleeps_is_woken_by_the_notification_of_an_earlier_job(database, store, raw, until):
    """Also by a job for now, added by a client whose clock is ahead."""
    stager = Stager(database=store, outage=Outage(), sweep_s=3600, poll_s=3600)
    heard = trio.Event()
    due = []
    async with raw_connection(database.dsn) as listener, trio.open_nursery() as nursery:

        def notified(*event):
            due.append(float(event[3]))
            stager.wake.set()
            heard.set()

        await listener._cross(listener.asyncpg.add_listener, "dl_due", notified)
        await nursery.start(stager.run)
        now = await raw.fetchval("SELECT clock_timestamp()")
        ahead = now + timedelta(seconds=1)
        [added] = await enqueue(store, [NewJob(queue="q", task="t", available_at=ahead)])
        with trio.fail_after(patience_s()):
            await heard.wait()
        # Not later than it is due, except for whole seconds.
        assert due[0] <= ahead.timestamp() < due[0] + 1.1
        await until("waits_for IS NULL FROM dl_jobs WHERE job_id = $1", added.job_id)
        assert await raw.fetchval("SELECT clock_timestamp()") >= ahead
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("sweep_s", "told"), [(0.2, False), (3600, True)], ids=["whose notification was lost", "that it was told of"]
)
async def test_a_stager_that_ends_keep_awake_finds_a_job_that_was_added(store, raw, until, sweep_s, told):
    """An end makes it check only the jobs that run after that one."""
    looks, narrow = [], trio.Event()

    async def aio_note(_connection, sql, *values, answer):
        if "dl_judge_after" in sql:
            _most, added = values
            looks.append((added, answer["judged"]))
            if not added:
                narrow.set()
            stager.wake.set()

    watched = WatchedDatabase(store, after=aio_note)
    stager = Stager(database=watched, outage=Outage(), sweep_s=sweep_s, poll_s=3600)
    [first] = await enqueue(store, [NewJob(queue="q", task="t")])
    await raw.execute("UPDATE dl_jobs SET status = 'succeeded', finished_at = now()")

    async with trio.open_nursery() as nursery:
        await nursery.start(stager.run)
        with trio.fail_after(patience_s()):
            await narrow.wait()
        [last] = await enqueue(store, [NewJob(queue="q", task="t", after=[first.job_id])])
        if told:
            stager.added.set()
        await until("waits_for IS NULL FROM dl_jobs WHERE job_id = $1", last.job_id)
        nursery.cancel_scope.cancel()
    assert (True, 1) in looks
    assert (False, 1) not in looks


@pytest.mark.requirement("Q2")
@pytest.mark.parametrize("columns", [{}, {"waits_for": "'time'"}], ids=["foreign", "ours"])
async def test_a_delayed_row_never_stands_in_the_index_of_ready_jobs(raw, add_job, columns):
    await add_job(available_at=SOON, **columns)
    predicate = await raw.fetchval(
        "SELECT pg_get_expr(indpred, indrelid) FROM pg_index WHERE indexrelid = 'ix_dl_jobs_ready'::regclass"
    )
    assert await raw.fetchval(f"SELECT count(*) FROM dl_jobs WHERE {predicate}") == 0


@attrs.define
class Rounds:
    """Replacement for a database: answers the stager's statements with batches, (seconds, result)."""

    left: list[tuple[float, Staged]]
    began: list[float] = attrs.field(factory=list)
    done: trio.Event = attrs.field(factory=trio.Event)

    async def run(self, operation, *_args):
        assert operation is poll._aio_look_for_parked
        return Parked(for_keys=False, to_judge=False)

    async def write(self, operation, *_args):
        if operation is make_ready._aio_ready_after:
            return Judged(0, more=False)
        assert operation is make_ready._aio_ready_due
        self.began.append(trio.current_time())
        if not self.left:
            self.done.set()
            return Staged(0, None)
        took_s, staged = self.left.pop(0)
        await trio.sleep(took_s)
        return staged


async def rounds_of(*batches):
    """Let a stager process batches; return the beginning of each."""
    rounds = Rounds(list(batches))
    stager = Stager(database=rounds, outage=Outage(), sweep_s=60, poll_s=60)
    async with trio.open_nursery() as nursery:
        await nursery.start(stager.run)
        await rounds.done.wait()
        nursery.cancel_scope.cancel()
    return [at - rounds.began[0] for at in rounds.began]


@pytest.mark.requirement("Q2")
async def test_in_a_storm_the_stager_rests_as_a_share_of_the_time_that_a_batch_took(autojump_clock):
    full = Staged(BATCH, 0)
    took_s = MAX_REST_S / REST
    began = await rounds_of((took_s, full), (took_s / 2, full), (10.0, full), (0.1, Staged(3, 2.0)))
    second = took_s * (1 + REST)
    third = second * 1.5
    assert began == pytest.approx([0, second, third, third + 10 + MAX_REST_S, third + 10 + MAX_REST_S + 2.1], abs=0.01)


@pytest.mark.requirement("Q2")
@pytest.mark.parametrize("readied", [1, BATCH], ids=["few", "a full batch that was all"])
async def test_without_a_storm_the_stager_is_there_when_the_next_job_falls_due(autojump_clock, readied):
    assert await rounds_of((0.1, Staged(readied, 0.05)), (0.1, Staged(1, None))) == pytest.approx(
        [0, 0.15, 60], abs=0.01
    )

"""Limits in the database: periods by a zone's clock, units of rate limits, lanes counted under their lock."""

from __future__ import annotations

import json
import random
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
import trio
from databases import raw_connection
from odd_clocks import ODD_ZONES

from dataloader import NewJob, RateLimit, Supplier, Tasks
from dataloader.jobs.work_periods import WorkPeriods
from dataloader.store.etl.suppliers import aio_return_slot, aio_take_slot
from dataloader.store.limits.limit_rows import _ranges, aio_declare_limits, aio_known
from dataloader.store.queue import enqueue
from dataloader.store.queue.lock_session import LockSession
from dataloader.store.queue.task_rows import aio_declare

PERIODS = ["MON-FRI 00:00-06:00", "DAILY 22:00-02:30", "SUN 01:00-03:00", "SAT,SUN 00:00-24:00"]


@pytest.mark.requirement("S4")
async def test_the_database_opens_a_period_when_its_zones_clock_says_so_and_is_never_late(raw):
    """At random minutes, in zones with odd clocks; it may be early, and in a repeated hour ten minutes late."""
    chance = random.Random(4)
    for zone in ODD_ZONES:
        for text in PERIODS:
            periods = WorkPeriods.parsed([text], ZoneInfo(zone))
            instants = [
                datetime(2019, 1, 1, tzinfo=UTC) + timedelta(minutes=chance.randrange(6 * 525_600)) for _ in range(40)
            ]
            rows = await raw.fetch(
                "SELECT dl_opens_in($1::text::int4multirange, $2, i, 0) AS wait_s FROM unnest($3::timestamptz[]) AS i",
                _ranges(periods),
                zone,
                instants,
            )
            for instant, row in zip(instants, rows, strict=True):
                assert periods.is_open(instant) == (row["wait_s"] == 0), (zone, text, instant)
                if row["wait_s"] > 0:
                    opens = periods.next_change(instant)
                    assert row["wait_s"] <= max((opens - instant).total_seconds(), 600), (zone, text, instant)


@pytest.fixture
def limited(store):
    """Return a function that declares tasks with limits."""

    async def limited(tasks, jobs=()):
        await store.write(aio_declare, tasks.values(), "test")
        await store.write(aio_declare_limits, tasks.values(), tasks.suppliers)
        if jobs:
            await enqueue.enqueue(store, list(jobs))

    return limited


@pytest.fixture
async def claims(store):
    """Return a function that claims on a separate session; it returns the jobs and the results of the lanes."""
    sessions = []

    async def claim(*names):
        session = LockSession(store, f"worker {len(sessions)}", lost=lambda _tokens: None)
        sessions.append(session)
        _, lanes, _ = await store.run(aio_known, names)
        claim = await session.claim("q", 100, names, 30, limited=lanes, lanes=lanes)
        return claim.jobs, {lane: (why, wait_s) for lane, why, wait_s in claim.lanes}

    yield claim
    for session in sessions:
        await session.close()


async def noop(_job): ...


def supplied(rate_limits, *names, cost=1):
    tasks = Tasks()
    supplier = Supplier("s", rate_limits=rate_limits, margin_s=0.05)
    for name in names:
        tasks.task(name, queue="q", supplier=supplier, cost=cost)(noop)
    return tasks


@pytest.mark.requirement("S4")
async def test_requests_of_loads_and_starts_of_tasks_use_one_rate_limit(limited, claims, store, raw):
    tasks = supplied([RateLimit(3, per_s=3_600)], "t")
    await limited(tasks, [NewJob(task="t") for _ in range(5)])
    assert (await store.write(aio_take_slot, "s", 1, 60)).waits_for is None
    jobs, lanes = await claims("t")
    assert (len(jobs), lanes) == (2, {"t": (None, 0)})  # the load's request, in progress, is the third
    _, lanes = await claims("t")
    assert lanes["t"][0] == "budget"
    await store.write(aio_return_slot, "s", 1, 0.0)
    answer = await store.write(aio_take_slot, "s", 2, 60)
    assert answer.waits_for == "budget"
    assert 3_500 < answer.wait_s < 3_601
    assert await raw.fetchval("SELECT last_n FROM dl_sources WHERE source = 's'") == 3


@pytest.mark.requirement("S4")
async def test_lanes_of_one_supplier_share_what_it_leaves_in_the_order_of_their_jobs(limited, claims):
    tasks = supplied([RateLimit(3, per_s=3_600)], "a", "b")
    jobs = [NewJob(task="a", priority=10), NewJob(task="b", priority=1), NewJob(task="b", priority=2)]
    await limited(tasks, [*jobs, NewJob(task="a", priority=20), NewJob(task="b", priority=30)])
    claimed, lanes = await claims("a", "b")
    assert {job.job_id for job in claimed} == {job.job_id for job in jobs}
    again, lanes = await claims("a", "b")
    assert again == []
    assert {why for why, _ in lanes.values()} == {"budget"}


@pytest.mark.slow
@pytest.mark.requirement("S1")
async def test_concurrent_claims_start_no_more_than_a_lane_allows(limited, claims, store, raw):
    """Running jobs are counted under the lane's lock: each claim sees all jobs that former holders have started."""
    tasks = Tasks()
    tasks.task("t", queue="q", max_running=4)(noop)
    await limited(tasks, [NewJob(task="t") for _ in range(40)])
    found = []

    async def claim():
        jobs, _ = await claims("t")
        found.extend(jobs)

    for _ in range(5):
        async with trio.open_nursery() as nursery:
            for _ in range(6):
                nursery.start_soon(claim)
    assert len(found) == 4
    assert await raw.fetchval("SELECT count(*) FROM dl_jobs WHERE status = 'running'") == 4


@pytest.mark.requirement("S1")
async def test_a_lane_that_another_claim_has_locked_starts_no_job(limited, claims, database):
    tasks = Tasks()
    for name in ("t", "free"):
        tasks.task(name, queue="q", max_running=4)(noop)
    await limited(tasks, [NewJob(task="t"), NewJob(task="free")])
    async with raw_connection(database.dsn) as other:
        await other.execute("BEGIN; SELECT FROM dl_lanes WHERE lane = 't' FOR UPDATE")
        jobs, lanes = await claims("t", "free")
        assert [job.task for job in jobs] == ["free"]
        assert lanes["t"] == ("locked", 0.01)
        await other.execute("ROLLBACK")
    assert [job.task for job in (await claims("t", "free"))[0]] == ["t"]


@pytest.mark.requirement("S4")
async def test_a_closed_lane_is_skipped_without_reading_its_jobs_or_delaying_others(limited, claims, raw):
    tasks = supplied([RateLimit(1, per_s=3_600)], "closed")
    tasks.task("open", queue="q")(noop)
    await limited(tasks, [NewJob(task="closed") for _ in range(300)])
    assert len((await claims("closed", "open"))[0]) == 1
    await limited(tasks, [NewJob(task="open", priority=1_000)])
    jobs, lanes = await claims("closed", "open")
    assert [job.task for job in jobs] == ["open"]
    assert lanes["closed"][0] == "budget"


@pytest.mark.requirement("S4")
async def test_a_long_lock_of_a_supplier_delays_only_its_own_lanes(limited, claims, raw, database):
    tasks = supplied([RateLimit(9, per_s=60)], "t")
    tasks.task("free", queue="q", max_running=9)(noop)
    await limited(tasks, [NewJob(task="t"), NewJob(task="free")])
    async with raw_connection(database.dsn) as other:
        await other.execute("BEGIN; SELECT FROM dl_sources WHERE source = 's' FOR UPDATE")
        jobs, lanes = await claims("t", "free")
        assert [job.task for job in jobs] == ["free"]
        assert lanes["t"] == ("locked", 0.01)
        await other.execute("ROLLBACK")
    assert [job.task for job in (await claims("t", "free"))[0]] == ["t"]


@pytest.mark.slow
@pytest.mark.requirement("S4")
async def test_concurrent_claims_take_no_more_than_a_rate_limit_allows(limited, claims, raw):
    await limited(supplied([RateLimit(7, per_s=3_600)], "t"), [NewJob(task="t") for _ in range(40)])
    found = []

    async def claim():
        jobs, _ = await claims("t")
        found.extend(jobs)

    for _ in range(5):
        async with trio.open_nursery() as nursery:
            for _ in range(6):
                nursery.start_soon(claim)
    assert len(found) == 7
    assert await raw.fetchval("SELECT last_n FROM dl_sources WHERE source = 's'") == 7


READ = """
SELECT sum(seq_tup_read + coalesce(idx_tup_fetch, 0))::int FROM pg_stat_xact_user_tables
WHERE relname IN ('dl_jobs', 'dl_job_events', 'dl_source_calls')
"""
CLAIM = "SELECT * FROM dl_claim_known('q', 10, 10, 'w', $1, '{}', 30, '{}', NULL, $1, $1)"
TAKE = "SELECT * FROM dl_supplier_take('s', 1)"


@pytest.mark.slow
@pytest.mark.requirement("S4")
async def test_claims_and_takes_read_no_more_rows_as_more_jobs_wait_or_were_taken(limited, raw):
    """The plans were made while the tables were empty."""
    await limited(supplied([RateLimit(1_000_000, per_s=3_600)], "open"))
    closed = Tasks()
    closed.task("closed", queue="q", max_running=5)(noop)
    await limited(closed)
    for table in ("dl_jobs", "dl_job_events", "dl_source_calls"):
        await raw.execute(f"ALTER TABLE {table} SET (autovacuum_enabled = off)")
        await raw.execute(f"VACUUM ANALYZE {table}")

    async def read(sql, *args):
        await raw.execute("BEGIN")
        before = await raw.fetchval(READ)
        await raw.fetch(sql, *args)
        rows = await raw.fetchval(READ) - before
        await raw.execute("ROLLBACK; SELECT pg_advisory_unlock_all()")
        return rows

    for _ in range(6):
        await read(CLAIM, ["closed", "open"])
        await read(TAKE)
    await raw.execute(
        "INSERT INTO dl_jobs (job_id, queue, task, lock_key, keyed, lane)"
        " SELECT gen_random_uuid(), 'q', lane, 'k', false, lane"
        " FROM generate_series(1, 10000), unnest('{closed,open}'::text[]) AS lane"
    )
    await raw.execute(
        "INSERT INTO dl_jobs (job_id, queue, task, lock_key, keyed, lane, status, token, lease_expires_at)"
        " SELECT gen_random_uuid(), 'q', 'closed', 'k', false, 'closed', 'running', i, now() + interval '1 h'"
        " FROM generate_series(1, 5) AS i"
    )
    await raw.execute(
        "INSERT INTO dl_source_calls (source, at, n) SELECT 's', now() - make_interval(secs => 3e3 - i / 10.0), i"
        " FROM generate_series(1, 20000) AS i"
    )
    await raw.execute("UPDATE dl_sources SET last_n = 20000, last_at = now() WHERE source = 's'")
    assert await read(CLAIM, ["closed", "open"]) < 100
    assert await read(TAKE) < 20


@pytest.mark.slow
@pytest.mark.requirement("S1")
async def test_in_a_backlog_claims_of_a_lane_do_not_read_claimed_jobs_again(limited, raw, database):
    """While a session holds an old snapshot, the entries of claimed jobs stay in the index."""
    tasks = Tasks()
    tasks.task("open", queue="q", max_running=100_000)(noop)
    await limited(tasks)
    await raw.execute(
        "INSERT INTO dl_jobs (job_id, queue, task, lock_key, keyed, lane)"
        " SELECT gen_random_uuid(), 'q', 'open', 'k', false, 'open' FROM generate_series(1, 4000)"
    )

    async def pages():
        [plan] = await raw.fetch("EXPLAIN (ANALYZE, BUFFERS, FORMAT json) " + CLAIM.replace("$1", "'{open}'"))
        buffers = json.loads(plan["QUERY PLAN"])[0]["Plan"]
        return buffers["Shared Hit Blocks"] + buffers["Shared Read Blocks"]

    async with raw_connection(database.dsn) as other:
        await other.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        await other.fetch("SELECT FROM dl_jobs LIMIT 1")
        # Some begin at the front again, and the first ones make their plans.
        seen = [await pages() for _ in range(300)]
        await other.execute("ROLLBACK")
    assert min(seen[-10:]) < 2 * min(seen[:20]), seen
    assert await raw.fetchval("SELECT count(*) FROM dl_jobs WHERE status = 'running'") == 3_000


@pytest.mark.slow
@pytest.mark.requirement("S1")
@pytest.mark.parametrize("seed", range(5))
async def test_claims_of_a_lane_skip_no_job_before_the_point_where_they_continue(limited, raw, database, seed):
    chance = random.Random(seed)
    tasks = Tasks()
    tasks.task("open", queue="q", max_running=100_000)(noop)
    await limited(tasks)
    await raw.execute(
        "INSERT INTO dl_jobs (job_id, queue, task, lock_key, keyed, lane, priority)"
        " SELECT gen_random_uuid(), 'q', 'open', 'k', false, 'open', 10 + i % 50 FROM generate_series(1, 200) AS i"
    )
    some = "(SELECT job_id FROM dl_jobs WHERE status = '{}' ORDER BY random() LIMIT 3)"
    changes = (
        f"UPDATE dl_jobs SET status = 'queued' WHERE job_id IN {some.format('running')}",
        f"UPDATE dl_jobs SET priority = (random() * 80)::int WHERE job_id IN {some.format('queued')}",
        f"DELETE FROM dl_jobs WHERE job_id IN {some.format('running')}",
        """INSERT INTO dl_jobs (job_id, queue, task, lock_key, keyed, lane, priority)
        SELECT gen_random_uuid(), 'q', 'open', 'k', false, 'open', (random() * 80)::int FROM generate_series(1, 3)""",
    )
    begun = 0
    async with raw_connection(database.dsn) as other:
        for turn in range(1_000):
            waiting = await raw.fetchval("SELECT count(*) FROM dl_jobs WHERE status = 'queued'")
            if not waiting:
                break
            rows = await chance.choice([raw, other]).fetch(CLAIM, ["open"])
            started = sum(row["verdict"] == "run" for row in rows)
            [lane] = [row for row in rows if row["verdict"] == "lane"]
            assert started > 0, "something waits"
            assert lane["waited_s"] is not None or started == waiting, "then the lane is worth another look"
            begun += started
            if turn < 100:
                await raw.execute(chance.choice(changes))
    assert waiting == 0
    assert begun >= 200


@pytest.mark.requirement("S1")
async def test_a_claim_of_another_service_knows_no_limit_and_counts(limited, claims, raw):
    await raw.execute(
        "INSERT INTO dl_jobs (job_id, queue, task, lock_key) SELECT gen_random_uuid(), 'q', 't', 'k' || i"
        " FROM generate_series(1, 4) AS i"
    )
    tasks = Tasks()
    tasks.task("t", queue="q", max_running=3)(noop)
    await limited(tasks)
    await raw.execute(
        "UPDATE dl_jobs SET status = 'running', lease_expires_at = now() + interval '1 h'"
        " WHERE job_id IN (SELECT job_id FROM dl_jobs LIMIT 2)"
    )
    await claims("t")  # moves the ready ones into the lane
    assert len((await claims("t"))[0]) == 1


@pytest.mark.slow
@pytest.mark.requirement("S1")
async def test_the_first_batch_starts_immediately_and_the_next_after_its_end_and_the_pause(limited, claims, raw):
    tasks = Tasks()
    tasks.task("t", queue="q", batch_size=2, batch_delay_s=60)(noop)
    await limited(tasks, [NewJob(task="t") for _ in range(5)])
    assert len((await claims("t"))[0]) == 2
    assert await claims("t") == ([], {"t": ("batch", None)})
    await raw.execute("UPDATE dl_jobs SET status = 'succeeded', finished_at = now() WHERE status = 'running'")
    jobs, lanes = await claims("t")
    assert (jobs, lanes["t"][0]) == ([], "batch")
    assert 59 < lanes["t"][1] <= 60
    await raw.execute("UPDATE dl_lanes SET idle_since = idle_since - interval '60 s'")
    assert len((await claims("t"))[0]) == 2


@pytest.mark.slow
@pytest.mark.requirement("S1")
async def test_the_pause_after_a_batch_begins_with_its_end_also_if_nothing_waits_then(limited, claims, raw):
    tasks = Tasks()
    tasks.task("t", queue="q", batch_size=2, batch_delay_s=60)(noop)
    await limited(tasks, [NewJob(task="t")])
    assert len((await claims("t"))[0]) == 1
    assert await claims("t") == ([], {"t": ("empty", None)})
    assert await raw.fetchval("SELECT idle_since FROM dl_lanes WHERE lane = 't'") is None, "one runs"
    await raw.execute("UPDATE dl_jobs SET status = 'succeeded', finished_at = now() WHERE status = 'running'")
    assert await claims("t") == ([], {"t": ("empty", None)})
    await raw.execute("UPDATE dl_lanes SET idle_since = idle_since - interval '60 s' WHERE lane = 't'")
    assert await claims("t") == ([], {"t": ("empty", None)})
    await limited(tasks, [NewJob(task="t")])
    assert len((await claims("t"))[0]) == 1


@pytest.mark.requirement("S4")
async def test_the_request_of_a_load_that_died_counts_until_a_span_after_its_slot(limited, claims, store, raw):
    await limited(supplied([RateLimit(1, per_s=3_600)], "t"), [NewJob(task="t")])
    assert (await store.write(aio_take_slot, "s", 1, 60)).waits_for is None
    await raw.execute("UPDATE dl_sources SET held_until = clock_timestamp() - interval '1 ms'")
    jobs, lanes = await claims("t")
    assert (jobs, lanes["t"][0]) == ([], "budget")
    assert 3_590 < lanes["t"][1] < 3_601
    taken = await raw.fetchrow("SELECT why, wait_s FROM dl_supplier_take('s', 1)")
    assert (taken["why"], taken["wait_s"] > 3_590) == ("budget", True)
    assert (await store.write(aio_take_slot, "s", 1, 60)).waits_for == "budget", "not even the same run"
    await raw.execute("UPDATE dl_sources SET holder = NULL, held_until = NULL, last_n = 0; DELETE FROM dl_source_calls")
    assert len((await claims("t"))[0]) == 1


@pytest.mark.requirement("S4")
async def test_an_open_lane_whose_jobs_another_claim_has_locked_is_worth_a_look_soon(limited, claims, raw):
    tasks = Tasks()
    for name in ("a", "b"):
        tasks.task(name, queue="q", work_periods="DAILY 00:00-24:00")(noop)
    await limited(tasks, [NewJob(task=name) for name in ("a", "a", "b", "b")])
    await raw.execute("BEGIN")
    await raw.fetch(CLAIM.replace("10, 10", "2, 2"), ["a", "b"])
    assert await claims("a", "b") == ([], {"a": (None, 0.05), "b": (None, 0.05)})
    await raw.execute("ROLLBACK; SELECT pg_advisory_unlock_all()")
    assert len((await claims("a", "b"))[0]) == 4

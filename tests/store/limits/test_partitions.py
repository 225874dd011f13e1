"""Concurrency limits of partitions, and round-robin for waiting ones (S1, S4)."""

from __future__ import annotations

import random
import string
from collections import Counter

import pytest
import trio
from databases import raw_connection

from dataloader import Tasks
from dataloader.store.limits.limit_rows import aio_declare_limits
from dataloader.store.queue.task_rows import aio_declare

pytestmark = pytest.mark.requirement("S1", "S4")

ADD = """
INSERT INTO dl_jobs (job_id, queue, task, lock_key, keyed, lane, partition_key, priority)
SELECT gen_random_uuid(), 'q', 't', 'k', false, 't', $1, 100 FROM generate_series(1, $2)
"""
CLAIM = "SELECT * FROM dl_claim_known('q', 20, $1, 'w', '{t}', '{}', 30, '{}', NULL, '{t}', '{t}')"
END = "UPDATE dl_jobs SET status = 'succeeded', finished_at = now() WHERE job_id = $1"
READ = """
SELECT sum(seq_tup_read + coalesce(idx_tup_fetch, 0))::int FROM pg_stat_xact_user_tables
WHERE relname IN ('dl_jobs', 'dl_job_events')
"""


@pytest.fixture
def declared(store):
    """Return a function that declares the task `t` with these limits."""

    async def declared(**limits):
        tasks = Tasks()
        tasks.task("t", queue="q", **limits)(noop)
        await store.write(aio_declare, tasks.values(), "test")
        await store.write(aio_declare_limits, tasks.values(), tasks.suppliers)

    return declared


async def noop(_job): ...


async def claim(raw, slots):
    """Claim jobs; return the started ones as (job_id, partition), and the time until the lane should be read again."""
    rows = await raw.fetch(CLAIM, slots)
    started = [(row["job_id"], row["partition_key"]) for row in rows if row["verdict"] == "run"]
    return started, [(row["args"], row["waited_s"]) for row in rows if row["verdict"] == "lane"]


async def test_waiting_partition_keys_are_served_round_robin(raw, declared):
    await declared(max_running_per_partition=1)
    for key, number in (("b", 50), ("", 3), ("a", 3), ("c", 3)):
        await raw.execute(ADD, key, number)
    turns = []
    for _ in range(12):
        [(job, key)], _ = await claim(raw, 1)
        turns.append(key)
        await raw.execute(END, job)
    assert turns == ["", "a", "b", "c"] * 3
    [(job, key)], lanes = await claim(raw, 5)
    assert (key, lanes) == ("b", [(None, None)])  # until an end notifies
    assert await claim(raw, 5) == ([], [(None, None)])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
async def test_no_partition_exceeds_its_limit_and_no_usable_slot_stays_free(raw, declared, seed):
    chance = random.Random(seed)
    each, most = chance.choice([1, 2, 3]), chance.choice([None, 7])
    await declared(max_running_per_partition=each, max_running=most)
    waiting, running, passed = Counter(), {}, Counter()
    for _ in range(60):
        for _ in range(chance.randrange(3)):
            key, number = chance.choice("aaaaabcdefgh"), chance.randrange(1, 6)
            await raw.execute(ADD, key, number)
            waiting[key] += number
        slots = chance.choice([1, 2, 5, 20])
        busy = Counter(running.values())
        room = {key: min(number, each - busy[key]) for key, number in waiting.items() if number and each > busy[key]}
        can = min(slots, sum(room.values()), slots if most is None else most - len(running))
        started, _ = await claim(raw, slots)
        assert len(started) == can
        for job, key in started:
            running[job] = key
            waiting[key] -= 1
        assert max(Counter(running.values()).values(), default=0) <= each
        # Each other key passes over a waiting key that has room at most once.
        had = {key for _, key in started}
        for key in "abcdefgh":
            for other in "abcdefgh":
                passed[key, other] = passed[key, other] + (other in had) if key in room and key not in had else 0
                assert passed[key, other] <= 1, (key, other)
        for job in chance.sample(sorted(running), chance.randrange(len(running) + 1)):
            await raw.execute(END, job)
            del running[job]


async def test_concurrent_claims_start_no_more_of_a_partition_than_its_limit(raw, declared, database):
    await declared(max_running_per_partition=2)
    for key in "abc":
        await raw.execute(ADD, key, 30)
    found = []

    async def ask():
        async with raw_connection(database.dsn) as other:
            for _ in range(5):
                started, _ = await claim(other, 3)
                found.extend(key for _, key in started)

    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(ask)
    assert Counter(found) == {"a": 2, "b": 2, "c": 2}


@pytest.mark.slow
async def test_a_claim_reads_no_more_rows_because_one_partition_has_most_of_them(raw, declared):
    await declared(max_running_per_partition=1)
    for table in ("dl_jobs", "dl_job_events"):
        await raw.execute(f"ALTER TABLE {table} SET (autovacuum_enabled = off)")
    await raw.execute("VACUUM ANALYZE dl_jobs")

    async def read():
        await raw.execute("BEGIN")
        before = await raw.fetchval(READ)
        started, _ = await claim(raw, 10)
        rows = await raw.fetchval(READ) - before
        await raw.execute("ROLLBACK")
        return rows, len(started)

    for _ in range(6):
        await read()
    await raw.execute(ADD, "p050", 20_000)
    for number in range(100):
        await raw.execute(ADD, f"p{number:03}", 3)
    rows, started = await read()
    assert (rows < 100, started) == (True, 10), rows
    await raw.execute("UPDATE dl_lanes SET last_partition = 'p049'")
    rows, started = await read()
    assert (rows < 100, started) == (True, 10), rows


async def test_a_partition_key_of_any_length_gets_its_turn_and_delays_no_other(raw, declared):
    await declared(max_running_per_partition=1)
    chance = random.Random(1)
    long, other = ("".join(chance.choices(string.printable, k=9_000)) for _ in range(2))
    # As other services write rows: ready, until a claim has moved them into the lane.
    unfiled = ADD.replace("lane, ", "").replace("'t', $1", "$1")
    for key in (long, other, long, ""):
        await raw.execute(unfiled, key, 1)
    assert await claim(raw, 5) == ([], [("empty", None)])
    started, _ = await claim(raw, 5)
    assert sorted(key for _, key in started) == sorted([long, other, ""])
    assert await claim(raw, 5) == ([], [(None, None)])


async def test_a_key_whose_first_job_can_not_start_is_looked_at_again_for_its_others(raw, declared):
    await declared(max_running_per_partition=1)
    keyed = ADD.replace("'k', false", "$3, true")
    await raw.execute(keyed, "a", 1, "held")
    [(first, _)], _ = await claim(raw, 5)
    await raw.execute(keyed, "b", 1, "held")
    await raw.execute(keyed, "b", 1, "free")
    assert await claim(raw, 5) == ([], [(None, 0)])
    [(second, _)], lanes = await claim(raw, 5)
    assert lanes == [(None, None)]
    await raw.execute(END, first)
    await raw.execute(END, second)


async def test_a_partition_key_whose_jobs_are_locked_is_checked_again_without_a_notice(raw, declared, database):
    await declared(max_running_per_partition=1)
    await raw.execute(ADD, "a", 1)
    async with raw_connection(database.dsn) as other:
        await other.execute("BEGIN")
        await other.execute("SELECT FROM dl_jobs FOR UPDATE")
        assert await claim(raw, 5) == ([], [(None, 0.05)])
        await other.execute("ROLLBACK")
    started, _ = await claim(raw, 5)
    assert [key for _, key in started] == ["a"]

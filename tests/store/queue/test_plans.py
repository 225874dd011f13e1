"""The regular statements of a worker read no more rows if more jobs wait, are parked or have ended (Q6)."""

from __future__ import annotations

import contextlib
import json
import math
import re
from datetime import UTC, datetime
from uuid import UUID

import pytest
from databases import raw_connection

from dataloader.jobs.model import NewJob
from dataloader.jobs.outcomes import Outcome
from dataloader.jobs.states import Step
from dataloader.store.connection.bridge import Session
from dataloader.store.limits.unknown_blocks import file_block
from dataloader.store.queue import enqueue, finish, job_inserts, leases, lock_session, make_ready, plain_claim, poll

ROUNDS = 2

# With idempotency keys: a new entry behind a million NULLs would be in the last leaf, which the server caches and finds
# without descending the tree. `soon` is the job that the stager finds next.
WORK = """
INSERT INTO dl_jobs (job_id, queue, task, lock_key, idempotency_key, priority)
  SELECT gen_random_uuid(), 'q', 't', 'ready ' || i, 'ready ' || i, i % 7 FROM generate_series(1, 200) AS i;
INSERT INTO dl_jobs (job_id, queue, task, lock_key, keyed, idempotency_key, priority)
  SELECT gen_random_uuid(), 'keyless', 't', 'ready ' || i, false, 'keyless ' || i, i % 7
  FROM generate_series(1, 200) AS i;
INSERT INTO dl_jobs (job_id, queue, task, lock_key, idempotency_key, status, claimed_by, lease_expires_at, token)
  SELECT gen_random_uuid(), 'q', 't', 'live ' || i, 'live ' || i, 'running', 'w', now() + interval '1 hour', i
  FROM generate_series(1, 20) AS i;
INSERT INTO dl_jobs (job_id, queue, task, lock_key, idempotency_key, status, claimed_by, lease_expires_at, token)
  SELECT gen_random_uuid(), 'q', 't', 'expired ' || i, 'expired ' || i, 'running', 'x', now() - interval '1 hour', i
  FROM generate_series(1001, 1020) AS i;
INSERT INTO dl_jobs (job_id, queue, task, lock_key, idempotency_key, waits_for)
  SELECT gen_random_uuid(), 'q', 'u', 'unknown ' || i, 'unknown ' || i, 'task' FROM generate_series(1, 20) AS i;
INSERT INTO dl_jobs (job_id, queue, task, lock_key, idempotency_key, waits_for)
  SELECT gen_random_uuid(), 'q', 't', 'parked ' || i, 'parked ' || i, 'lock' FROM generate_series(1, 20) AS i;
-- Its key's hash is less than all others, so who looks for the first parked job finds it, and none of what was deleted.
INSERT INTO dl_jobs (job_id, queue, task, lock_key, waits_for)
  VALUES (gen_random_uuid(), 'q', 't', 'parked 762779', 'lock');
INSERT INTO dl_jobs (job_id, queue, task, lock_key, available_at)
  VALUES (gen_random_uuid(), 'q', 't', 'soon', now() + interval '30 min');
SET session_replication_role = replica; -- rows that fell due since, as time does it: without our triggers
INSERT INTO dl_jobs (job_id, queue, task, lock_key, idempotency_key, waits_for, available_at)
  SELECT gen_random_uuid(), 'q', 't', 'due ' || i, 'due ' || i, 'time', now() - interval '1 s'
  FROM generate_series(1, 20) AS i;
SET session_replication_role = origin;
"""
BACKLOG = """
INSERT INTO dl_jobs (job_id, queue, task, lock_key, available_at)
  SELECT gen_random_uuid(), 'q', 't', 'later ' || i, now() + interval '1 d' FROM generate_series(1, {number} / 3) AS i;
INSERT INTO dl_jobs (job_id, queue, task, lock_key, status, finished_at)
  SELECT gen_random_uuid(), 'q', 't', 'live ' || i % 20, 'succeeded', now() FROM generate_series(1, {number} / 3) AS i;
INSERT INTO dl_jobs (job_id, queue, task, lock_key, waits_for, priority)
  SELECT gen_random_uuid(), 'q', 't', 'parked 1', 'lock', 200 FROM generate_series(1, {number} / 3) AS i;
INSERT INTO dl_jobs (job_id, queue, task, lock_key, status, claimed_by, lease_expires_at, token)
  SELECT gen_random_uuid(), 'q', 't', 'running ' || i, 'running', 'z', now() + interval '2 h', i
  FROM generate_series(1, {number} / 10) AS i;
INSERT INTO dl_jobs (job_id, queue, task, lock_key, keyed, status, claimed_by, lease_expires_at, token)
  SELECT gen_random_uuid(), 'keyless', 't', 'none ' || i, false, 'running', 'z', now() + interval '2 h',
         {number} + i
  FROM generate_series(1, {number} / 10) AS i;
"""
# Jobs that cannot run. They are older than WORK, and delayed or parked ones are as urgent, so a statement that does not
# exclude them reads them first. Their keys are also those of claims and releases.
MILLION = [
    """
    INSERT INTO dl_jobs (job_id, queue, task, lock_key, producer, created_at, status, finished_at)
      SELECT {id}, 'q', 't', 'ready ' || i % 200, 'backlog', {then},
             (CASE WHEN i % 4 > 0 THEN 'succeeded' WHEN i % 8 = 0 THEN 'failed' ELSE 'canceled' END)::dl_status, {then}
      FROM generate_series(1, 400000) AS i
    """,
    """
    INSERT INTO dl_jobs (job_id, queue, task, lock_key, producer, created_at, priority, waits_for, available_at)
      SELECT {id}, 'q', 't', 'later ' || i, 'backlog', {then}, i % 7, 'time', now() + make_interval(secs => 3600 + i)
      FROM generate_series(400001, 700000) AS i
    """,
    """
    INSERT INTO dl_jobs (job_id, queue, task, lock_key, producer, created_at, priority, waits_for)
      SELECT {id}, 'q', 't', 'one of many ' || i, 'backlog', {then}, i % 7, 'lock'
      FROM generate_series(700001, 850000) AS i
    """,
    """
    INSERT INTO dl_jobs (job_id, queue, task, lock_key, producer, created_at, priority, waits_for)
      SELECT {id}, 'q', 't', 'parked 1', 'backlog', {then}, 200, 'lock' FROM generate_series(850001, 1000000) AS i
    """,
]
SQL_OF_ROW = {
    "id": "('01900000-0000-7000-8000-' || lpad(to_hex(i), 12, '0'))::uuid",
    "then": "now() - make_interval(secs => 1e7 - i)",
}


def literal(value):
    """Return a value as SQL text."""
    if value is None:
        return "NULL"
    if isinstance(value, list | tuple):
        return literal(f"{{{','.join(map(element, value))}}}")
    return "'" + str(value).replace("'", "''") + "'"


def element(value):
    """Return a value as an element of an array's text."""
    if isinstance(value, bytes):
        value = f"\\x{value.hex()}"
    return "NULL" if value is None else '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'


class Measuring:
    """Connection on which each statement is first explained, with its buffers counted, and rolled back."""

    def __init__(self, connection):
        self._connection = connection
        self.blocks = 0

    async def fetch(self, sql, *args, **_options):
        # By EXECUTE, so that the plan is the generic one of a session; values are literals there.
        await self._connection.execute(f"PREPARE measured AS {sql}")
        values = f"({', '.join(map(literal, args))})" if args else ""
        with contextlib.suppress(ZeroDivisionError):
            async with self._connection.transaction():
                text = await self._connection.fetchval(
                    f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) EXECUTE measured{values}"
                )
                plan = json.loads(text)[0]["Plan"]
                self.blocks += plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
                raise ZeroDivisionError
        await self._connection.execute("DEALLOCATE measured")
        return await self._connection.fetch(sql, *args)

    async def fetchval(self, sql, *args):
        rows = await self.fetch(sql, *args)
        return rows[0][0] if rows else None

    async def execute(self, sql, *args):
        await self.fetch(sql, *args)
        return "UPDATE 0"


async def live_runs(connection):
    """Return ten of them, or, if there is none, an unknown one."""
    return await connection.fetch(
        "SELECT job_id, token FROM dl_jobs WHERE status = 'running' AND lease_expires_at > now()"
        " ORDER BY lease_expires_at, token LIMIT 10"
    ) or [{"job_id": UUID(int=0), "token": -1}]


async def look(connection, measuring):
    """Run the SELECT of dl_claim_known that picks the candidates separately."""
    source = await connection.fetchval("SELECT prosrc FROM pg_proc WHERE proname = 'dl_claim_known'")
    [candidates] = re.findall(r"picked AS MATERIALIZED \((.*?)\n    \), placed AS", source, re.DOTALL)
    for place, parameter in enumerate(("p_queue", "p_limited", "p_limit", "p_tasks"), 1):
        candidates = candidates.replace(parameter, f"${place}")
    for variable, kind in (("v_priority", "int"), ("v_created_at", "timestamptz"), ("p_after", "uuid")):
        candidates = candidates.replace(variable, f"NULL::{kind}")
    await connection.execute("SET LOCAL enable_bitmapscan = off")
    await measuring.fetch(candidates, "q", [], 50, ["t"])


async def claim(connection, measuring, jobs=10, after=None):
    await measuring.fetch(lock_session._CLAIM, "q", jobs, jobs, "w", ["t"], [1, 2, 3], 30.0, [4, 5, 6], after, [], [])
    await connection.execute("SELECT pg_advisory_unlock_all()")


async def claim_keyless(_connection, measuring, jobs=10):
    await measuring.fetch(lock_session._CLAIM, "keyless", jobs, jobs, "w", ["t"], [1, 2, 3], 30.0, [], None, [], [])


async def claim_plain(_connection, measuring, jobs=10, after=None):
    await measuring.fetch(plain_claim._CLAIM, "keyless", jobs, "w", ["t"], after, [])


async def claim_plain_behind(connection, measuring):
    first = "SELECT job_id FROM dl_jobs WHERE queue = 'keyless' AND status = 'queued' ORDER BY priority LIMIT 1"
    await claim_plain(connection, measuring, after=await connection.fetchval(first) or UUID(int=0))


async def claim_fifty(connection, measuring):
    await claim(connection, measuring, 50)


async def claim_fifty_keyless(connection, measuring):
    await claim_keyless(connection, measuring, 50)


async def claim_fifty_plain(connection, measuring):
    await claim_plain(connection, measuring, 50)


async def fail_all(connection, measuring):
    runs = await live_runs(connection)
    await finish.aio_finish(measuring, [Outcome(row["job_id"], row["token"], Step.FAIL) for row in runs])


async def finish_all(connection, measuring):
    await finish.aio_finish(
        measuring, [Outcome(row["job_id"], row["token"], Step.SUCCEED) for row in await live_runs(connection)]
    )


async def move_all(connection, measuring):
    runs = await live_runs(connection)
    await finish.aio_finish(measuring, [Outcome(row["job_id"], row["token"], Step.MOVE, to="u") for row in runs])


async def beat(connection, measuring):
    await leases.aio_beat(measuring, [(row["job_id"], row["token"], False) for row in await live_runs(connection)])


async def show_progress(connection, measuring):
    rows = await live_runs(connection)
    await finish.aio_show_progress(measuring, [(row["job_id"], row["token"], '{"n": 1}') for row in rows])


async def keep_lines(connection, measuring):
    rows = await live_runs(connection)
    await finish.aio_keep_lines(measuring, [(row["job_id"], row["token"], datetime.now(UTC), "{}") for row in rows])


async def revive(connection, measuring):
    await leases.aio_revive(measuring, [(row["job_id"], row["token"]) for row in await live_runs(connection)])


async def reap(_connection, measuring):
    await leases._aio_reap(measuring, 10, None, math.inf, leases.MAX_ENDLESS)


async def release(connection, measuring):
    hashes = await connection.fetchval("SELECT array_agg(hashtext('parked ' || i)) FROM generate_series(1, 10) AS i")
    await measuring.fetch(lock_session._RELEASE, hashes)


async def unpark(connection, measuring):
    hashes = await connection.fetchval("SELECT array_agg(hashtext('parked ' || i)) FROM generate_series(1, 10) AS i")
    await make_ready.aio_unpark(measuring, hashes)


async def sweep(_connection, measuring):
    await make_ready._aio_ready_free(measuring, make_ready.KEYS)


async def ready_due(_connection, measuring):
    await make_ready._aio_ready_due(measuring, make_ready.BATCH)


async def poll_all(_connection, measuring):
    await poll._aio_poll(measuring, ["q", "keyless", "none"], ["lane", "t"], ["t", "u"])


async def look_for_parked(_connection, measuring):
    await poll._aio_look_for_parked(measuring)


async def add(_connection, measuring):
    jobs = [NewJob(queue="q", task="t", idempotency_key=f"key {n}") for n in range(10)]
    rows = [enqueue.row_of(job, 60) for job in jobs]
    await enqueue._aio_add(measuring, jobs, rows, rows)


async def add_started(_connection, measuring):
    rows = [enqueue.row_of(NewJob(queue="q", task="t", idempotency_key=f"key {n}"), 60) for n in range(10)]
    await job_inserts.aio_insert_started(measuring, rows, ["q"] * 10, "w")


OPERATIONS = [
    claim,
    claim_keyless,
    claim_plain,
    claim_plain_behind,
    finish_all,
    fail_all,
    move_all,
    beat,
    show_progress,
    reap,
    release,
    unpark,
    sweep,
    ready_due,
    poll_all,
    look_for_parked,
    add,
    add_started,
]
# Without the sweep, which checks each key once: there are many more keys among the million.
BY_SESSIONS = [
    look,
    claim_fifty,
    claim_fifty_keyless,
    claim_fifty_plain,
    finish_all,
    fail_all,
    beat,
    show_progress,
    release,
]
BY_THE_POOL = [reap, unpark, ready_due, poll_all, look_for_parked, add, add_started]


async def measure(connection, operations=OPERATIONS):
    """Return, for each operation, the buffers of its last execution, and the scans of a whole table in all of them."""
    blocks, scans = {}, {}
    await connection.execute("VACUUM ANALYZE dl_jobs")
    for operation in operations:
        for _ in range(ROUNDS):
            measuring = Measuring(connection)
            transaction = connection.transaction()
            await transaction.start()
            await operation(connection, measuring)
            scans[operation.__name__] = await connection.fetchval(
                "SELECT sum(seq_scan) FROM pg_stat_xact_user_tables WHERE relname IN ('dl_jobs', 'dl_job_events')"
            )
            await transaction.rollback()
        blocks[operation.__name__] = measuring.blocks
    return blocks, scans


@pytest.mark.slow
@pytest.mark.requirement("Q6")
@pytest.mark.requirement("Q7")
async def test_fifty_thousand_more_jobs_that_wait_run_or_have_ended_cost_nothing(store, raw):
    session = Session(store, "plans")
    await raw.execute(WORK)
    # Enough jobs that most indexes have their final depth: one more level is one more page for each probe.
    await raw.execute(BACKLOG.format(number=5_000))
    before, scans = await session.write(measure)
    assert not any(scans.values()), scans
    await raw.execute(BACKLOG.format(number=50_000))
    after, scans = await session.write(measure)
    assert not any(scans.values()), scans
    costly = {name: (before[name], after[name]) for name in before if after[name] > 1.1 * before[name] + 80}
    assert not costly
    assert after["claim_keyless"] < after["claim"], "a job without a key pays for one"
    assert after["claim_plain"] < after["claim_keyless"], "the plain claim costs more than the general one"
    await session.close()


ADD = "SELECT dl_enqueue('t', queue => 'q', idempotency_key => gen_random_uuid()::text)"
ADD_AFTER = "SELECT dl_enqueue('t', queue => 'q', after => ARRAY[$1]::uuid[])"


async def add_by_function(_connection, measuring):
    first = await measuring.fetchval(ADD)
    await measuring.fetchval(ADD_AFTER, first)


async def add_after(_connection, measuring):
    first = NewJob(queue="q", task="t")
    jobs = [first, NewJob(queue="q", task="t", after=[first.job_id])]
    rows = [enqueue.row_of(job, 60) for job in jobs]
    await enqueue._aio_add(measuring, jobs, rows, rows)


async def judge(connection, measuring):
    await add_after(connection, measuring)
    await make_ready._aio_ready_after(measuring, 100, True)


OFTEN = [*OPERATIONS, keep_lines, revive, add_after, judge, add_by_function]


async def rows_read(connection):
    """Return the number of rows of jobs and events that this transaction has read, by an index or without one."""
    return await connection.fetchval(
        "SELECT sum(seq_tup_read + coalesce(idx_tup_fetch, 0))::int FROM pg_stat_xact_user_tables"
        " WHERE relname IN ('dl_jobs', 'dl_job_events')"
    )


async def read_by(connection, operations):
    """Return, for each operation, the number of rows that it reads; its writes are rolled back."""
    counted = {}
    for operation in operations:
        transaction = connection.transaction()
        await transaction.start()
        before = await rows_read(connection)
        await operation(connection, connection)
        counted[operation.__name__] = await rows_read(connection) - before
        await transaction.rollback()
    return counted


@pytest.mark.slow
@pytest.mark.requirement("Q6")
@pytest.mark.parametrize("whose", ["ours", "a user's"])
async def test_plans_that_were_made_while_the_tables_were_empty_serve_when_they_have_grown(database, store, raw, whose):
    """A vacuumed empty table has no page, so a scan of a whole index costs no more than one lookup."""
    await raw.execute("ALTER TABLE dl_jobs SET (autovacuum_enabled = off)")
    await raw.execute("ALTER TABLE dl_job_events SET (autovacuum_enabled = off)")
    await raw.execute("VACUUM ANALYZE dl_jobs")
    await raw.execute("VACUUM ANALYZE dl_job_events")
    async with raw_connection(database.dsn) as users:
        session = Session(store, "plans") if whose == "ours" else users
        operations = OFTEN if whose == "ours" else [add_by_function]
        for _ in range(6):  # the sixth plan of a function's statement may be the permanent one
            await session.run(read_by, operations)
        await raw.execute(WORK)
        await raw.execute(BACKLOG.format(number=3_000))
        counted = await session.run(read_by, operations)
        if isinstance(session, Session):
            await session.close()
    assert not {name: number for name, number in counted.items() if number > 1_000}, counted


async def add_the_million(raw):
    """Insert them quickly: without triggers, and with the indexes built afterwards."""
    indexes = await raw.fetch(
        "SELECT indexrelid::regclass::text AS name, pg_get_indexdef(indexrelid) AS definition"
        " FROM pg_index WHERE indrelid = 'dl_jobs'::regclass AND NOT indisunique"
    )
    await raw.execute("SET session_replication_role = replica; SET maintenance_work_mem = '256MB'")
    for index in indexes:
        await raw.execute(f"DROP INDEX {index['name']}")
    for statement in MILLION:
        await raw.execute(statement.format_map(SQL_OF_ROW))
    for index in indexes:
        await raw.execute(index["definition"])
    await raw.execute("VACUUM ANALYZE dl_jobs")


async def remove_the_million(raw):
    """Delete the jobs, but not their index entries, so that the trees keep their depth.

    Rows that measuring has left are removed first.
    """
    await raw.execute("VACUUM dl_jobs")
    await raw.execute("ALTER TABLE dl_jobs SET (vacuum_index_cleanup = off, vacuum_truncate = off)")
    await raw.execute("SET session_replication_role = replica")
    await raw.execute("DELETE FROM dl_jobs WHERE producer = 'backlog'")
    await raw.execute("VACUUM ANALYZE dl_jobs")


@pytest.mark.full
@pytest.mark.requirement("Q6")
@pytest.mark.requirement("Q7")
async def test_a_claim_touches_as_many_buffers_with_a_million_other_jobs_as_with_none(store, raw):
    """Count the buffers, hit and read, of whole statements: EXPLAIN (ANALYZE, BUFFERS) includes those of functions.

    The claim's read of its candidates uses the same number with none of those jobs, with a million, and after their
    deletion: it scans an index that does not contain them.

    A statement that writes a row also descends the trees of the indexes that contain them, and a tree of a million
    entries has three levels where a small one has one or two. So whole statements are compared with their buffers for
    none of those jobs *in trees of the same depth*, where the jobs were deleted and their entries remain: within 10 %.
    A scan of those entries would be as slow there. A table that never had them, with small trees, shows that there is
    no such scan: a statement uses less than twice the buffers of that table (a claim 1.2 times, an enqueue 1.4 times).
    """
    session = Session(store, "plans")

    async def buffers():
        of_sessions, scans = await session.write(measure, BY_SESSIONS)
        assert not any(scans.values()), scans
        of_the_pool, scans = await store.write(measure, BY_THE_POOL)
        assert not any(scans.values()), scans
        return of_sessions | of_the_pool

    for table in ("dl_jobs", "dl_job_events"):
        await raw.execute(f"ALTER TABLE {table} SET (autovacuum_enabled = off)")
    await raw.execute(WORK)
    none = await buffers()
    assert none["claim_fifty_keyless"] < none["claim_fifty"], "a job without a key pays for one"
    await add_the_million(raw)
    million = await buffers()
    await remove_the_million(raw)
    as_deep = await buffers()
    await session.close()
    assert none["look"] == million["look"] == as_deep["look"]
    differ = {name: (as_deep[name], n) for name, n in million.items() if abs(n - as_deep[name]) > 0.1 * as_deep[name]}
    assert not differ
    doubled = {name: (none[name], n) for name, n in million.items() if n >= 2 * none[name]}
    assert not doubled


async def claims(connection, after=None):
    """Return the fewest blocks that one of three claims reads."""
    counted = []
    for _ in range(3):
        async with connection.transaction():
            measuring = Measuring(connection)
            await claim(connection, measuring, after=after)
            counted.append(measuring.blocks)
    return min(counted)


@pytest.mark.slow
async def test_a_claim_that_continues_after_dead_entries_does_not_read_them(database, store, raw):
    add_some = (
        "INSERT INTO dl_jobs (job_id, queue, task, lock_key, created_at) SELECT gen_random_uuid(), 'q', 't', 'k' || n,"
        " now() - make_interval(mins => $2, secs => n / 1000.0) FROM generate_series(1, $1) AS n"
    )
    await raw.execute(add_some, 30, 1)
    free = await store.write(claims)
    async with raw_connection(database.dsn) as other:
        await other.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        await other.execute("SELECT count(*) FROM dl_jobs")
        await raw.execute(add_some, 20_000, 60)
        await raw.execute("UPDATE dl_jobs SET status = 'succeeded' WHERE created_at < now() - interval '30 minutes'")
        last = await raw.fetchval(
            "SELECT job_id FROM dl_jobs WHERE status = 'succeeded' ORDER BY created_at DESC, job_id DESC LIMIT 1"
        )
        assert await store.write(claims) > 3 * free
        assert await store.write(claims, last) < 1.5 * free


@pytest.mark.slow
@pytest.mark.requirement("Q6")
async def test_a_claim_behind_a_block_of_unknown_jobs_reads_as_much_as_without_one(store, raw):
    add_some = (
        "INSERT INTO dl_jobs (job_id, queue, task, lock_key, created_at) SELECT gen_random_uuid(), 'q', $1, 'k' || n,"
        " now() - make_interval(mins => $3, secs => n / 1000.0) FROM generate_series(1, $2::int) AS n"
    )
    await raw.execute("ALTER TABLE dl_jobs SET (autovacuum_enabled = off)")
    await raw.execute(add_some, "t", 40, 1)
    await raw.execute("VACUUM ANALYZE dl_jobs")
    free = await store.write(claims)
    await raw.execute("SET session_replication_role = replica")
    await raw.execute(add_some, "u", 20_000, 60)
    await raw.execute("VACUUM ANALYZE dl_jobs")
    last = await raw.fetchval("SELECT job_id FROM dl_jobs WHERE task = 't' ORDER BY created_at, job_id LIMIT 1")
    assert await store.write(claims) > 2 * free
    assert await store.write(claims, last) < 1.5 * free
    after = None
    while (filed := await file_block(store, "q", ["t"], after)).is_block:
        after = filed.last
    await raw.execute("VACUUM dl_jobs")
    assert await store.write(claims) < 1.5 * free

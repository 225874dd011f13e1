"""Nothing that a worker does all day reads more because more jobs wait, are parked or have ended (Q6)."""

from __future__ import annotations

import contextlib
import json

import pytest

from dataloader.jobs.model import NewJob
from dataloader.jobs.outcomes import Ending
from dataloader.jobs.states import Step
from dataloader.store import enqueue, leases, lock_session, outcomes, stage
from dataloader.store.database import Session

ROUNDS = 2

WORK = """
INSERT INTO dl_jobs (job_id, queue, task, lock_key, priority)
  SELECT gen_random_uuid(), 'q', 't', 'ready ' || i, i % 7 FROM generate_series(1, 200) AS i;
INSERT INTO dl_jobs (job_id, queue, task, lock_key, status, claimed_by, lease_expires_at, token)
  SELECT gen_random_uuid(), 'q', 't', 'live ' || i, 'running', 'w', now() + interval '1 hour', i
  FROM generate_series(1, 20) AS i;
INSERT INTO dl_jobs (job_id, queue, task, lock_key, status, claimed_by, lease_expires_at, token)
  SELECT gen_random_uuid(), 'q', 't', 'expired ' || i, 'running', 'x', now() - interval '1 hour', 1000 + i
  FROM generate_series(1, 20) AS i;
INSERT INTO dl_jobs (job_id, queue, task, lock_key, waits_for)
  SELECT gen_random_uuid(), 'q', 'u', 'unknown ' || i, 'task' FROM generate_series(1, 20) AS i;
INSERT INTO dl_jobs (job_id, queue, task, lock_key, waits_for)
  SELECT gen_random_uuid(), 'q', 't', 'parked ' || i, 'lock' FROM generate_series(1, 20) AS i;
SET session_replication_role = replica; -- rows that fell due since, as time does it: without our triggers
INSERT INTO dl_jobs (job_id, queue, task, lock_key, waits_for, available_at)
  SELECT gen_random_uuid(), 'q', 't', 'due ' || i, 'time', now() - interval '1 s' FROM generate_series(1, 20) AS i;
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
  SELECT gen_random_uuid(), 'q', 't', 'running ' || i, 'running', 'z', now() + interval '2 h', nextval('dl_token_seq')
  FROM generate_series(1, {number} / 10) AS i;
"""


def literal(value):
    """A value as SQL text."""
    if value is None:
        return "NULL"
    if isinstance(value, list | tuple):
        return literal(f"{{{','.join(map(element, value))}}}")
    return "'" + str(value).replace("'", "''") + "'"


def element(value):
    """A value within an array's text."""
    if isinstance(value, bytes):
        value = f"\\x{value.hex()}"
    return "NULL" if value is None else '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'


class Measuring:
    """A connection on which each statement is first explained, with its buffers counted, and undone."""

    def __init__(self, connection):
        self._connection = connection
        self.blocks = 0

    async def fetch(self, sql, *args):
        # By EXECUTE, so that the plan is the generic one that sessions have; values come as literals there.
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
    return await connection.fetch(
        "SELECT job_id, token FROM dl_jobs WHERE status = 'running' AND lease_expires_at > now()"
        " ORDER BY lease_expires_at, token LIMIT 10"
    )


async def claim(connection, measuring):
    await measuring.fetch(lock_session._CLAIM, "q", 10, 10, "w", ["t"], [1, 2, 3], 30.0, [4, 5, 6])
    await connection.execute("SELECT pg_advisory_unlock_all()")


async def finish(connection, measuring):
    await outcomes.aio_finish(
        measuring, [Ending(row["job_id"], row["token"], Step.SUCCEED) for row in await live_runs(connection)]
    )


async def beat(connection, measuring):
    await leases.aio_beat(measuring, [(row["job_id"], row["token"], False) for row in await live_runs(connection)])


async def show_progress(connection, measuring):
    rows = await live_runs(connection)
    await outcomes.aio_show_progress(measuring, [(row["job_id"], row["token"], '{"n": 1}') for row in rows])


async def reap(_connection, measuring):
    await leases._aio_reap(measuring, 10)


async def release(connection, measuring):
    hashes = await connection.fetchval("SELECT array_agg(hashtext('parked ' || i)) FROM generate_series(1, 10) AS i")
    await measuring.fetch(lock_session._RELEASE, hashes)


async def unpark(connection, measuring):
    hashes = await connection.fetchval("SELECT array_agg(hashtext('parked ' || i)) FROM generate_series(1, 10) AS i")
    await stage._aio_unpark(measuring, hashes)


async def sweep(_connection, measuring):
    await stage._aio_ready_free(measuring)


async def ready_due(_connection, measuring):
    await stage._aio_ready_due(measuring)


async def ready_known(_connection, measuring):
    await stage._aio_ready_known(measuring, ["q"], ["u"])


async def add(_connection, measuring):
    jobs = [NewJob(queue="q", task="t", idempotency_key=f"key {n}") for n in range(10)]
    rows = [enqueue._row(job, None, 60) for job in jobs]
    await enqueue._aio_add(measuring, jobs, rows, list(zip(*rows, strict=True)))


OPERATIONS = [claim, finish, beat, show_progress, reap, release, unpark, sweep, ready_due, ready_known, add]


async def measure(connection):
    """For each operation the buffers of its last execution, and the scans of a whole table in all of them."""
    blocks, scans = {}, {}
    await connection.execute("VACUUM ANALYZE dl_jobs")
    for operation in OPERATIONS:
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
    # So many that most indexes have the depth that they will have: a level more is a page more for each probe.
    await raw.execute(BACKLOG.format(number=5_000))
    before, scans = await session.write(measure)
    assert not any(scans.values()), scans
    await raw.execute(BACKLOG.format(number=50_000))
    after, scans = await session.write(measure)
    assert not any(scans.values()), scans
    costly = {name: (before[name], after[name]) for name in before if after[name] > 1.1 * before[name] + 80}
    assert not costly
    await session.close()

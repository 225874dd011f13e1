"""The cost of a step does not depend on the number of processes, tasks and events (P1, P3)."""

from __future__ import annotations

import json

import pytest

from dataloader.store.connection.bridge import Session
from dataloader.store.processes.requests import Request, aio_act, aio_ask, aio_ask_many, row_of_request
from dataloader.store.processes.steps import StepOutcome, Wakeup, aio_begin, aio_commit

pytestmark = pytest.mark.slow

# Processes that sleep, that have failed and that were removed, with all their requests and events.
CROWD = """
INSERT INTO dl_processes (type, process_id, status, metadata, last_event_id, timer_task, timer_kind, timer_at,
                          timer_attempt, job_id, error_group, removed_at)
  SELECT 'pay', 'crowd ' || i, (ARRAY['running', 'running', 'error'])[1 + i % 3], jsonb_build_object('n', i), 3, -i,
         'timeout', now() + interval '1 d', 0, gen_random_uuid(), i % 7, CASE WHEN i % 10 = 0 THEN now() END
  FROM generate_series(1, {number}) AS i;
INSERT INTO dl_process_tasks (key, type, kind, status, finished_at, idempotency_key)
  SELECT key, 'pay', 'call', 'finished', now(), 'crowd ' || key || '.' || n
  FROM dl_processes, generate_series(1, 3) AS n WHERE process_id LIKE 'crowd%';
INSERT INTO dl_process_events (key, event_id, task_id, payload)
  SELECT key, n, 1, '1' FROM dl_processes, generate_series(1, 3) AS n WHERE process_id LIKE 'crowd%';
INSERT INTO dl_jobs (job_id, queue, task, args, lock_key, keyed, available_at, waits_for)
  SELECT job_id, 'process.pay', 'process.pay.v1', jsonb_build_object('key', key), job_id::text, false, timer_at, 'time'
  FROM dl_processes WHERE process_id LIKE 'crowd%' AND removed_at IS NULL;
"""
# One of the measured processes has a long history.
PAST = """
INSERT INTO dl_process_tasks (key, type, kind, status, finished_at)
  SELECT key, 'pay', 'call', 'finished', now() FROM dl_processes, generate_series(1, {number}) WHERE process_id = 'p0';
INSERT INTO dl_process_events (key, event_id, task_id, payload)
  SELECT key, 10 + n, 1, '1' FROM dl_processes, generate_series(1, {number}) AS n WHERE process_id = 'p0';
UPDATE dl_processes SET last_event_id = 10 + {number} WHERE process_id = 'p0';
"""
CLAIM = """
UPDATE dl_jobs SET status = 'running', token = (random() * 1e15)::bigint + 1, claimed_by = 'w',
  lease_expires_at = now() + interval '60 s'
WHERE queue = 'process.pay' AND status = 'queued' AND waits_for IS NULL
RETURNING (args ->> 'key')::bigint AS key, job_id, token
"""
TABLES = ("dl_processes", "dl_process_tasks", "dl_process_events", "dl_jobs")
READ = f"""
SELECT sum(seq_tup_read + coalesce(idx_tup_fetch, 0))::int, sum(seq_scan)::int FROM pg_stat_xact_user_tables
WHERE relname IN ('{"', '".join(TABLES)}')
"""
PROCESSES = 16


class Measuring:
    """Connection that explains each statement before it runs it, and counts the buffers."""

    def __init__(self, connection):
        self.connection = connection
        self.blocks = 0

    async def fetch(self, sql, *args):
        savepoint = self.connection.transaction()
        await savepoint.start()
        text = await self.connection.fetchval(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {sql}", *args)
        plan = json.loads(text)[0]["Plan"]
        self.blocks += plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
        await savepoint.rollback()
        return await self.connection.fetch(sql, *args)

    async def fetchrow(self, sql, *args):
        return (await self.fetch(sql, *args))[0]


async def aio_measured(connection):
    """Return the buffers and rows of the statements of a life: requested, begun, committed with events and a timer."""
    found = {}

    async def measure(name, operation, *args):
        measuring = Measuring(connection)
        [before] = await connection.fetch(READ)
        result = await operation(measuring, *args)
        [after] = await connection.fetch(READ)
        found[name] = {"blocks": measuring.blocks, "rows": (after[0] or 0) - (before[0] or 0)}
        found[name]["scans"] = (after[1] or 0) - (before[1] or 0)
        return result

    for number in range(PROCESSES):
        request = Request(type="pay", process_id=f"p{number}", kind="call", method="m", key=f"key {number}")
        await measure("ask", aio_ask, request, 60)
    wakeups = [Wakeup(row["key"], row["job_id"], row["token"]) for row in await connection.fetch(CLAIM)]
    begun = await measure("begin", aio_begin, wakeups)
    assert {one.verdict for one in begun} == {"step"}
    steps = [
        StepOutcome(
            wakeup=wakeup, task_id=one.work.task_id, outcome="done", state='{"n": 1}', events='["a"]',
            following="timeout", after_s=900.0, response="1",
        )
        for wakeup, one in zip(wakeups, begun, strict=True)
    ]  # fmt: skip
    committed = await measure("commit", aio_commit, steps)
    assert {one.verdict for one in committed} == {"rest"}
    for kind, verdict in (("stop", "status"), ("resume", "status")):
        assert (await measure(kind, aio_act, "pay", "p1", kind, 60)).verdict == verdict
    # The job that waits for the timer becomes ready.
    request = Request(type="pay", process_id="p1", kind="call", method="m", key="again")
    assert (await measure("ask again", aio_ask, request, 60)).verdict == "added"
    requests = [
        Request(type="pay", process_id=f"p{number}", kind="call", method="m", key=f"together {number}")
        for number in range(PROCESSES)
    ]
    requests += [Request(type="pay", process_id=f"new {number}", kind="init", version=1) for number in range(4)]
    asked = await measure("ask together", aio_ask_many, [row_of_request(request) for request in requests], 60)
    assert [asked[place].verdict for place in range(len(requests))] == ["added"] * len(requests)
    await measure("remove", aio_act, "pay", "p1", "remove", 60)
    return found


async def aio_measured_and_undone(connection, rounds):
    """Measure several rounds and roll them back. Plans may change at the sixth execution, so the last round counts."""
    for _ in range(rounds):
        transaction = connection.transaction()
        await transaction.start()
        try:
            found = await aio_measured(connection)
        finally:
            await transaction.rollback()  # noqa: ASYNC102 - on asyncio, and never cancelled
    return found


@pytest.mark.requirement("P1", "P3")
async def test_a_step_reads_as_much_with_twenty_thousand_processes_as_with_none(store, raw):
    for table in TABLES:
        await raw.execute(f"ALTER TABLE {table} SET (autovacuum_enabled = off)")
    for number in range(PROCESSES):
        await raw.execute(
            "INSERT INTO dl_processes (type, process_id, status, last_event_id) VALUES ('pay', $1, 'running', 10)",
            f"p{number}",
        )
    session, early = Session(store, "plans"), Session(store, "early plans")
    for table in TABLES:
        await raw.execute(f"VACUUM ANALYZE {table}")
    # A session keeps its first plans, made while there are few rows or some. No table may be analyzed from here on,
    # since that would discard them.
    await early.run(aio_measured_and_undone, 7)
    await raw.execute(CROWD.format(number=500))
    before = await session.run(aio_measured_and_undone, 7)
    await raw.execute(CROWD.replace("crowd", "more").format(number=20_000))
    await raw.execute(PAST.format(number=20_000))
    after, of_early = [await one.run(aio_measured_and_undone, 2) for one in (session, early)]
    await session.close()
    await early.close()
    for costs in (after, of_early):
        assert not {name: cost for name, cost in costs.items() if cost["scans"]}
        rows = {name: (before[name]["rows"], cost["rows"]) for name, cost in costs.items()}
        assert all(now <= then + 2 for then, now in rows.values()), rows
    # Deeper trees: a page more for each probe.
    blocks = {name: (before[name]["blocks"], cost["blocks"]) for name, cost in after.items()}
    assert all(now <= 1.7 * then for then, now in blocks.values()), blocks

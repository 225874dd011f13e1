"""The cost of a page of a log, of runs or of loads does not grow with other rows."""

from __future__ import annotations

import json
from uuid import UUID

import pytest
from performers import performer_of
from watched_database import WatchedDatabase

from dataloader.jobs.client.loads import Loads
from dataloader.jobs.contract import Operator
from dataloader.jobs.errors import BadRequest
from dataloader.jobs.load_listings import MAX_COUNTED
from dataloader.store.etl import load_operations
from dataloader.store.queue import job_logs

# 20,000 runs of 20 loads with a failure in each; 30,000 log lines of one job, and the same number of other jobs.
HISTORY = """
INSERT INTO dl_jobs (job_id, queue, task, lock_key, status)
  SELECT ('01900000-0000-7000-8000-' || lpad(to_hex(i), 12, '0'))::uuid, 'q', 'load ' || i % 20, 'k' || i, 'succeeded'
  FROM generate_series(1, 20000) AS i;
INSERT INTO dl_etl_runs (run_id, name, kind, status, started_at)
  SELECT job_id, task, 'load', 'succeeded', now() + row_number() OVER (ORDER BY job_id) * interval '1 s' FROM dl_jobs;
INSERT INTO dl_etl_tasks (run_id, ordinal, task, status, started_at)
  SELECT run_id, 1, name, 'succeeded', started_at FROM dl_etl_runs;
INSERT INTO dl_etl_failures (run_id, load, segment, phase, key, error, solved_at)
  SELECT run_id, name, 'all', 'record', 'x', 'x', CASE WHEN name <> 'load 7' THEN now() END FROM dl_etl_runs;
INSERT INTO dl_job_events (job_id, queue, kind, payload)
  SELECT ('01900000-0000-7000-8000-' || lpad(to_hex(CASE WHEN i % 2 = 0 THEN 1 ELSE 1 + i % 20000 END), 12, '0'))::uuid,
         'q', 'log', '{"level": "info", "message": "x"}' FROM generate_series(1, 60000) AS i;
ANALYZE;
"""
JOB = UUID("01900000-0000-7000-8000-000000000001")


def rows_read(plan):
    """Return the number of rows that a plan's scans have read, whether they were needed or not."""
    own = plan["Actual Rows"] + plan.get("Rows Removed by Filter", 0)
    read = own * plan["Actual Loops"] if "Relation Name" in plan else 0
    return read + sum(map(rows_read, plan.get("Plans", [])))


def literal(value):
    if value is None:
        return "NULL"
    return f"'{{{','.join(value)}}}'" if isinstance(value, list) else f"'{value}'"


@pytest.fixture
async def cost(store, raw):
    """Return a function that returns the number of rows that one of our statements reads."""
    await raw.execute(HISTORY)

    async def cost(sql, *values):
        async def aio_explain(connection):
            # By EXECUTE, so that the plan is the generic one of our sessions.
            await connection.execute(f"DEALLOCATE ALL; PREPARE measured AS {sql}")
            arguments = ", ".join(map(literal, values))
            return await connection.fetchval(f"EXPLAIN (ANALYZE, FORMAT JSON) EXECUTE measured ({arguments})")

        return rows_read(json.loads(await store.run(aio_explain))[0]["Plan"])

    return cost


@pytest.mark.slow
@pytest.mark.requirement("E11", "E12")
async def test_a_page_reads_hardly_more_rows_than_it_has(store, cost):
    statements = []

    async def aio_note(_connection, sql, *values):
        statements.append((sql, values))

    loads = Loads(performer_of(WatchedDatabase(store, before=aio_note), Operator("w")))
    page = await loads.runs(limit=10)
    await loads.runs(limit=10, after=page.next)
    page = await loads.runs("load 7", limit=10)
    await loads.runs("load 7", limit=10, after=page.next)
    assert len(statements) == 4
    for sql, values in statements:
        assert await cost(sql, *values) <= 3 * 11, sql
    statements.clear()
    assert len((await loads.find(limit=10)).loads) == 10
    # For load 7, up to a thousand failures are counted.
    [(sql, values)] = statements
    assert await cost(sql, *values) <= MAX_COUNTED + 100
    load = f"WITH {load_operations._THIS} {load_operations._LOADS}"
    assert await cost(load, "load 7") <= MAX_COUNTED + 10
    assert await cost(load, "load 8") <= 10
    assert await cost(load_operations._TASKS, JOB, 0, 11) <= 3 * 11
    failures = load_operations._FAILURES.format
    assert await cost(failures(wanted="run_id = $1"), JOB, 11, 0) <= 11
    assert await cost(failures(wanted="load = $1 AND solved_at IS NULL"), "load 7", 11, 0) <= 1_000


@pytest.mark.slow
@pytest.mark.requirement("E11")
async def test_a_page_of_a_log_reads_its_lines_and_with_a_filter_so_many_as_it_may(cost):
    assert await cost(job_logs._LINES, JOB, 0, None, None, 11) == 11
    assert await cost(job_logs._LINES, JOB, 50_000, None, None, 11) == 11
    assert await cost(job_logs._LINES, JOB, 0, ["error"], None, 11) == job_logs.MAX_SCANNED


async def test_a_page_has_at_least_one_row_and_not_too_many(store, loads):
    for limit in (0, 1_001):
        for ask in (
            lambda limit=limit: job_logs.list_log(store, JOB, limit=limit),
            lambda limit=limit: loads.runs(limit=limit),
            lambda limit=limit: loads.timeline(JOB, limit=limit),
            lambda limit=limit: loads.find(limit=limit),
            lambda limit=limit: loads.failures_of_run(JOB, limit=limit),
            lambda limit=limit: loads.failures("x", limit=limit),
        ):
            with pytest.raises(BadRequest, match="limit"):
                await ask()

"""The cost of a page of runs: few statements, which read only the shown rows, whatever else exists (E11)."""

from __future__ import annotations

import json
from uuid import UUID

import pytest

from dataloader.store.etl import run_logs, run_views
from dataloader.store.etl.run_logs import LinesWanted

pytestmark = [pytest.mark.slow, pytest.mark.requirement("E11")]

RUN = UUID("01900000-0000-7000-8000-000000000001")
# A run of 21 tasks with 1,000 lines each, and 5,000 earlier runs with its name, with a failure in each.
HISTORY = f"""
INSERT INTO dl_jobs (job_id, queue, task, lock_key, status, finished_at)
  SELECT ('01900000-0000-7000-8000-' || lpad(to_hex(i), 12, '0'))::uuid, 'q', 'nightly', 'k' || i, 'succeeded', now()
  FROM generate_series(1, 5000) AS i;
INSERT INTO dl_etl_runs (run_id, name, kind, status, started_at, finished_at)
  SELECT job_id, task, 'flow', 'succeeded', now() - n * interval '1 h', now() - n * interval '1 h' + interval '9 min'
  FROM (SELECT *, row_number() OVER (ORDER BY job_id) AS n FROM dl_jobs) AS j;
INSERT INTO dl_etl_tasks (run_id, ordinal, task, status, started_at, finished_at, summary)
  SELECT run_id, i, 'task ' || i, 'succeeded', started_at, finished_at, '{{"counts": {{"inserted": 2}}}}'
  FROM dl_etl_runs, generate_series(1, 3) AS i;
INSERT INTO dl_etl_tasks (run_id, ordinal, task) SELECT '{RUN}', i, 'task ' || i FROM generate_series(4, 21) AS i;
INSERT INTO dl_etl_failures (run_id, load, segment, phase, key, error)
  SELECT run_id, 'task 1', 'all', 'record', 'x', 'x' FROM dl_etl_runs;
INSERT INTO dl_job_events (job_id, queue, kind, payload)
  SELECT '{RUN}', 'q', 'log', jsonb_build_object('level', CASE WHEN n % 100 = 0 THEN 'error' ELSE 'info' END,
    'message', 'request ' || n, 'fields',
    jsonb_build_object('load', 'task ' || i, 'phase', 'requests', 'endpoint', 'https://example.com/rates', 's', n))
  FROM generate_series(1, 21) AS i, generate_series(1, 1000) AS n ORDER BY i, n;
INSERT INTO dl_etl_logs SELECT '{RUN}', payload -> 'fields' ->> 'load', 7, min(event_id), max(event_id), count(*), 0, 10
  FROM dl_job_events GROUP BY 2;
ANALYZE;
"""


def rows_read(plan):
    """Return the number of rows that a plan's scans have read, whether they were needed or not."""
    own = plan["Actual Rows"] + plan.get("Rows Removed by Filter", 0)
    read = own * plan["Actual Loops"] if "Relation Name" in plan else 0
    return read + sum(map(rows_read, plan.get("Plans", [])))


def literal(value):
    if value is None:
        return "NULL"
    if isinstance(value, list | tuple):
        return "'{" + ",".join(f'"{one}"' for one in value) + "}'"
    return f"'{value}'"


class Counting:
    """Connection that counts its statements, and the rows that they read."""

    def __init__(self, connection):
        self.connection = connection
        self.statements = self.rows = 0

    async def _explained(self, sql, args):
        self.statements += 1
        await self.connection.execute(f"PREPARE measured AS {sql}")
        given = f"({', '.join(map(literal, args))})" if args else ""
        plan = await self.connection.fetchval(f"EXPLAIN (ANALYZE, FORMAT JSON) EXECUTE measured {given}")
        await self.connection.execute("DEALLOCATE measured")
        self.rows += rows_read(json.loads(plan)[0]["Plan"])

    async def fetch(self, sql, *args):
        await self._explained(sql, args)
        return await self.connection.fetch(sql, *args)

    async def fetchrow(self, sql, *args):
        await self._explained(sql, args)
        return await self.connection.fetchrow(sql, *args)

    async def fetchval(self, sql, *args):
        await self._explained(sql, args)
        return await self.connection.fetchval(sql, *args)


async def test_pages_of_runs_read_little_more_than_they_show(store, raw):
    await raw.execute(HISTORY)

    async def cost(ask, *args):
        async def aio_count(connection):
            counting = Counting(connection)
            return await ask(counting, *args), counting.statements, counting.rows

        return await store.run(aio_count)

    view, statements, rows = await cost(run_views._aio_run_view, RUN)
    assert [task.lines for task in view.tasks] == [1_000] * 21
    assert view.usual_s == 540
    assert statements == 2
    assert rows < 200 + 10 * 21

    one = LinesWanted(task=11)
    page, statements, rows = await cost(run_logs._aio_read_lines, RUN, one, 0, 500)
    assert [line.message for line in page.lines] == [f"request {n}" for n in range(1, 501)]
    assert (statements, rows < 600) == (2, True)
    page, statements, rows = await cost(run_logs._aio_read_lines, RUN, one, page.after, 500)
    assert (len(page.lines), page.after, statements, rows < 600) == (500, None, 2, True)
    errors = LinesWanted(task=21, level="error", text="QUEST 1000")
    page, statements, rows = await cost(run_logs._aio_read_lines, RUN, errors, 0, 500)
    assert ([line.message for line in page.lines], statements, rows < 1_100) == (["request 1000"], 2, True)

    page, statements, rows = await cost(run_views._aio_list_run_lines, "nightly", None, 50, None)
    assert (len(page.runs), page.runs[0].rows, page.runs[0].failures) == (50, 6, 1)
    assert (statements, rows < 51 * 8) == (1, True)
    page, statements, rows = await cost(run_views._aio_list_run_lines, None, "failed", 50, None)
    assert (page.runs, page.next is not None, statements, rows < 4 * run_views.MOST_LOOKED_AT) == ([], True, 2, True)

"""Repeated reads of pages find their rows by an index, whatever the tables contain (Q6)."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from uuid import UUID

import pytest

from dataloader.store.queue import failing_jobs, job_logs, job_view, key_lines, why
from dataloader.store.schedules import schedule_view

pytestmark = [pytest.mark.slow, pytest.mark.requirement("Q6", "E11")]

ROWS = """
INSERT INTO dl_jobs (job_id, queue, task, lock_key, schedule, planned_at, status, waits_for, lane, finished_at, error)
SELECT lpad(to_hex(n), 32, '0')::uuid, 'q' || n % 3, 't', 'k' || n % 7, 's' || n % 5, now() - n * interval '1 min',
       v.status::dl_status, v.waits_for, v.lane, CASE WHEN v.status IN ('failed', 'succeeded') THEN now() END, v.error
FROM generate_series(1, 4000) AS n CROSS JOIN LATERAL (VALUES
  (0, 'succeeded', NULL, NULL, NULL), (1, 'failed', NULL, NULL, 'ValueError: odd'), (2, 'queued', 'lock', NULL, NULL),
  (3, 'queued', 'limit', 't', NULL), (4, 'running', NULL, NULL, NULL)
) AS v (kind, status, waits_for, lane, error) WHERE v.kind = n % 5;
INSERT INTO dl_job_events (job_id, queue, kind) SELECT job_id, queue, 'log' FROM dl_jobs;
INSERT INTO dl_tasks (task, layout, declared_by) VALUES ('t', 1, 'w');
INSERT INTO dl_schedules (name, spec, task, origin, stored_by) SELECT 's' || n, '{}', 't', 'code', 'w'
FROM generate_series(0, 4) AS n;
INSERT INTO dl_schedule_events (name, kind) SELECT 's' || n % 5, 'changed' FROM generate_series(1, 4000) AS n;
"""
JOB = UUID(int=7)
PLACE = (100, datetime(2100, 1, 1, tzinfo=UTC), UUID(int=0))
STATEMENTS = {
    "a job": (job_view._WHOLE, (JOB,)),
    "its live part": (job_view._BRIEF, (JOB,)),
    "the end of its log": (job_logs._END, (JOB, 0, True)),
    "who holds its key": (why._OF_KEY, (*PLACE, 7)),
    "its lane": (why._IN_LANE, (*PLACE, "q", ["w"], "t", "")),
    "its queue": (why._AHEAD_READY, (*PLACE, "q", ["w"])),
    "the line of a key": (key_lines._COUNT, ("k3",)),
    "a schedule": (schedule_view.VIEW, ("s3", 30, 20)),
    "a group of errors": (failing_jobs.HEAD, (7,)),
    "its jobs": (failing_jobs.JOBS, (7, *failing_jobs._NEWEST, 26)),
}
GROWS = {"dl_jobs", "dl_job_events", "dl_schedule_events"}


async def test_pages_of_one_object_read_by_indexes_only(store, raw):
    await raw.execute(ROWS)
    await raw.execute("VACUUM ANALYZE")

    async def explained(connection):
        plans = {}
        for name, (sql, values) in STATEMENTS.items():
            plans[name] = json.loads(await connection.fetchval(f"EXPLAIN (FORMAT JSON) {sql}", *values))[0]["Plan"]
        return plans

    def nodes(plan):
        yield plan
        for part in plan.get("Plans", ()):
            yield from nodes(part)

    for name, plan in (await store.run(explained)).items():
        read = [(node["Node Type"], node["Relation Name"]) for node in nodes(plan) if "Relation Name" in node]
        assert read, name
        assert not [one for one in read if one[0] == "Seq Scan" and one[1] in GROWS], name

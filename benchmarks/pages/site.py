"""Service with rows in its tables, and the addresses of its pages."""

from __future__ import annotations

import http.client
from pathlib import Path
from typing import Any, Final, LiteralString, cast
from urllib.parse import urlsplit

import msgspec
import psycopg

from benchmarks.scheduling.killed_fleet import KilledFleet
from dataloader.jobs.failures import group_id
from dataloader.store.embedded.postgres import EmbeddedPostgres
from dataloader.web.pages.page_routes import PageRoute
from dataloader.web.pages.site import PAGES

MODULE: Final = "benchmarks.scheduling.measured_tasks:tasks"
QUEUE: Final = "bench"
AT_ONCE: Final = 500_000
"""Rows of one statement: the triggers keep a statement's rows in memory, or in files."""

# All runs of one hour are in one minute, so that their statistics are few rows, as real ones are.
_ENDED: Final = """
INSERT INTO dl_jobs (job_id, queue, task, args, lock_key, status, attempt, error, created_at, started_at, finished_at)
SELECT gen_random_uuid(), 'old-' || n %% 10, 'task-' || n %% 100, jsonb_build_object('n', n), 'key-' || n,
       CASE WHEN n %% 100 = 0 THEN 'failed' ELSE 'succeeded' END::dl_status, 1,
       CASE WHEN n %% 100 = 0 THEN 'ValueError: number ' || n || ' is odd' END, at, at, at + interval '3 s'
FROM generate_series(%s::int, %s::int) AS n
CROSS JOIN LATERAL (SELECT now() - make_interval(secs => 60 + n / 10.0) AS at) AS instant
"""
_WAITING: Final = """
INSERT INTO dl_jobs (job_id, queue, task, args, lock_key, available_at)
SELECT gen_random_uuid(), 'wait-' || n %% 5, 'task-' || n %% 20, '{}', 'w-' || n, now() + interval '1 day'
FROM generate_series(1, %s) AS n
"""
_EVENTS: Final = """
INSERT INTO dl_job_events (job_id, queue, kind, ts, payload)
SELECT job_id, queue, kind, started_at, payload
FROM (SELECT * FROM dl_jobs WHERE status = 'failed' ORDER BY created_at DESC LIMIT 100) AS failed
CROSS JOIN LATERAL (VALUES ('picked', '{"attempt": 1}'::jsonb), ('log', '{"level": "info", "message": "m"}'),
                           ('failed', '{"attempt": 1, "error": "ValueError: odd"}')) AS lines (kind, payload)
"""
# Schedules, loads, statistics and operators' actions, of some months.
_SUBJECTS: Final = """
INSERT INTO dl_schedules (name, spec, task, origin, stored_by, next_at)
SELECT 'nightly-' || n, jsonb_build_object('task', 'task-' || n, 'cron', '30 2 * * *'), 'task-' || n, 'code', 'host:1',
       now() + interval '9 h' FROM generate_series(1, 50) AS n;
UPDATE dl_jobs j SET schedule = 'nightly-' || substr(j.task, 6), planned_at = j.created_at
FROM (SELECT job_id FROM dl_jobs WHERE status = 'succeeded' ORDER BY created_at DESC LIMIT 20000) AS newest
WHERE j.job_id = newest.job_id;
INSERT INTO dl_schedule_events (name, kind, payload)
SELECT 'nightly-' || n %% 50 + 1, 'left_out', '{"why": "overlap", "times": 3}' FROM generate_series(1, 20000) AS n;
INSERT INTO dl_sources (source, limits, units, spans_s)
SELECT 'supplier-' || n, '{"rate_limits": [[100, 60]]}', '{100}', '{60}' FROM generate_series(1, 50) AS n;
INSERT INTO dl_etl_runs (run_id, name, kind, status, started_at, finished_at)
SELECT job_id, 'load-' || n %% 50, 'load', 'succeeded', created_at, finished_at FROM (
  SELECT *, row_number() OVER () AS n FROM dl_jobs WHERE status = 'succeeded' LIMIT 20000) AS numbered;
INSERT INTO dl_etl_tasks (run_id, ordinal, task, status, started_at, finished_at, summary)
SELECT run_id, 1, name, status, started_at, finished_at, '{"counts": {"inserted": 4000}}' FROM dl_etl_runs;
INSERT INTO dl_etl_segments (run_id, task, segment, counts, committed_at)
SELECT run_id, name, 's' || n, '{"inserted": 1000, "responses": 7}', started_at
FROM dl_etl_runs, generate_series(1, 5) AS n;
INSERT INTO dl_etl_failures (run_id, load, segment, phase, key, error)
SELECT run_id, name, 's', 'request', 'page 7', 'HTTPError: 503' FROM dl_etl_runs LIMIT 2000;
INSERT INTO dl_run_stats (hour, queue, task, outcome, runs, total_s, max_s)
SELECT date_trunc('hour', now(), 'UTC') - make_interval(hours => h), 'old-3', 'task-' || t, o, 10, 20, 3
FROM generate_series(0, 2000) AS h, generate_series(1, 40) AS t, unnest('{succeeded,failed}'::text[]) AS o
ON CONFLICT DO NOTHING;
INSERT INTO dl_audit (actor, action, detail) SELECT 'ann', 'pause', '{"queue": "old-3"}' FROM generate_series(1, 200000)
"""
# A tenth of the number of jobs: a million for ten million jobs.
_PROCESSES: Final = """
INSERT INTO dl_processes (type, process_id, status, metadata, aux_state, last_event_id, detail, error_group)
SELECT 'pay-' || n %% 5, 'order-' || n, CASE WHEN n %% 100 = 0 THEN 'error' ELSE 'running' END,
       jsonb_build_object('customer', 'c' || n %% 10000), jsonb_build_object('amount', n), 2,
       CASE WHEN n %% 100 = 0 THEN 'the bank has refused it' END, CASE WHEN n %% 100 = 0 THEN n %% 7 END
FROM generate_series(1, %s) AS n
"""
_STEPS: Final = """
INSERT INTO dl_process_tasks (key, type, kind, method, status, args, response, started_at, finished_at)
SELECT key, type, 'call', 'pay', 'finished', '5', '"thanks"', now(), now() FROM dl_processes, generate_series(1, 2);
INSERT INTO dl_process_events (key, event_id, task_id, payload)
SELECT key, n, 1, '"paid"' FROM dl_processes, generate_series(1, 2) AS n
"""
_EXAMPLES: Final = {
    "/ui/process": "/ui/process?type=pay-1&id=order-1",
    "/ui/process/events": "/ui/process/events?type=pay-1&id=order-1",
    "/ui/jobs/<uuid:job_id>": "/ui/jobs/{job_id}",
    "/ui/queue": "/ui/queue?name=old-3",
    "/ui/key": "/ui/key?k=w-3",
    "/ui/task": "/ui/task?name=limited",
    "/ui/schedule": "/ui/schedule?name=nightly-7",
    "/ui/supplier": "/ui/supplier?name=supplier-7",
    "/ui/load": "/ui/load?name=load-7",
    "/ui/errors/<group>": "/ui/errors/{group}",
}
"""Addresses with the name of an existing row."""
_MORE: Final = {
    "/ui/jobs, failed": "/ui/jobs?status=failed",
    "/ui/jobs, a queue": "/ui/jobs?queue=old-3",
    "/ui/errors/log, a task": "/ui/errors/log?task=nobody",
    "/ui/processes, in error": "/ui/processes?status=error",
    "/ui/processes, a type": "/ui/processes?type=pay-3",
    "/ui/processes, a customer": "/ui/processes?metadata=customer%3Dc77",
    "/ui/audit, a person": "/ui/audit?actor=nobody",
    "/ui/stats, a month": "/ui/stats?from=2026-11-01T00:00",
}
"""Searches that cost more than the page itself."""


def fill(dsn: str, ended: int, waiting: int = 2_000) -> None:
    """Add rows by SQL, as a service would have left them."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        for begin in range(1, ended + 1, AT_ONCE):
            connection.execute(_ENDED, (begin, min(begin + AT_ONCE - 1, ended)))
        connection.execute(_WAITING, (waiting,))
        connection.execute(_EVENTS)
        connection.execute(_PROCESSES, (max(1, ended // 10),))
        for statement in _STEPS.split(";\n"):
            connection.execute(cast("LiteralString", statement))
        for statement in _SUBJECTS.replace("%%", "%").split(";\n"):
            connection.execute(cast("LiteralString", statement))
        connection.execute("VACUUM ANALYZE")
        connection.execute("CHECKPOINT")


def service(server: EmbeddedPostgres, name: str, folder: Path) -> KilledFleet:
    """Start one process of `dataloader serve` on a database of the server."""
    notes = folder / name
    notes.mkdir(parents=True, exist_ok=True)
    return KilledFleet(server.dsn_of(name), MODULE, 1, {QUEUE: 200}, folder=notes, settings={})


def addresses(dsn: str) -> dict[str, str]:
    """Return the pages that need no form, by route, with IDs and names of existing rows."""
    with psycopg.connect(dsn) as connection:
        row = connection.execute("SELECT job_id FROM dl_jobs WHERE status = 'failed' ORDER BY created_at DESC LIMIT 1")
        [job_id] = row.fetchone() or [None]
        row = connection.execute("SELECT error_group FROM dl_jobs WHERE error_group IS NOT NULL LIMIT 1")
        [group] = row.fetchone() or [0]
    ids = {"job_id": job_id, "group": group_id(group, None)}
    named = {path: example.format_map(ids) for path, example in _EXAMPLES.items()}
    shown = {route.path: route for route in PAGES if route.method == "GET" and route.role is not None}
    found = {path: named.get(path, path) for path, route in shown.items() if path in named or _is_whole(route)}
    return found | _MORE


def _is_whole(route: PageRoute) -> bool:
    """Return True if the page needs no ID and no name, and sends HTML."""
    needed = [] if route.query is None else [field for field in msgspec.structs.fields(route.query) if field.required]
    return "<" not in route.path and not needed and not route.path.endswith(("/export", "/new", "/concealed", "/"))


def get(
    connection: http.client.HTTPConnection, path: str, headers: dict[str, str] | None = None
) -> tuple[int, bytes, Any]:
    """Return status, body and headers of an answer."""
    connection.request("GET", path, headers=headers or {})
    answer = connection.getresponse()
    return answer.status, answer.read(), answer.headers


def connected(url: str) -> http.client.HTTPConnection:
    """Return a connection to a service."""
    return http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)

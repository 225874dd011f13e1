"""The one scheme of pages: each list over HTTP is read in pages, which rows that are added meanwhile do not disturb."""

from __future__ import annotations

from urllib.parse import urljoin

import pytest

from dataloader.web.app import ROUTES

pytestmark = [pytest.mark.slow, pytest.mark.requirement("Q2", "E12")]

RUN = "00000000-0000-7000-8000-000000000003"
FIXTURES = """
INSERT INTO dl_jobs (job_id, queue, task, lock_key, status, created_at, finished_at)
  SELECT ('00000000-0000-7000-8000-00000000000' || i)::uuid, 'q' || i, 't', 'k' || i, 'succeeded',
         timestamptz '2026-01-01' + i / 2 * interval '1 s', now() FROM generate_series(1, 5) AS i;
INSERT INTO dl_queues (queue, paused) SELECT 'q' || i, true FROM generate_series(1, 5) AS i;
INSERT INTO dl_job_events (job_id, queue, kind, payload)
  SELECT '{run}', 'q', 'log', jsonb_build_object('level', 'info', 'message', i) FROM generate_series(1, 5) AS i;
INSERT INTO dl_workers (worker, host, pid, version, queues)
  SELECT 'w' || i, 'h', i, '1', '{{}}' FROM generate_series(1, 5) AS i;
INSERT INTO dl_tasks (task, layout, declared_by) SELECT 't' || i, 1, 'w' FROM generate_series(1, 5) AS i;
INSERT INTO dl_sources (source) SELECT 's' || i FROM generate_series(1, 5) AS i;
INSERT INTO dl_bulk (bulk_id, action, filter, actor, created_at)
  SELECT ('00000000-0000-7000-8000-00000000000' || i)::uuid, 'cancel', '{{}}', 'a',
         timestamptz '2026-01-01' + i / 2 * interval '1 s' FROM generate_series(1, 5) AS i;
INSERT INTO dl_audit (actor, action, detail) SELECT 'a', 'x' || i, '{{}}' FROM generate_series(1, 5) AS i;
INSERT INTO dl_schedules (name, spec, task, origin, stored_by)
  SELECT 's' || i, '{{"task": "t", "every_s": 60}}', 't', 'code', 'w' FROM generate_series(1, 5) AS i;
INSERT INTO dl_schedule_events (name, kind) SELECT 's1', 'changed' FROM generate_series(1, 5) AS i;
INSERT INTO dl_run_stats (hour, queue, task, outcome, runs, total_s, max_s)
  SELECT date_trunc('hour', now()), 'q', 't' || i, 'succeeded', 1, 1, 1 FROM generate_series(1, 3) AS i;
INSERT INTO dl_run_stats_new (queue, task, outcome, runs, total_s, max_s)
  SELECT 'q', 't' || i, 'succeeded', 1, 1, 1 FROM generate_series(2, 5) AS i;
INSERT INTO dl_etl_runs (run_id, name, kind, started_at) SELECT job_id, 'load', 'load', created_at FROM dl_jobs;
INSERT INTO dl_etl_tasks (run_id, ordinal, task, status)
  SELECT '{run}', i, 'load ' || i, 'succeeded' FROM generate_series(1, 5) AS i;
INSERT INTO dl_etl_failures (run_id, load, segment, phase, key, error)
  SELECT '{run}', 'load 1', 'all', 'record', i, 'x' FROM generate_series(1, 5) AS i;
INSERT INTO dl_jobs (job_id, queue, task, lock_key, status, created_at)
  SELECT gen_random_uuid(), 'q', CASE WHEN i < 6 THEN 't' ELSE 't' || i END, 'k', 'failed',
         timestamptz '2026-01-02' + i / 2 * interval '1 s' FROM generate_series(1, 9) AS i;
INSERT INTO dl_errors (at, job_id, task, queue, attempt, status, error_group, error)
  SELECT now(), '{run}', 't', 'q', 1, 'failed', 1, 'e' FROM generate_series(1, 5) AS i;
INSERT INTO dl_processes (type, process_id, status, error_group, detail)
  SELECT 't', 'p' || i, 'error', i, 'e' FROM generate_series(1, 5) AS i;
INSERT INTO dl_process_holdups (sink, key, partition, tries, error) SELECT 'books', key, 0, 1, 'away' FROM dl_processes;
INSERT INTO dl_process_events (key, event_id, task_id, payload)
  SELECT key, i, 1, '{{}}' FROM dl_processes, generate_series(1, 5) AS i WHERE process_id = 'p1';
INSERT INTO dl_process_tasks (key, type, kind, status)
  SELECT key, 't', 'call', 'finished' FROM dl_processes, generate_series(1, 5) AS i WHERE process_id = 'p1';
"""
# Rows that are added before the listed ones, once the first page has been read.
NEWER = """
INSERT INTO dl_jobs (job_id, queue, task, lock_key, status, finished_at)
  VALUES (gen_random_uuid(), 'a', 't', 'k', 'succeeded', now());
INSERT INTO dl_queues (queue, paused) VALUES ('a', true);
INSERT INTO dl_workers (worker, host, pid, version, queues) VALUES ('a', 'h', 1, '1', '{}');
INSERT INTO dl_tasks (task, layout, declared_by) VALUES ('a', 1, 'w');
INSERT INTO dl_bulk (bulk_id, action, filter, actor) VALUES (gen_random_uuid(), 'cancel', '{}', 'a');
INSERT INTO dl_audit (actor, action, detail) VALUES ('a', 'new', '{}');
INSERT INTO dl_sources (source) VALUES ('a');
INSERT INTO dl_schedules (name, spec, task, origin, stored_by) VALUES ('a', '{}', 't', 'code', 'w');
INSERT INTO dl_schedule_events (name, kind) VALUES ('s1', 'changed');
INSERT INTO dl_run_stats_new (queue, task, outcome, runs, total_s, max_s) VALUES ('a', 't', 'succeeded', 1, 1, 1);
INSERT INTO dl_errors (at, job_id, task, queue, attempt, status, error_group, error)
  SELECT now(), job_id, 't', 'q', 1, 'failed', 1, 'e' FROM dl_jobs LIMIT 1;
INSERT INTO dl_processes (type, process_id) VALUES ('t', 'a');
INSERT INTO dl_etl_runs (run_id, name, kind) SELECT job_id, 'load', 'load' FROM dl_jobs WHERE queue = 'a';
INSERT INTO dl_etl_tasks (run_id, ordinal, task, status)
  SELECT job_id, 1, 'a', 'succeeded' FROM dl_jobs WHERE queue = 'a';
"""
LISTS = {
    "/api/v1/jobs": ("jobs", "job_id"),
    "/api/v1/jobs/<uuid:job_id>/events": ("events", "event_id"),
    "/api/v1/jobs/<uuid:job_id>/logs": ("lines", "event_id"),
    "/api/v1/queues": ("queues", "queue"),
    "/api/v1/workers": ("workers", "worker"),
    "/api/v1/tasks": ("tasks", "task"),
    "/api/v1/suppliers": ("suppliers", "supplier"),
    "/api/v1/audit": ("audit", "audit_id"),
    "/api/v1/bulk": ("bulk", "bulk_id"),
    "/api/v1/errors": ("groups", "group"),
    "/api/v1/errors/log": ("errors", "error_id"),
    "/api/v1/errors/<path:group>/jobs": ("jobs", "job_id"),
    "/api/v1/schedules": ("schedules", "name"),
    "/api/v1/schedules/<path:name>/events": ("events", "event_id"),
    "/api/v1/processes": ("processes", "process_id"),
    "/api/v1/processes/errors": ("groups", "group"),
    "/api/v1/processes/deliveries": ("deliveries", "process_id"),
    "/api/v1/processes/<process_type>/<path:process_id>/events": ("events", "event_id"),
    "/api/v1/processes/<process_type>/<path:process_id>/tasks": ("tasks", "task_id"),
    "/api/v1/stats": ("stats", "task"),
    "/api/v1/runs": ("runs", "run_id"),
    "/api/v1/runs/<uuid:run_id>/timeline": ("tasks", "ordinal"),
    "/api/v1/runs/<uuid:run_id>/failures": ("failures", "failure_id"),
    "/api/v1/loads": ("loads", "load"),
    "/api/v1/loads/<path:load>/failures": ("failures", "failure_id"),
}
GARBAGE = ("nonsense", "", "é", "\x00", "9" * 30)
NUMBERS = {"task_id", "event_id", "failure_id", "audit_id", "ordinal", "error_id"}
GROUP = "c39d794661f141e5"
"""Error group of the task t without an error."""


def address(rule):
    for part in ("<uuid:job_id>", "<uuid:run_id>"):
        rule = rule.replace(part, RUN)
    rule = rule.replace("<process_type>/<path:process_id>", "t/p1")
    return rule.replace("<path:load>", "load%201").replace("<path:name>", "s1").replace("<path:group>", GROUP)


async def test_every_list_is_read_in_pages_by_one_scheme_during_additions(open_web, database):
    assert {route.path for route in ROUTES if route.pages} == LISTS.keys()
    database.psql(FIXTURES.format(run=RUN))
    async with open_web() as web:

        async def page(url, **params):
            answer = await web.client.get(url, params=params or None)
            assert answer.status_code == 200, answer.text
            return answer

        whole = {rule: (await page(address(rule))).json() for rule in LISTS}
        first = {rule: await page(address(rule), limit=2) for rule in LISTS}
        database.psql(NEWER)
        for rule, (name, key) in LISTS.items():
            assert whole[rule]["next"] is None, rule
            expected = [row[key] for row in whole[rule][name]]
            assert len(expected) == (14 if rule == "/api/v1/jobs" else 5), rule
            for follow in ("next", "Link"):
                answer, found = first[rule], []
                while True:
                    rows = answer.json()[name]
                    assert len(rows) <= 2, rule
                    found += [row[key] for row in rows]
                    following = answer.json()["next"]
                    assert (following is None) == ("next" not in answer.links), rule
                    if following is None:
                        break
                    link = urljoin(str(answer.url), answer.links["next"]["url"])
                    answer = await (page(address(rule), limit=2, after=following) if follow == "next" else page(link))
                assert found == expected, (rule, follow)
            for garbage in GARBAGE:
                refused = await web.client.get(address(rule), params={"after": garbage})
                assert refused.status_code == 422, (rule, garbage)
                [error] = refused.json()["errors"]
                assert error["path"] == "after"
                assert error["message"].startswith("must be the `next` of the previous page, not "), (rule, garbage)
            if key in NUMBERS:
                behind = (await page(address(rule), after=expected[1])).json()[name]
                assert [row[key] for row in behind] == expected[2:], rule
            else:
                assert (await web.client.get(address(rule), params={"after": "17"})).status_code == 422, rule
        numbers = [row["audit_id"] for row in whole["/api/v1/audit"]["audit"]]
        older = await page("/api/v1/audit", before=numbers[1])
        assert [row["audit_id"] for row in older.json()["audit"]] == numbers[2:]
        both = await web.client.get("/api/v1/audit", params={"before": numbers[1], "after": numbers[1]})
        assert (both.status_code, both.json()["errors"][0]["path"]) == (422, "before")


async def test_the_link_to_the_next_page_keeps_the_filter(open_web):
    async with open_web() as web:
        for _ in range(2):
            await web.trigger(queue="a/b c&ü", lock_key="password=sesame")
        await web.trigger()
        query = {"queue": "a/b c&ü", "status": ["queued", "running"], "limit": "1", "lock_key": "password=sesame"}
        answer = await web.client.get("/api/v1/jobs", params=query)
        assert answer.links["next"]["url"].startswith("?")
        second = await web.client.get(urljoin(str(answer.url), answer.links["next"]["url"]))
        assert [job["queue"] for job in answer.json()["jobs"] + second.json()["jobs"]] == ["a/b c&ü"] * 2
        assert (second.json()["next"], second.links) == (None, {})

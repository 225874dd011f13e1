"""The first page shows the problems, with links to their solutions."""

from __future__ import annotations

import math
import re

import pytest
from statements import record_statements

from dataloader.jobs.contract import Operator
from dataloader.web.pages import menu_numbers

pytestmark = pytest.mark.requirement("E11")

JOBS = """
INSERT INTO dl_jobs (job_id, queue, task, lock_key, keyed) SELECT gen_random_uuid(), '{queue}', '{task}', i::text, false
FROM generate_series(1, {number}) AS i;
"""
WORKER = """
INSERT INTO dl_workers (worker, host, pid, version, queues, tasks)
VALUES ('host-b:7', 'b', 7, '1', '{"served": 4}', '{t}');
"""


@pytest.fixture
def sentences():
    """Return a function that returns the page's sentences about problems, with their links."""

    async def sentences(web):
        text = (await web.client.get("/ui?part=rows")).text
        found = re.findall(
            r"<strong><a href=\"([^\"]+)\">(.*?)</a></strong>(.*?)</p><a class=\"button", text, re.DOTALL
        )
        clean = [(href, re.sub(r"<[^>]+>", "", f"{label}{says}").strip()) for href, label, says in found]
        return {re.sub(r"\d{4}-\d\d-\d\d [\d:]+", "THEN", says): href.replace("&amp;", "&") for href, says in clean}

    return sentences


async def test_u7_while_all_is_well_it_says_so_and_counts(open_web, database, sentences):
    async with open_web() as web:
        assert (await web.client.get("/ui/")).headers["Location"] == "/ui"
        database.psql(WORKER + JOBS.format(queue="served", task="t", number=3))
        database.psql(
            "INSERT INTO dl_jobs"
            " (job_id, queue, task, lock_key, keyed, status, claimed_by, started_at, lease_expires_at)"
            " SELECT gen_random_uuid(), 'served', 'run ' || i, i::text, false, 'running', 'host-b:7',"
            "        now() - make_interval(mins => i), now() + interval '1 h' FROM generate_series(1, 12) AS i;"
            "INSERT INTO dl_run_stats (hour, queue, task, outcome, runs, total_s, max_s)"
            " VALUES (date_trunc('hour', now(), 'UTC') - interval '2 h', 'q', 't', 'succeeded', 1204, 1, 1);"
            "INSERT INTO dl_run_stats_new (queue, task, outcome, runs, total_s, max_s)"
            " VALUES ('q', 't', 'lost', 7, 1, 1);"
            "INSERT INTO dl_tasks (task, layout, declared_by) VALUES ('run 12', 1, 'w')"
        )
        assert await sentences(web) == {}
        shown = (await web.client.get("/ui")).text
        assert "No problems." in shown
        assert '<a href="/ui/jobs?status=queued">3</a>' in shown
        assert '<a href="/ui/jobs?status=running">12 / 4</a>' in shown
        assert '<a href="/ui/errors">0</a><small>in the last hour</small>' in shown
        # The longest ten.
        assert shown.index("run 12") < shown.index("run 3")
        assert "run 2<" not in shown
        # A task that is not declared has no page.
        assert '<a href="/ui/task?name=run%2012">run 12</a>' in shown
        assert '<td data-label="Task">run 11</td>' in shown
        assert '<a href="/ui/queue?name=served">served</a>' in shown
        assert "Jobs that ended in each of the last 24 hours, 1,211 in all" in shown
        assert '<td data-label="Failed" class="number">7</td>' in shown


@pytest.mark.slow
async def test_u5_each_trouble_is_a_sentence_with_a_link_to_its_fix(open_web, database, sentences):
    async with open_web() as web:
        database.psql(
            WORKER + JOBS.format(queue="served", task="t", number=1) + JOBS.format(queue="lonely", task="t", number=2)
        )
        for queue in ("served", "empty"):
            await web.jobs.signed(Operator("ann")).pause(queue)
        database.psql(
            JOBS.format(queue="served", task="unknown", number=2)
            + "UPDATE dl_jobs SET created_at = now() - interval '5 min' WHERE task = 'unknown';"
            "INSERT INTO dl_tasks (task, layout, declared_by, paused, paused_at, paused_by, limited)"
            " VALUES ('slow', 1, 'w', true, now(), 'bob', true);"
            "INSERT INTO dl_jobs (job_id, queue, task, lock_key, lane, waits_for)"
            " VALUES (gen_random_uuid(), 'empty', 'slow', 'k', 'slow', 'limit');"
            "INSERT INTO dl_schedules (name, spec, task, origin, stored_by, next_at, paused, paused_why) VALUES"
            " ('broken', '{}', 't', 'code', 'w', now(), true, 'its job x has ended as failed'),"
            " ('asleep', '{}', 't', 'code', 'w', now() - interval '9 min', true, 'by ann'),"
            " ('late', '{}', 't', 'code', 'w', now() - interval '9 min', false, NULL),"
            " ('fine', '{}', 't', 'code', 'w', now() + interval '9 min', false, NULL);"
            "INSERT INTO dl_schedule_events (name, kind, payload) VALUES"
            """ ('fine', 'left_out', '{"why": "missed", "times": 4}'),"""
            """ ('fine', 'left_out', '{"why": "overlap", "times": 9}');"""
            "INSERT INTO dl_errors (at, job_id, task, queue, attempt, status, error_group, error)"
            " SELECT now() - make_interval(mins => i * 25), gen_random_uuid(), 't', 'q', 1,"
            "        (CASE WHEN i = 1 THEN 'queued' ELSE 'failed' END)::dl_status, 77, 'HTTPError: 503'"
            " FROM generate_series(4, 0, -1) AS i;"
            "INSERT INTO dl_workers (worker, host, pid, version, queues, seen_at)"
            " VALUES ('host-c:9', 'c', 9, '1', '{}', now() - interval '10 min')"
        )
        assert await sentences(web) == {
            "Queue served is paused: 1 waiting job; paused THEN by ann.": "/ui/queue?name=served",
            "Queue empty is paused: 1 waiting job; paused THEN by ann.": "/ui/queue?name=empty",
            "Queue lonely has no worker: 2 waiting jobs; the oldest became ready THEN.": "/ui/queue?name=lonely",
            "Task unknown has no worker in the queue served: 2 waiting jobs; the oldest was created THEN.":
                "/ui/jobs?queue=served&task=unknown&status=queued",
            "Task slow is paused: 1 waiting job; paused THEN by bob.": "/ui/task?name=slow",
            "Schedule broken was paused automatically: its job x has ended as failed.": "/ui/schedule?name=broken",
            "Schedule late is late: no process enqueues its jobs; due THEN.": "/ui/schedule?name=late",
            "Schedule fine has missed 4 planned times since yesterday; noted THEN.": "/ui/schedule?name=fine",
            "HTTPError: 503 – 2 failures in the last hour, of t; the last THEN.": "/ui/errors/000000000000004d",
            "Process host-c:9 ended without signing off; last seen THEN.": "/ui/workers",
        }  # fmt: skip
        shown = (await web.client.get("/ui")).text
        assert '<a class="bad" href="/ui/errors">2</a><small>in the last hour</small>' in shown
        # The worst problem comes first.
        assert shown.index("has no worker") < shown.index("Queue served")


@pytest.mark.slow
async def test_u13_the_page_takes_at_most_four_statements(open_web, database, monkeypatch):
    monkeypatch.setattr(menu_numbers, "REMEMBERED_S", math.inf)
    async with open_web() as web:
        statements = await record_statements(web.services.database)

        def asked():
            return [one.query for one in statements if not one.query.startswith(("SET ", "BEGIN", "COMMIT"))]

        for _ in range(2):
            statements.clear()
            assert (await web.client.get("/ui")).status_code == 200
            database.psql("UPDATE dl_depths SET next_at = '-infinity'")
        assert 1 <= len(asked()) <= 4, asked()
        database.psql("UPDATE dl_depths SET next_at = 'infinity'")
        statements.clear()
        part = await web.client.get("/ui?part=rows")
        assert len(asked()) == 1, asked()
        same = await web.client.get("/ui?part=rows", headers={"If-None-Match": part.headers["ETag"]})
        assert same.status_code == 304


@pytest.mark.slow
@pytest.mark.parametrize(("theme", "width"), [("light", 1280), ("dark", 360)])
async def test_u10_u22_u23_the_overview_looks_well_with_any_data(open_web, open_tab, database, theme, width):
    hostile = "<script>alert(1)</script>\"''" + "x" * 150 + "\u202e"
    database.psql(
        WORKER
        + JOBS.format(queue=hostile, task=hostile, number=3)
        + JOBS.format(queue="load.cbr", task="t", number=310)
        + "INSERT INTO dl_jobs (job_id, queue, task, lock_key, keyed, status, claimed_by, started_at, lease_expires_at)"
        f" SELECT gen_random_uuid(), 'served', '{hostile}', i::text, false, 'running', 'host-b:7',"
        "         now() - make_interval(mins => i), now() + interval '1 h' FROM generate_series(1, 3) AS i;"
        "INSERT INTO dl_errors (at, job_id, task, queue, attempt, status, error_group, error)"
        f" SELECT now(), gen_random_uuid(), '{hostile}', 'q', 1, 'failed', i, '{hostile}'"
        " FROM generate_series(1, 3) AS i;"
        "INSERT INTO dl_run_stats (hour, queue, task, outcome, runs, total_s, max_s)"
        " SELECT date_trunc('hour', now(), 'UTC') - make_interval(hours => i), 'q', 't',"
        "        CASE WHEN i % 5 = 1 THEN 'failed' ELSE 'succeeded' END, 1000 + 300 * (i % 7), 1, 1"
        " FROM generate_series(0, 20) AS i"
    )
    async with open_web() as web, open_tab(web.url, width=width, color_scheme=theme) as tab:
        await web.jobs.pause("load.cbr")
        await tab.go("/ui")
        await tab.check_looks()

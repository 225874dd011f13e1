"""Queues, one queue, and the processes that serve them."""

from __future__ import annotations

import pytest
from web_server import TOKENS, all_tokens

pytestmark = pytest.mark.requirement("E11")

HOSTILE = "<script>alert(1)</script>\"'" + "x" * 150 + "\u202e"
WORKERS = """
INSERT INTO dl_workers (worker, host, pid, version, queues, tasks, only_tasks, seen_at) VALUES
  ('host-b:7', 'host-b', 7, '1.4.0', '{"load": 8, "q": 2}', '{a,b,task 1,task 2,task 3,task 4,task 5}',
   '{"q": ["b"]}', now()),
  ('host-c:9', 'host-c', 9, '1.3.0', '{"load": 4}', '{a}', NULL, now() - interval '10 min');
INSERT INTO dl_jobs (job_id, queue, task, lock_key, keyed, status, claimed_by, started_at, lease_expires_at, token)
  SELECT gen_random_uuid(), 'load', 'a', i::text, false, 'running', 'host-b:7', now() - make_interval(mins => i),
         now() + interval '1 h', i FROM generate_series(1, 3) AS i;
INSERT INTO dl_jobs (job_id, queue, task, lock_key, keyed, priority)
  SELECT gen_random_uuid(), 'load', 'task ' || i, i::text, false, 10 - i FROM generate_series(1, 5) AS i;
INSERT INTO dl_tasks (task, layout, queue, declared_by) VALUES ('a', 1, 'load', 'w');
"""


async def test_u5_a_queue_shows_its_depths_who_serves_it_what_runs_and_what_starts_next(open_web, database):
    database.psql(WORKERS)
    async with open_web() as web:
        listed = (await web.client.get("/ui/queues")).text
        assert "/ui/queue?name=load" in listed
        shown = (await web.client.get("/ui/queue?name=load&part=rows")).text
        assert "<dt>Ready</dt><dd>5<small>" in shown
        assert "<dt>Running</dt><dd>3 / 8<progress" in shown
        assert "host-b:7" in shown
        assert "gone" in shown
        # The most urgent first; the longest run first.
        assert shown.index("task 5") < shown.index("task 1")
        assert "/ui/jobs?queue=load&amp;task=a" in shown
        done = await web.client.post(
            "/ui/queues/pause", data={"queue": "load", "to": "/ui/queue?name=load"}, headers={"Origin": web.url}
        )
        assert done.headers["Location"] == "/ui/queue?name=load"
        assert "Paused since <time" in (await web.client.get("/ui/queue?name=load")).text
        database.psql("UPDATE dl_depths SET next_at = now() + interval '1 h'")
        assert "There are many jobs. These counts are from" in (await web.client.get("/ui/queues")).text
        nobody = (await web.client.get("/ui/queue?name=nobody")).text
        assert "No worker process serves this queue" in nobody
        assert "The queue has no waiting or running jobs<" in nobody


async def test_workers_show_slots_and_who_is_gone(open_web, database):
    database.psql(WORKERS)
    async with open_web() as web:
        shown = (await web.client.get("/ui/workers?part=rows")).text
        assert "load 3/8" in shown
        assert "q 0/2" in shown
        assert "only b" in shown
        assert shown.index("host-b:7") < shown.index("host-c:9")
        assert shown.count("gone</span>") == 1
        database.psql("DELETE FROM dl_workers")
        assert "There are no workers</strong>" in (await web.client.get("/ui/workers")).text


async def test_u9_a_secret_in_a_name_is_not_shown(open_web, database):
    async with open_web(tokens=all_tokens()) as web:
        await web.client.post("/ui/sign-in", data={"token": TOKENS["reader"]}, headers={"Origin": web.url})
        await web.jobs.enqueue("token=hunter2", queue="password=hunter2")
        for path in ("/ui", "/ui/queues", "/ui/jobs"):
            text = (await web.client.get(path)).text
            assert ("***" in text, "hunter2" in text) == (True, False), path
        known_path = "/ui/queue?name=password%3Dhunter2"
        known = (await web.client.get(known_path)).text
        assert "***" in known
        assert ">password=hunter2" not in known
        await web.client.post("/ui/sign-in", data={"token": TOKENS["operator"]}, headers={"Origin": web.url})
        listed = (await web.client.get("/ui/queues")).text
        assert ("hunter2" in listed, "The name contains a secret" in listed) == (False, True)
        database.psql(
            "INSERT INTO dl_workers (worker, host, pid, version, queues, only_tasks) VALUES ('b:7', 'b', 7, '1',"
            """ '{"password=hunter2": 8}', '{"password=hunter2": ["token=hunter2"]}')"""
        )
        workers = (await web.client.get("/ui/workers")).text
        assert ("only token=***" in workers, "hunter2" in workers) == (True, False)
        # A reader that knows the name can use it.
        assert 'name="queue" value="password=hunter2"' in (await web.client.get(known_path)).text


async def test_many_queues_have_pages(open_web, database):
    database.psql("INSERT INTO dl_queues (queue, paused) SELECT 'q' || i, true FROM generate_series(101, 350) AS i")
    async with open_web() as web:
        first = (await web.client.get("/ui/queues")).text
        assert ("q200" in first, "q201" in first, "after=100" in first) == (True, False, True)
        last = (await web.client.get("/ui/queues?after=200")).text
        assert ("q350" in last, "Next page" in last) == (True, False)


@pytest.mark.full
@pytest.mark.parametrize(("theme", "width"), [("light", 1280), ("dark", 360)])
async def test_u10_u22_u23_queues_look_well_with_any_data(open_web, open_tab, database, theme, width):
    database.psql(WORKERS)
    quoted = HOSTILE.replace("'", "''")
    database.psql(
        f"INSERT INTO dl_jobs (job_id, queue, task, lock_key) VALUES (gen_random_uuid(), '{quoted}', '{quoted}', 'k');"
        "INSERT INTO dl_workers (worker, host, pid, version, queues) VALUES"
        f" ('{quoted}', 'h', 1, '1', jsonb_build_object('{quoted}', 3))"
    )
    async with open_web() as web, open_tab(web.url, width=width, color_scheme=theme) as tab:
        await web.jobs.pause("load")
        for path in ("/ui/queues", "/ui/queue?name=load", "/ui/workers"):
            await tab.go(path)
            await tab.check_looks()
        await tab.go("/ui/queues")
        await tab.do(lambda page: page.click("tbody th a >> nth=0"))
        await tab.check_looks()

"""The queue of a key: its holder, the waiting jobs, and the jobs that ended last."""

from __future__ import annotations

import re

import pytest
from databases import raw_connection

pytestmark = pytest.mark.requirement("E11")


async def line_of(web, key="k"):
    answer = await web.client.get("/ui/key", params={"k": key})
    assert answer.status_code == 200, answer.text
    parts = re.split("<h2>", re.sub(r"\s+", " ", answer.text))[1:]
    return [re.findall(r'href="/ui/jobs/([^"]+)"', part) for part in parts], parts


@pytest.mark.slow
async def test_a_keys_page_has_its_holder_its_waiting_jobs_in_order_and_the_last_ended(open_web, database):
    async with open_web() as web:
        ended, holder, late, early = [await web.trigger(task=task) for task in ("e", "h", "l", "r")]
        ready = await web.trigger(lock_key="other")
        database.psql(f"UPDATE dl_jobs SET status = 'failed', finished_at = now() WHERE job_id = '{ended}'")
        database.psql(
            "UPDATE dl_jobs SET status = 'running', token = 7, claimed_by = 'host-b:1', started_at = now()"
            f" WHERE job_id = '{holder}'"
        )
        database.psql(f"UPDATE dl_jobs SET waits_for = 'lock' WHERE job_id IN ('{late}', '{early}')")
        database.psql(f"UPDATE dl_jobs SET priority = 5 WHERE job_id = '{early}'")
        (holds, waits, over), (first, second, _) = await line_of(web)
        assert (holds, waits, over) == ([holder], [early, late], [ended])
        assert "host-b:1" in first
        assert "Waiting for it: 2" in second
        assert ready not in str(await line_of(web))
        text = (await web.client.get(f"/ui/jobs/{late}")).text
        assert '<a href="/ui/key?k=k">Jobs that wait for its key</a>' in text


async def test_a_foreign_session_that_holds_a_key_is_named(open_web, database):
    async with open_web() as web, raw_connection(database.dsn) as foreign:
        texts = ("No job holds it.", "No job waits for it<", "No job with this key has ended<")
        assert [text in part for text, part in zip(texts, (await line_of(web))[1], strict=True)] == [True] * 3
        await foreign.execute("SET application_name = 'nightly psql'; SELECT pg_advisory_lock(hashtext('k'))")
        _, parts = await line_of(web)
        assert "application nightly psql" in parts[0]
        assert "runs no job with this key" in parts[0]


async def test_u9_a_secret_in_a_key_is_hidden_and_who_knows_it_finds_its_line(open_web):
    async with open_web() as web:
        job_id = await web.trigger(lock_key="postgres://ann:hunter2@db/x")
        page = (await web.client.get(f"/ui/jobs/{job_id}")).text
        assert "hunter2" not in page
        told = await web.client.get(re.search(r'href="(/ui/concealed)"', page)[1])
        assert (told.status_code, "contains a secret" in told.text) == (404, True)
        text = (await web.client.get("/ui/key", params={"k": "postgres://ann:hunter2@db/x"})).text
        assert "Key postgres://***@db/x" in text
        assert "hunter2" not in re.sub(r'(href|value)="[^"]*"', "", text)
        assert (await web.client.get("/ui/key")).status_code == 422


@pytest.mark.slow
@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (360, "dark")])
async def test_u22_u23_a_key_s_page_has_no_fault_that_axe_finds_and_fits(open_web, open_tab, database, width, theme):
    async with open_web() as web, open_tab(web.url, width=width, color_scheme=theme) as tab:
        key = "cbr:" + "long" * 60
        for number in range(4):
            await web.trigger(lock_key=key, task=f"load.{'x' * 60 * number}")
        database.psql("UPDATE dl_jobs SET waits_for = 'lock' WHERE task <> 'load.'")
        database.psql("UPDATE dl_jobs SET status = 'running' WHERE task = 'load.'")
        await tab.go(f"/ui/key?k={key}")
        await tab.check_looks()

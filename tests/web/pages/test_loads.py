"""Pages of loads: their cursors, runs, writes of each day, failures, run and retry (E10, E12)."""

from __future__ import annotations

import re
from html import unescape

import pytest
from web_server import TOKENS, all_tokens

pytestmark = pytest.mark.requirement("E11")

LOADS = "/ui/loads"
HOSTILE = "a/../b?c#<script>alert(1)</script>\u202e" + "x" * 100


async def act(web, path, **fields):
    return await web.client.post(path, data=fields, headers={"Origin": web.url})


def fields_of(page):
    return {
        name: unescape(value) for name, value in re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', page)
    }


def ran(database, load, statuses, *, failures=0, error="HTTPError: 503"):
    """Add runs of a load, a day apart, the last one today, each with two segments; the failures are the last one's."""
    name, text = (given.replace("'", "''") for given in (load, error))
    for days, status in enumerate(reversed(statuses)):
        at = f"now() - interval '{days} d'"
        job_status = status if status in {"succeeded", "failed", "canceled", "running"} else "succeeded"
        database.psql(
            f"INSERT INTO dl_jobs (job_id, queue, task, lock_key, status, finished_at)"
            f" VALUES (gen_random_uuid(), 'etl', '{name}', 'k', '{job_status}', now());"
            f"INSERT INTO dl_etl_runs (run_id, name, kind, status, started_at, finished_at)"
            f" SELECT job_id, task, 'load', '{status}', {at}, {at} + interval '7 min' FROM dl_jobs"
            f" WHERE task = '{name}' AND NOT EXISTS (SELECT FROM dl_etl_runs WHERE run_id = job_id);"
            f"INSERT INTO dl_etl_tasks (run_id, ordinal, task, status, started_at, finished_at, summary)"
            f" SELECT run_id, 1, name, status, started_at, finished_at,"
            """ '{"counts": {"inserted": 4000, "updated": 212}}' FROM dl_etl_runs"""
            f" WHERE name = '{name}' AND NOT EXISTS (SELECT FROM dl_etl_tasks t WHERE t.run_id = dl_etl_runs.run_id);"
            f"INSERT INTO dl_etl_segments (run_id, task, segment, counts, committed_at)"
            """ SELECT run_id, task, 's' || i, '{"inserted": 1000, "responses": 7}', started_at"""
            f" FROM dl_etl_tasks, generate_series(1, 2) AS i WHERE task = '{name}' ON CONFLICT DO NOTHING"
        )
    database.psql(
        f"INSERT INTO dl_load_state (load, state, run_id)"
        f" SELECT '{name}', jsonb_build_object('kind', 'window', 'upto', now() - interval '9 h'), run_id"
        f" FROM dl_etl_runs WHERE name = '{name}' LIMIT 1;"
        f"INSERT INTO dl_etl_failures (run_id, load, segment, phase, key, error, sample)"
        f" SELECT run_id, '{name}', '2026-11', 'request', 'page ' || i, '{text}', 'password=swordfish99'"
        f" FROM generate_series(1, {failures}) AS i,"
        f" (SELECT run_id FROM dl_etl_runs WHERE name = '{name}' ORDER BY started_at DESC LIMIT 1) AS last"
    )


@pytest.mark.slow
async def test_loads_show_how_far_they_have_come_and_how_they_ran(open_web, database):
    async with open_web() as web:
        ran(database, "ecb.rates", ["succeeded", "succeeded_with_failures", "failed", "succeeded"], failures=3)
        ran(database, HOSTILE, ["canceled"])
        shown = (await web.client.get(LOADS)).text
        assert "<script>alert" not in shown
        signs = re.findall(r'href="/ui/runs/[^"]+" title="([^,]+),', shown)
        assert signs[1:] == ["succeeded", "succeeded with failures", "failed", "succeeded"]
        assert "4,212" in shown
        assert re.search(r'#failures">3</a>', shown)
        links = [unescape(link) for link in re.findall(r'<th scope="row"><a href="([^"]+)"', shown)]
        assert [(await web.client.get(link)).status_code for link in links] == [200, 200]
        for path in (f"{LOADS}?part=rows", "/ui/load?name=ecb.rates&part=rows"):
            part = await web.client.get(path)
            same = await web.client.get(path, headers={"If-None-Match": part.headers["ETag"]})
            assert same.status_code == 304
        assert (await web.client.get("/ui/load?name=nobody")).status_code == 404


async def test_a_load_shows_its_days_and_what_failed_without_secrets(open_web, database):
    async with open_web() as web:
        ran(database, "ecb.rates", ["succeeded", "failed", "succeeded"], failures=21)
        shown = (await web.client.get("/ui/load?name=ecb.rates")).text
        days = re.findall(r'data-label="Segments" class="number">(\d+)</td><td[^>]*>([\d,]+)<', shown)
        assert days == [("2", "2,000")] * 3
        assert "swordfish99" not in shown
        assert shown.count('<tr id="failure-') == 20
        [more] = re.findall(r'rel="next" href="([^"]+)"', shown)
        assert (await web.client.get(unescape(more))).text.count('<tr id="failure-') == 1


async def test_u15_failures_are_retried_alone_or_all_and_a_form_sent_twice_once(open_web, database):
    async with open_web() as web:
        ran(database, "ecb.rates", ["succeeded"], failures=2)
        database.psql("UPDATE dl_jobs SET task = 'ecb.rates', status = 'succeeded'")
        page = (await web.client.get("/ui/load?name=ecb.rates")).text
        ids = re.findall(r'name="failure" value="(\d+)">\s*<input type="hidden" name="once" value="([^"]+)"', page)
        assert len({once for _, once in ids}) == 2
        for said in ("Enqueued the job", "The job was already enqueued"):
            await act(web, f"{LOADS}/retry", name="ecb.rates", failure=ids[0][0], once=ids[0][1])
            assert f"{said}" in (await web.client.get("/ui/load?name=ecb.rates")).text
        asked = (await web.client.get(f"{LOADS}/retry?name=ecb.rates&part=dialog")).text
        assert "2 failures" in asked
        await act(web, f"{LOADS}/retry", **fields_of(asked), queue="etl")
        jobs = (await web.jobs.find()).jobs[:2]
        assert [(job.queue, job.lock_key, job.args["failures"]) for job in jobs] == [
            ("etl", "load:ecb.rates", "all"),
            ("etl", "load:ecb.rates", [int(ids[0][0])]),
        ]


async def test_a_load_is_run_with_a_span_and_settings_that_are_checked(open_web, database):
    async with open_web(tokens=all_tokens()) as web:
        ran(database, "ecb.rates", ["succeeded"])
        await act(web, "/ui/sign-in", token=TOKENS["operator"], to=LOADS)
        form = (await web.client.get(f"{LOADS}/run?name=ecb.rates")).text
        assert 'name="queue" type="text" value="etl"' in form
        fields = fields_of(form) | {"queue": "etl"}
        for wrong in ({"begin": "soon"}, {"pipeline": "[1]"}, {"pipeline": "{"}, {"name": "nobody"}):
            refused = await act(web, f"{LOADS}/run", **fields | wrong)
            assert refused.status_code == (404 if "name" in wrong else 422), wrong
        given = {"begin": "2026-11-01", "end": "2026-11-02T06:00:00Z", "pipeline": '{"rate_min": 1}'}
        assert (await act(web, f"{LOADS}/run", **fields | given)).status_code == 303
        [job] = (await web.jobs.find(limit=1)).jobs
        assert job.args == {"from": "2026-11-01", "to": "2026-11-02T06:00:00Z", "pipeline": {"rate_min": 1}}
        assert str(job.job_id) == fields["once"]
        await act(web, "/ui/sign-in", token=TOKENS["reader"], to=LOADS)
        assert (await act(web, f"{LOADS}/run", **fields)).status_code == 403


@pytest.mark.full
@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (360, "dark")])
async def test_u22_pages_of_loads_have_no_fault_and_fit(open_web, open_tab, database, width, theme):
    async with open_web() as web, open_tab(web.url, width=width, color_scheme=theme) as tab:
        ran(database, "ecb.rates", ["succeeded"] * 4 + ["failed", "succeeded_with_failures", "running"], failures=3)
        ran(database, HOSTILE, ["canceled"], failures=1, error=f"{HOSTILE}\n{'y' * 2_000}")
        await tab.go(LOADS)
        await tab.check_looks()
        await tab.go("/ui/load?name=ecb.rates")
        await tab.do(lambda page: page.click("summary >> nth=1"))
        await tab.check_looks()
        await tab.go(f"{LOADS}/run?name=ecb.rates")
        await tab.check_looks()

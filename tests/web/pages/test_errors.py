"""Pages of errors: groups with their bars, a group's jobs and texts, its retry, and the log (R2)."""

from __future__ import annotations

import re

import pytest
from web_server import TOKENS, all_tokens

from dataloader.web.server.limits import HttpLimits

pytestmark = pytest.mark.requirement("E11")

ERRORS = "/ui/errors"
HOSTILE = "<script>alert(1)</script>\u202e\x1b[31m" + "x" * 3_000


def fail(database, number, *, task="load.rates", error="HTTPError: 503 for page 7", status="failed", hours=6):
    """Add failed jobs, spread over some hours."""
    database.psql(
        "INSERT INTO dl_jobs (job_id, queue, task, lock_key, status, attempt, max_attempts, created_at)"
        f" SELECT gen_random_uuid(), 'load.cbr', '{task}', 'k' || i, 'running', 5, 5,"
        f" now() - i * interval '{hours} h' / {number} FROM generate_series(1, {number}) AS i"
    )
    escaped = error.replace("'", "''")
    available = "now() + interval '1 h'" if status == "queued" else "available_at"
    finished = "NULL" if status == "queued" else "now()"
    database.psql(
        f"UPDATE dl_jobs SET status = '{status}', error = '{escaped}', available_at = {available},"
        f" finished_at = {finished} WHERE status = 'running' AND task = '{task}'"
    )


async def group_of(web):
    [group] = re.findall(r'<tr id="group-([0-9a-f]{16})"', (await web.client.get(ERRORS)).text)
    return group


async def act(web, path, **fields):
    return await web.client.post(path, data=fields, headers={"Origin": web.url})


async def test_u6_errors_are_grouped_with_bars_and_filtered_by_the_address(open_web, database):
    async with open_web() as web:
        fail(database, 30)
        fail(database, 2, task="other", error="KeyError: 'x'", status="queued")
        shown = (await web.client.get(ERRORS)).text
        assert [*re.findall(r'data-label="Jobs" class="number">(\d+)<', shown)] == ["30", "2"]
        assert "HTTPError: # for page #" in shown
        bars = re.search(r'<svg class="bars".*?</svg>', shown)[0]
        assert bars.count("<rect") == 12
        assert 'href="/ui/errors?task=other"' in shown
        only = (await web.client.get(f"{ERRORS}?state=waiting")).text
        assert ("KeyError" in only, "HTTPError" in only) == (True, False)
        exact = (await web.client.get(f"{ERRORS}?exact=true&task=load.rates&state=")).text
        assert "HTTPError: 503 for page 7" in exact
        assert "No job matching the filter" in (await web.client.get(f"{ERRORS}?task=nobody")).text


async def test_u16_a_group_shows_its_jobs_and_texts_and_is_retried_once(open_web, database):
    async with open_web() as web:
        fail(database, 3, error="HTTPError: 503\nat line 7: password=swordfish99")
        group = await group_of(web)
        page = await web.client.get(f"{ERRORS}/{group}")
        assert page.text.count('<tr id="job-') == 3
        assert "at line 7" in page.text
        assert "swordfish99" not in page.text
        part = await web.client.get(f"{ERRORS}/{group}?part=rows")
        same = await web.client.get(f"{ERRORS}/{group}?part=rows", headers={"If-None-Match": part.headers["ETag"]})
        assert same.status_code == 304
        asked = await web.client.get(f"{ERRORS}/{group}/retry?part=dialog")
        assert "<html" not in asked.text
        assert "Retry 3 jobs" in asked.text
        done = await act(web, f"{ERRORS}/{group}/retry", shown=3, at="2020-01-01T00:00", state="failed")
        assert done.headers["Location"] == f"{ERRORS}/{group}"
        assert "Retried 3 jobs." in (await web.client.get(f"{ERRORS}/{group}")).text
        again = await act(web, f"{ERRORS}/{group}/retry", shown=3, state="failed")
        assert again.status_code == 303
        after = (await web.client.get(f"{ERRORS}/{group}")).text
        assert "Retried 0 jobs." in after
        assert "none has failed, or all were retried" in after
        assert database.psql("SELECT count(*) FROM dl_jobs WHERE status = 'queued'").strip() == "3"


async def test_u21_a_retry_at_an_instant_is_by_the_clock_of_the_zone_that_is_shown(open_web, database):
    async with open_web() as web:
        fail(database, 2)
        await act(web, "/ui/look", zone="Asia/Tokyo")
        group = await group_of(web)
        assert "Time zone: Asia/Tokyo" in (await web.client.get(f"{ERRORS}/{group}/retry")).text
        await act(web, f"{ERRORS}/{group}/retry", shown=2, at="2099-01-01T09:00")
        due = database.psql("SELECT DISTINCT available_at AT TIME ZONE 'UTC' FROM dl_jobs").strip()
        assert due == "2099-01-01 00:00:00"
        wrong = await act(web, f"{ERRORS}/{group}/retry", shown=2, at="tomorrow")
        assert (wrong.status_code, "such as 2026-11-23T12:00" in wrong.text) == (422, True)


async def test_u16_more_than_a_thousand_jobs_are_retried_only_by_their_number_typed(open_web, database):
    async with open_web() as web:
        fail(database, 1_001)
        group = await group_of(web)
        assert "Type 1001" in (await web.client.get(f"{ERRORS}/{group}/retry")).text
        for fields in ({"shown": 1_001}, {"shown": 1_001, "typed": "1000"}, {"shown": 3}, {}):
            assert (await act(web, f"{ERRORS}/{group}/retry", **fields)).status_code == 422
        await act(web, f"{ERRORS}/{group}/retry", shown=1_001, typed="1001")
        assert database.psql("SELECT count(*) FROM dl_jobs WHERE status = 'queued'").strip() == "1001"
        assert (await web.jobs.audit()).audit[0].action == "retry_group"


@pytest.mark.slow
async def test_u16_a_long_retry_continues_where_it_stopped(open_web, database):
    # A request ends after its first batch of 1,000.
    async with open_web(limits=HttpLimits(batches_s=0)) as web:
        fail(database, 2_500)
        group = await group_of(web)
        fields = {"shown": 2_500, "typed": "2500", "spread_min": "1"}
        answer, rounds = await act(web, f"{ERRORS}/{group}/retry", **fields), 1
        while (at := answer.headers["Location"]) != f"{ERRORS}/{group}":
            page = (await web.client.get(at)).text
            assert "Retried 1,000 jobs so far" in page
            fields = dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', page))
            answer, rounds = await act(web, f"{ERRORS}/{group}/retry", spread_min="1", **fields), rounds + 1
        assert rounds == 3
        assert database.psql("SELECT count(*) FROM dl_jobs WHERE status = 'queued'").strip() == "2500"


async def test_u14_the_retry_of_a_group_is_for_admins(open_web, database):
    async with open_web(tokens=all_tokens()) as web:
        fail(database, 1)
        await act(web, "/ui/sign-in", token=TOKENS["operator"], to=ERRORS)
        group = await group_of(web)
        assert 'disabled title="Needs the role admin."' in (await web.client.get(ERRORS)).text
        assert (await web.client.get(f"{ERRORS}/{group}/retry")).status_code == 403
        assert (await act(web, f"{ERRORS}/{group}/retry", shown=1)).status_code == 403


@pytest.mark.slow
async def test_the_log_of_errors_is_looked_through_piece_by_piece(open_web, database):
    async with open_web() as web:
        fail(database, 1, task="rare", error=HOSTILE)
        database.psql(
            "INSERT INTO dl_errors (at, job_id, task, queue, attempt, status, error_group, error)"
            " SELECT now(), gen_random_uuid(), 't', 'q', 1, 'failed', 7, 'odd' FROM generate_series(1, 45000)"
        )
        page = (await web.client.get(f"{ERRORS}/log?task=rare")).text
        found = 0
        while "Search further" in page:
            assert '<tr id="error-' not in page
            assert "Searched 20,000 rows" in page
            [further] = re.findall(r'<a href="([^"]+)">Search further', page)
            page, found = (await web.client.get(further.replace("&amp;", "&"))).text, found + 1
        assert found == 2
        assert page.count('<tr id="error-') == 1
        assert "<script>alert" not in page
        assert "\u202e" not in page
        everything = (await web.client.get(f"{ERRORS}/log")).text
        assert everything.count('<tr id="error-') == 20
        assert "Next page" in everything
        job_id = database.psql("SELECT job_id FROM dl_errors LIMIT 1").strip()
        one = (await web.client.get(f"{ERRORS}/log?job_id={job_id}")).text
        assert one.count('<tr id="error-') == 1
        gone = await web.client.get(f"{ERRORS}/0000000000000000")
        assert (gone.status_code, "the error log has no job with the error" in gone.text) == (404, True)
        assert (await web.client.get(f"{ERRORS}/nonsense")).status_code == 422


@pytest.mark.full
@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (360, "dark")])
async def test_u22_pages_of_errors_have_no_fault_and_fit(open_web, open_tab, database, width, theme):
    async with open_web() as web, open_tab(web.url, width=width, color_scheme=theme) as tab:
        fail(database, 40)
        fail(database, 3, task="a-task-whose-name-has-no-space-" + "x" * 160, error=HOSTILE)
        fail(database, 7, task="load.countries", error="KeyError: 'iso'", status="queued", hours=1)
        await tab.go(ERRORS)
        await tab.check_looks()
        await tab.do(lambda page: page.click("a[data-dialog] >> nth=0"))
        await tab.do(lambda page: page.wait_for_selector("dialog[open] #field-at"))
        await tab.check_looks()
        await tab.do(lambda page: page.keyboard.press("Escape"))
        await tab.do(lambda page: page.click("tbody th a >> nth=0"))
        await tab.check_looks()
        await tab.go(f"{ERRORS}/log")
        await tab.do(lambda page: page.click("summary >> nth=0"))
        await tab.check_looks()

"""Pages of statistics and of the operators' log (R3, Q4)."""

from __future__ import annotations

import re
from html import unescape

import pytest
from web_server import TOKENS, all_tokens

from dataloader.web.pages.svg import stacked

pytestmark = pytest.mark.requirement("E11")

STATS, AUDIT = "/ui/stats", "/ui/audit"
HOSTILE = "a/../b?c#<script>alert(1)</script>\u202e" + "x" * 100


async def act(web, path, **fields):
    return await web.client.post(path, data=fields, headers={"Origin": web.url})


def ended(database, task, outcome, runs, total_s, max_s, *, hours_ago=0, queue="q", folded=True):
    at = f"date_trunc('hour', now(), 'UTC') - interval '{hours_ago} h'"
    table, column = ("dl_run_stats", "hour") if folded else ("dl_run_stats_new", "at")
    name = task.replace("'", "''")
    database.psql(
        f"INSERT INTO {table} ({column}, queue, task, outcome, runs, total_s, max_s)"
        f" VALUES ({at}, '{queue}', '{name}', '{outcome}', {runs}, {total_s}, {max_s})"
    )


@pytest.mark.slow
async def test_statistics_sum_up_each_task_and_its_hours(open_web, database):
    async with open_web() as web:
        ended(database, "load.rates", "succeeded", 90, 180, 7)
        ended(database, "load.rates", "succeeded", 5, 20, 9, folded=False)
        ended(database, "load.rates", "failed", 5, 100, 40, hours_ago=2, queue="other")
        ended(database, "load.rates", "succeeded", 1_000, 1, 1, hours_ago=100)
        ended(database, HOSTILE, "canceled", 1, 1, 1)
        shown = (await web.client.get(STATS)).text
        assert "<script>alert" not in shown
        first = re.search(r'<tr id="task-1-load.rates">.*?</tr>', shown, re.DOTALL)[0]
        cells = [
            unescape(text) for text in re.findall(r'data-label="[^"]+" class="number">(?:<[^>]+>)?([^<]+)<', first)
        ]
        assert cells == ["100", "5", "3.0 s", "40 s", "5 min"]
        assert "succeeded 95, failed 5" in first
        assert [path.count("M") for path in re.findall(r'<path class="[^"]+" d="([^"]*)"', first)] == [1, 1]
        [link] = re.findall(r'<th scope="row"><a href="([^"]+)"', first)
        one = (await web.client.get(f"{unescape(link)}&table=true")).text
        assert one.count('<tr id="task-') == 1
        assert one.count('data-label="Hour"') == 2
        other = (await web.client.get(f"{STATS}?queue=other&by=day")).text
        assert "failed 5" in other
        assert "succeeded 95" not in other
        assert "No run matching the filter has ended" in (await web.client.get(f"{STATS}?task=nobody")).text
        for wrong in ("from=2026-01-02T00:00&to=2026-01-01T00:00", "from=2020-01-01T00:00", "from=x"):
            assert (await web.client.get(f"{STATS}?{wrong}")).status_code == 422


@pytest.mark.slow
async def test_too_many_statistics_are_reported_and_those_of_the_past_do_not_refresh(open_web, database):
    async with open_web() as web:
        sums = (
            "INSERT INTO dl_run_stats (hour, queue, task, outcome, runs, total_s, max_s)"
            " SELECT date_trunc('hour', now(), 'UTC') - interval '1 h', 'q', i::text, 'succeeded', 1, 1, 1"
            " FROM generate_series({}, {}) AS i"
        )
        database.psql(sums.format(1, 10_000))
        assert "too many runs for one page" not in (await web.client.get(STATS)).text
        database.psql(sums.format(10_001, 10_001))
        assert "too many runs for one page" in (await web.client.get(STATS)).text
        part = await web.client.get(f"{STATS}?part=rows")
        assert float(part.headers["Refresh-In"]) >= 10
        past = await web.client.get(f"{STATS}?from=2026-01-01T00:00&to=2026-01-02T00:00&part=rows")
        assert "Refresh-In" not in past.headers


@pytest.mark.slow
async def test_a_time_before_all_times_keeps_no_page_from_answering(open_web):
    async with open_web() as web:
        web.client.cookies.set(f"dl_look_{web.url.rpartition(':')[2]}", "America/New_York|system|on")
        for path in ("/ui/stats", AUDIT):
            for at in ("0001-01-01T00:00Z", "9999-12-31T23:59Z"):
                for name in ("from", "to"):
                    assert (await web.client.get(path, params={name: at})).status_code in {200, 422}, (path, name, at)


def test_bars_are_visible_for_small_values():
    drawn = str(stacked([(1_000, 0), (0, 0), (1, 1)], "x", height=20))
    assert re.findall(r'd="([^"]*)"', drawn) == ["M0 20h5v-20h-5zM12 20h5v-1h-5z", "M12 19h5v-2h-5z"]


@pytest.mark.slow
async def test_u14_the_audit_is_for_admins_and_says_who_did_what_to_what(open_web, database):
    async with open_web(tokens=all_tokens()) as web:
        await act(web, "/ui/sign-in", token=TOKENS["operator"], to="/ui/queues")
        await act(web, "/ui/queues/pause", queue="load.cbr")
        job_id = (await web.jobs.enqueue("t", queue="q")).job_id
        await web.jobs.cancel(job_id)
        assert (await web.client.get(AUDIT)).status_code == 403
        assert '<span class="off" title="Needs the role admin.">' in (await web.client.get("/ui/queues")).text
        await act(web, "/ui/sign-in", token=TOKENS["chief"], to="/ui/queues")
        shown = (await web.client.get(AUDIT)).text
        assert 'data-key="a" title="Audit" aria-current="page">' in shown
        actions = re.findall(r'<th scope="row"><a href="[^"]+">([^<]+)</a>', shown)
        assert actions == ["cancel", "pause"]
        assert f'title="{job_id}"' in shown
        assert 'queue <a href="/ui/jobs?queue=load.cbr">load.cbr</a>' in shown
        for asked, found in (
            ("actor=operator", ["pause"]),
            (f"job_id={job_id}", ["cancel"]),
            ("to=2020-01-01T00:00", []),
        ):
            page = (await web.client.get(f"{AUDIT}?{asked}")).text
            assert re.findall(r'<th scope="row"><a href="[^"]+">([^<]+)</a>', page) == found, asked
            # A bulk operation is listed for none of its jobs: a search for one job has a note on where it is.
            assert ('href="/ui/audit?action=start_bulk"' in page) == asked.startswith("job_id"), asked


async def test_the_audit_names_a_process_and_many_things_without_a_link(open_web, database):
    async with open_web() as web:
        database.psql(
            "INSERT INTO dl_audit (actor, action, detail) VALUES"
            """ ('ann', 'repair_process', '{"type": "pay", "process_id": "order-7"}'),"""
            """ ('ann', 'repair_processes', '{"changed": 3}'), ('ann', 'cancel_many', '{}'), ('ann', 'sign', '{}')"""
        )
        shown = (await web.client.get(AUDIT)).text
        subjects = re.findall(r'data-label="Subject">(.*?)</td>', shown, re.DOTALL)
        assert subjects[:3] == ["–", "many jobs", "many processes"]
        assert '<a href="/ui/process?type=pay&amp;id=order-7">pay order-7</a>' in subjects[3]


@pytest.mark.slow
async def test_the_audit_is_looked_through_piece_by_piece_and_without_secrets(open_web, database):
    async with open_web() as web:
        database.psql(
            "INSERT INTO dl_audit (actor, action, detail) VALUES ('ann', 'password=swordfish99',"
            ' \'{"password": "swordfish99"}\');'
            "INSERT INTO dl_audit (actor, action) SELECT 'bob', 'cancel' FROM generate_series(1, 45000)"
        )
        page, looks = (await web.client.get(f"{AUDIT}?actor=ann")).text, 0
        while "Search further" in page:
            assert '<tr id="audit-' not in page
            [further] = re.findall(r'<a href="([^"]+)">Search further', page)
            page, looks = (await web.client.get(unescape(further))).text, looks + 1
        assert looks == 2
        assert page.count('<tr id="audit-') == 1
        assert "swordfish99" not in page
        assert (await web.client.get(f"{AUDIT}?job_id=x")).status_code == 422


@pytest.mark.full
@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (360, "dark")])
async def test_u22_pages_of_statistics_and_audit_have_no_fault_and_fit(open_web, open_tab, database, width, theme):
    async with open_web() as web, open_tab(web.url, width=width, color_scheme=theme) as tab:
        for hour in range(23):
            ended(database, "load.rates", "succeeded", 90 + hour * 7 % 40, 180, 7, hours_ago=hour)
            if hour % 5 == 0:
                ended(database, "load.rates", "failed", 10 + hour, 100, 40, hours_ago=hour)
        ended(database, HOSTILE, "canceled", 1, 1, 1)
        ended(database, "report", "expired", 3, 1, 1, hours_ago=4)
        await web.jobs.pause("load.cbr")
        await web.jobs.pause(HOSTILE[:60])
        await web.jobs.cancel((await web.jobs.enqueue("t", queue="q")).job_id)
        await tab.go(STATS)
        await tab.check_looks()
        await tab.do(lambda page: page.click("text=Show the bars as a table"))
        await tab.check_looks()
        await tab.go(AUDIT)
        await tab.do(lambda page: page.click("summary >> nth=0"))
        await tab.check_looks()

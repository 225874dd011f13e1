"""Bulk operations from the list of jobs: confirmed, counted, typed, followed, stopped (U16)."""

from __future__ import annotations

import re

import pytest
from conditions import until
from web_server import TOKENS, all_tokens

from dataloader.jobs.contract import Change
from dataloader.jobs.listings import JobFilter
from dataloader.store.queue.bulk_batches import do_batch

pytestmark = pytest.mark.requirement("E11")

HOSTILE = "<script>alert(1)</script>\"'" + "x" * 160
ADD = """
INSERT INTO dl_jobs (job_id, queue, task, lock_key, keyed, status, finished_at, error)
SELECT gen_random_uuid(), '{queue}', 't', i::text, false, '{status}',
       CASE WHEN '{status}' = 'failed' THEN now() END, 'boom'
FROM generate_series(1, {number}) AS i
"""


@pytest.fixture
def add(database):
    """Return a function that adds `number` jobs of a status and a queue."""

    def add(number, status="failed", queue="q"):
        database.psql(ADD.format(number=number, status=status, queue=queue.replace("'", "''")))

    return add


def fields_of(html):
    """Return the fields that the confirmation form would send."""
    found = re.findall(r'<input[^>]*type="hidden"[^>]*name="([^"]+)"[^>]*value="([^"]*)"', html)
    fields = {}
    for name, value in found:
        fields.setdefault(name, []).append(value)
    return fields


async def confirm(web, html, **more):
    return await web.client.post("/ui/bulk", data=fields_of(html) | more, headers={"Origin": web.url})


async def test_u16_all_that_match_are_counted_confirmed_frozen_and_followed(open_web, add):
    add(60)
    add(3, queue="other")
    async with open_web() as web:
        listed = (await web.client.get("/ui/jobs?queue=q&status=failed")).text
        assert 'name="all"' in listed
        assert "all that match (60)" in listed
        asked = (await web.client.get("/ui/bulk/new?queue=q&status=failed&all=true&action=retry")).text
        assert "Retry: 60 jobs" in asked
        assert "the jobs that match the filter that are failed, canceled or lost now: 60 jobs" in asked
        assert 'name="typed"' not in asked
        begun = await confirm(web, asked)
        where = begun.headers["Location"]
        assert re.fullmatch(r"/ui/bulk/[0-9a-f-]{36}", where)
        # A form that is sent twice starts one operation.
        assert (await confirm(web, asked)).headers["Location"] == where
        assert len((await web.bulk.find()).bulk) == 1
        shown = (await web.client.get(where)).text
        assert "0 of 60" in shown
        assert "in progress" in shown
        await do_batch(web.services.database)
        shown = await web.client.get(f"{where}?part=rows")
        assert "60 of 60" in shown.text
        assert "done" in shown.text
        assert "Refresh-In" not in shown.headers
        assert "Retry" in (await web.client.get("/ui/bulk")).text


async def test_u16_more_than_a_thousand_are_typed(open_web, add):
    add(1_204)
    async with open_web() as web:
        address = "/ui/bulk/new?queue=q&all=true&action=retry"
        asked = (await web.client.get(address)).text
        assert "Type 1204 to continue" in asked
        for typed in ({}, {"typed": "12"}, {"typed": "all"}):
            again = await confirm(web, asked, **typed)
            assert (again.status_code, "The typed number does not match the number of jobs." in again.text) == (
                422,
                True,
            )
        assert (await web.bulk.find()).bulk == []
        done = await confirm(web, asked, typed="1,204")
        assert done.status_code == 303
        [act] = (await web.bulk.find()).bulk
        assert act.jobs == 1_204


async def test_u16_a_selection_that_has_grown_a_lot_must_be_confirmed_again(open_web, add):
    add(3)
    async with open_web() as web:
        asked = (await web.client.get("/ui/bulk/new?queue=q&all=true&action=retry")).text
        add(1_100)
        again = await confirm(web, asked)
        assert again.status_code == 422
        assert "Type 1103 to continue" in again.text
        assert (await web.bulk.find()).bulk == []


async def test_u16_chosen_jobs_get_another_priority(open_web):
    async with open_web() as web:
        ids = [await web.trigger(lock_key=key) for key in "abc"]
        asked = (await web.client.get("/ui/bulk/new", params={"action": "set_priority", "job": ids[:2]})).text
        assert "those of the 2 selected jobs that are queued now: 2 jobs" in asked
        refused = await confirm(web, asked)
        assert (refused.status_code, "priority" in refused.text) == (422, True)
        begun = await confirm(web, asked, priority="7")
        await do_batch(web.services.database)
        jobs = [await web.jobs.get(job_id) for job_id in map(type((await web.bulk.find()).bulk[0].bulk_id), ids)]
        assert [job.priority for job in jobs] == [7, 7, 100]
        assert "Priority 7: 2 jobs" in (await web.client.get(begun.headers["Location"])).text


async def test_u16_an_empty_or_unlimited_selection_and_a_search_are_refused_with_a_reason(open_web):
    async with open_web() as web:
        for query, reason in (
            ("action=cancel", "select jobs in the list"),
            ("action=cancel&all=true", "choose a status, a queue or another criterion first"),
            ("action=cancel&all=true&args=a%3D1", "the search reads every job"),
            ("action=delete&all=true&queue=q", "action"),
        ):
            answer = await web.client.get(f"/ui/bulk/new?{query}")
            assert (answer.status_code, reason in answer.text) == (422, True), query


async def test_u14_many_jobs_are_for_admins(open_web, add):
    add(1)
    async with open_web(tokens=all_tokens()) as web:
        data = {"token": TOKENS["operator"], "to": "/ui/jobs"}
        await web.client.post("/ui/sign-in", data=data, headers={"Origin": web.url})
        listed = (await web.client.get("/ui/jobs?queue=q")).text
        assert listed.count('disabled title="Needs the role admin."') == 4
        assert (await web.client.get("/ui/bulk/new?queue=q&all=true&action=retry")).status_code == 403


@pytest.mark.full
async def test_u16_rows_are_chosen_asked_about_in_a_dialog_and_stopped(open_web, open_tab, add):
    add(12)
    async with open_web() as web, open_tab(web.url) as tab:
        await tab.go("/ui/jobs?queue=q")
        assert await tab.do(lambda page: page.is_disabled("button[value=retry]"))
        boxes = "tbody input[name=job] >> nth={}"
        await tab.do(lambda page: page.click(boxes.format(1)))
        await tab.do(lambda page: page.click(boxes.format(4), modifiers=["Shift"]))
        assert await tab.text("#chosen") == "4 selected"
        # The selection remains when rows are added.
        await web.jobs.enqueue("t", queue="q")
        await until(lambda: tab.do(lambda page: page.locator("#newer").count()))
        assert await tab.text("#chosen") == "4 selected"
        await tab.do(lambda page: page.click("button[value=retry]"))
        await tab.do(lambda page: page.wait_for_selector("dialog[open] h1:text('Retry: 4 jobs')"))
        await tab.do(lambda page: page.click("dialog [data-close]"))
        await tab.do(lambda page: page.click("#choose-page"))
        assert await tab.text("#chosen") == "12 selected"
        await tab.do(lambda page: page.check("input[name=all]"))
        assert await tab.text("#chosen") == "All that match"
        await tab.do(lambda page: page.click("button[value=cancel]"))
        await tab.do(lambda page: page.wait_for_selector("dialog[open] h1:text('Cancel: 1 job')"))
        await tab.do(lambda page: page.click("dialog button.bad"))
        await tab.do(lambda page: page.wait_for_selector("h1:text('Cancel: 1 job')"))
        await tab.do(lambda page: page.click("main button:text('Stop')"))
        assert "Stopped. Changes already made remain." in await tab.text()


@pytest.mark.full
@pytest.mark.parametrize(("theme", "width"), [("light", 1280), ("dark", 360)])
async def test_u10_u22_u23_bulk_pages_look_well_with_any_data(open_web, open_tab, add, theme, width):
    add(1_200, queue=HOSTILE)
    async with open_web() as web, open_tab(web.url, width=width, color_scheme=theme) as tab:
        wanted = JobFilter(queue=HOSTILE)
        act = await web.bulk.start(Change(action="retry"), wanted)
        await do_batch(web.services.database)
        await web.bulk.start(Change(action="set_priority", priority=3), wanted)
        await tab.go(f"/ui/bulk/{act.bulk_id}")
        await tab.check_looks()
        await tab.go("/ui/bulk")
        await tab.check_looks()
        await tab.do(lambda page: page.goto(f"{web.url}/ui/jobs?status=failed"))
        await tab.check_looks()
        await tab.go("/ui/bulk/new?status=failed,queued&task=t&all=true&action=cancel")
        await tab.check_looks()

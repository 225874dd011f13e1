"""Pages of tasks and suppliers: limits, reasons why nothing starts, rate limits, actions of operators (S1, S4, S5)."""

from __future__ import annotations

import re
from html import unescape

import pytest
from web_server import TOKENS, all_tokens

from dataloader.jobs.errors import BadRequest
from dataloader.store.limits.take import take_units
from dataloader.web.pages.limit_words import SUPPLIER_LIMITS, TASK_LIMITS, changes, shown_texts
from dataloader.web.pages.svg import week

pytestmark = pytest.mark.requirement("E11")

TASKS, SUPPLIERS = "/ui/tasks", "/ui/suppliers"
HOSTILE = "a/../b?c#<script>alert(1)</script>\u202e" + "x" * 100


async def act(web, path, **fields):
    return await web.client.post(path, data=fields, headers={"Origin": web.url})


def fields_of(page):
    return {
        name: unescape(value) for name, value in re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', page)
    }


async def declare(web, database, *names):
    for name in names:
        quoted = name.replace("'", "''")
        database.psql(f"INSERT INTO dl_tasks (task, layout, declared_by) VALUES ('{quoted}', 1, 'host:1')")
    await web.limits.set_supplier("hr", {"rate_limits": [[10, 60], [100, 3600]], "zone": "UTC"})


@pytest.mark.slow
async def test_a_task_says_why_its_jobs_do_not_start(open_web, database):
    async with open_web() as web:
        await declare(web, database, "employee", HOSTILE)
        limits = {"max_running": 3, "supplier": "hr", "retry_delay_s": 90, "work_periods": ["MON-SUN 00:00-24:00"]}
        await web.limits.set_tasks({"employee": limits})
        shown = (await web.client.get(TASKS)).text
        assert "Pause before a retry: 1 min 30 s" in shown
        assert "<script>alert" not in shown
        links = [unescape(link) for link in re.findall(r'<th scope="row"><a href="([^"]+)"', shown)]
        assert [(await web.client.get(link)).status_code for link in links] == [200, 200]
        part = await web.client.get(f"{TASKS}?part=rows")
        same = await web.client.get(f"{TASKS}?part=rows", headers={"If-None-Match": part.headers["ETag"]})
        assert same.status_code == 304
        done = await act(web, f"{TASKS}/pause", name="employee")
        assert done.headers["Location"] == TASKS
        assert "Paused employee: none of its jobs start, in any queue." in (await web.client.get(TASKS)).text
        assert "paused" in (await web.client.get("/ui/task?name=employee")).text
        await act(web, f"{TASKS}/resume", name="employee")
        await web.limits.set_tasks({"employee": {"work_periods": ["MON 00:00-00:01"]}})
        page = (await web.client.get("/ui/task?name=employee")).text
        assert "</svg>outside its work periods</span>" in page or "Mon 00:00–00:01" in page
        assert page.count('class="week-open"') == 1
        assert (await web.client.get("/ui/task?name=nobody")).status_code == 404


@pytest.mark.slow
async def test_u15_limits_are_set_and_given_back_and_what_others_changed_meanwhile_stays(open_web, database):
    async with open_web() as web:
        await declare(web, database, "employee")
        form = (await web.client.get(f"{TASKS}/limits?name=employee")).text
        fields = fields_of(form)
        await web.limits.set_tasks({"employee": {"cost": 2}})
        await act(
            web, f"{TASKS}/limits", **fields, max_running="3", work_periods="MON-FRI 00:00-06:00\r\nSAT 10:00-12:00"
        )
        page = (await web.client.get("/ui/task?name=employee")).text
        assert "Set: Work periods, Max running. Applies from the next claim on." in page
        [state] = (await web.limits.tasks()).tasks
        assert state.override == {
            "max_running": 3,
            "work_periods": ["MON-FRI 00:00-06:00", "SAT 10:00-12:00"],
            "cost": 2,
        }
        fields = fields_of((await web.client.get(f"{TASKS}/limits?name=employee")).text)
        await act(web, f"{TASKS}/limits", **fields, work_periods="always", cost="2")
        assert (await web.limits.task("employee")).override == {"work_periods": [], "cost": 2}
        for given in ({"max_running": "many"}, {"max_running": "0"}, {"supplier": "nobody"}, {"was": "{}"}):
            refused = await act(web, f"{TASKS}/limits", **fields | {"work_periods": "always", "cost": "2"} | given)
            assert refused.status_code == 422, given


@pytest.mark.slow
async def test_a_task_is_removed_only_as_somebody_has_chosen(open_web, database):
    async with open_web(tokens=all_tokens()) as web:
        await declare(web, database, "t")
        await act(web, "/ui/sign-in", token=TOKENS["operator"], to=TASKS)
        assert (await act(web, f"{TASKS}/remove", name="t")).status_code == 403
        assert (await act(web, f"{TASKS}/limits", name="t", was="{}")).status_code == 403
        await act(web, "/ui/sign-in", token=TOKENS["chief"], to=TASKS)
        await web.jobs.enqueue("t", queue="q")
        assert "Jobs that have not ended" in (await web.client.get(f"{TASKS}/remove?name=t&part=dialog")).text
        assert (await act(web, f"{TASKS}/remove", name="t")).status_code == 409
        assert (await act(web, f"{TASKS}/remove", name="t", jobs="cancel")).status_code == 303
        assert (await web.client.get("/ui/task?name=t")).status_code == 404
        assert database.psql("SELECT status FROM dl_jobs").strip() == "canceled"


@pytest.mark.slow
async def test_a_supplier_shows_what_of_its_rate_limits_is_used_and_whose_turn_it_is(open_web, database):
    async with open_web() as web:
        await declare(web, database, "employee")
        await web.limits.set_tasks({"employee": {"supplier": "hr"}})
        await take_units(web.services.database, "hr", 4, 10)
        job_id = (await web.jobs.enqueue("employee", queue="q", lock_key="k")).job_id
        database.psql(
            f"UPDATE dl_jobs SET status = 'running', token = 7, lane = NULL WHERE job_id = '{job_id}';"
            "UPDATE dl_sources SET holder = 7, held_until = now() + interval '1 h';"
        )
        shown = (await web.client.get(SUPPLIERS)).text
        # The request in progress counts, too.
        assert re.search(r"[56] of 10 used in 1 min", shown)
        assert str(job_id) in shown
        assert 'href="/ui/task?name=employee"' in shown
        page = (await web.client.get("/ui/supplier?name=hr")).text
        assert "10 / 60; 100 / 3600" in page
        fields = fields_of((await web.client.get(f"{SUPPLIERS}/limits?name=hr")).text)
        await act(web, f"{SUPPLIERS}/limits", **fields, rate_limits="5 / 60", zone="Europe/Berlin")
        assert (await web.limits.supplier("hr")).override == {
            "rate_limits": [[5, 60]],
            "zone": "Europe/Berlin",
        }
        assert (await act(web, f"{SUPPLIERS}/limits", name="new", was="{}")).status_code == 404
        await web.limits.set_supplier("hr", {"rate_limits": [{"requests": 9, "per": "day", "zone": "Europe/Berlin"}]})
        assert "of 9 used in the day of Europe/Berlin" in (await web.client.get("/ui/supplier?name=hr")).text
        await act(web, f"{SUPPLIERS}/pause", name="hr")
        assert "its supplier is paused" in (await web.client.get("/ui/task?name=employee")).text
        await act(web, f"{SUPPLIERS}/resume", name="hr")
        assert (await act(web, f"{SUPPLIERS}/remove", name="hr")).status_code == 409


def test_a_form_of_limits_changes_only_what_was_changed_in_it():
    override = {"rate_limits": [[100, 60], [5, 0.5]], "margin_s": 2}
    was = shown_texts(SUPPLIER_LIMITS, override)
    same = {"rate_limits": "100 / 60\r\n5 / 0.5", "margin_s": "2"}
    assert changes(SUPPLIER_LIMITS, was, same) == {}
    assert changes(SUPPLIER_LIMITS, was, same | {"margin_s": None, "rate_limits": "none"}) == {
        "margin_s": None,
        "rate_limits": [],
    }
    assert changes(SUPPLIER_LIMITS, was, same | {"rate_limits": "1/2; 3 / 4"}) == {"rate_limits": [[1, 2.0], [3, 4.0]]}
    by_day = {"rate_limits": [{"requests": 9, "per": "day", "zone": "Europe/Berlin"}]}
    typed = {"rate_limits": "9 / day / Europe/Berlin"}
    assert changes(SUPPLIER_LIMITS, was, same | typed) == by_day
    assert changes(SUPPLIER_LIMITS, shown_texts(SUPPLIER_LIMITS, by_day), typed) == {}
    for wrong in ({"rate_limits": "many"}, {"rate_limits": "x / 1"}, {"margin_s": "y"}):
        with pytest.raises(BadRequest):
            changes(SUPPLIER_LIMITS, was, same | wrong)
    for lost in ("", "[]", "{}", "7"):
        with pytest.raises(BadRequest):
            changes(TASK_LIMITS, lost, {})


def test_a_week_shows_a_period_over_midnight_on_both_days():
    drawn = str(week([(0, 60), (6 * 1440 + 1380, 7 * 1440)], "open"))
    assert re.findall(r"<title>([^<]+)", drawn) == ["Mon 00:00–01:00", "Sun 23:00–24:00"]


@pytest.mark.full
@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (360, "dark")])
async def test_u22_pages_of_tasks_and_suppliers_have_no_fault_and_fit(open_web, open_tab, database, width, theme):
    async with open_web() as web, open_tab(web.url, width=width, color_scheme=theme) as tab:
        await declare(web, database, "employee", "report", HOSTILE)
        periods = {"work_periods": ["MON-FRI 22:00-06:00", "SAT,SUN 10:00-24:00"], "zone": "Europe/Berlin"}
        await web.limits.set_tasks({"employee": {"max_running": 3, "supplier": "hr"} | periods})
        await web.limits.pause_task("report")
        await web.limits.set_supplier("the-name-of-a-supplier-" + "y" * 120, periods)
        await take_units(web.services.database, "hr", 7, 10)
        for path in (
            TASKS,
            "/ui/task?name=employee",
            SUPPLIERS,
            "/ui/supplier?name=hr",
            f"{TASKS}/limits?name=employee",
        ):
            await tab.go(path)
            await tab.check_looks()

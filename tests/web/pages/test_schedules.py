"""Pages of schedules: next times with changes of the clock, last jobs, left-out times, and actions (R7)."""

from __future__ import annotations

import re
import threading
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from dataloader.jobs.schedules import Missed, Overlap, Schedule
from dataloader.web.pages import schedules
from dataloader.web.pages.schedule_words import planned_times, policies

pytestmark = pytest.mark.requirement("E11")

SCHEDULES = "/ui/schedules"
HOSTILE = "a/../b?c#<script>alert(1)</script>\u202e" + "x" * 100


async def act(web, path, **fields):
    return await web.client.post(path, data=fields, headers={"Origin": web.url})


async def nightly(web, **fields):
    spec = {"name": "nightly", "task": "report", "cron": "30 2 * * *", "zone": "Europe/Berlin", "job": {"queue": "q"}}
    return await web.schedules.put(Schedule(**spec | fields))


def fields_of(page):
    return dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', page))


async def test_schedules_show_when_they_are_due_and_how_their_last_jobs_ended(open_web, database):
    async with open_web() as web:
        await nightly(web)
        await nightly(web, name=HOSTILE, cron=None, every_s=5_400, zone="UTC")
        database.psql(
            "INSERT INTO dl_jobs (job_id, queue, task, lock_key, schedule, planned_at, status, finished_at)"
            " SELECT gen_random_uuid(), 'q', 'report', 'k', 'nightly', now() - i * interval '1 d',"
            " (CASE i WHEN 2 THEN 'failed' ELSE 'succeeded' END)::dl_status, now() FROM generate_series(1, 9) AS i"
        )
        shown = (await web.client.get(SCHEDULES)).text
        assert "30 2 * * *" in shown
        assert "every 1 h 30 min" in shown
        assert "<script>alert" not in shown
        signs = re.findall(r'<span class="signs">(.*?)</span></td>', shown, re.DOTALL)[1]
        assert re.findall(r'title="(\w+),', signs) == ["succeeded"] * 3 + ["failed", "succeeded"]
        links = re.findall(r'<th scope="row"><a href="([^"]+)"', shown)
        assert [(await web.client.get(link)).status_code for link in links] == [200, 200]
        part = await web.client.get(f"{SCHEDULES}?part=rows")
        same = await web.client.get(f"{SCHEDULES}?part=rows", headers={"If-None-Match": part.headers["ETag"]})
        assert same.status_code == 304


async def test_events_with_payloads_of_another_program_are_shown_on_the_page(open_web, database):
    async with open_web() as web:
        await nightly(web)
        database.psql(
            "INSERT INTO dl_schedule_events (name, kind, payload)"
            " SELECT 'nightly', kind, payload::jsonb FROM unnest('{left_out,paused,backfilled}'::text[]) AS kind,"
            """ unnest(ARRAY['5', '[1]', '"text"', 'null', '{"why": [], "times": {}}']) AS payload"""
        )
        page = await web.client.get("/ui/schedule?name=nightly")
        assert page.status_code == 200
        assert page.text.count("backfilled: 0 jobs") == 5


async def test_pages_of_schedules_are_masked_beside_the_event_loop(open_web, monkeypatch):
    threads = set()

    def masked_here(record, masked=schedules.masked):
        threads.add(threading.current_thread())
        return masked(record)

    monkeypatch.setattr(schedules, "masked", masked_here)
    async with open_web() as web:
        await nightly(web, args={"n": 1})
        for path in (SCHEDULES, "/ui/schedule?name=nightly"):
            threads.clear()
            assert (await web.client.get(path)).status_code == 200
            assert threads
            assert threading.current_thread() not in threads


def test_a_change_of_the_clock_between_planned_times_is_marked():
    schedule = Schedule(name="s", task="t", cron="30 2 * * *", zone="Europe/Berlin")
    begin = datetime(2026, 10, 24, tzinfo=UTC)
    times = [at for _, at in zip(range(3), schedule.times(begin).after(begin), strict=False)]
    found = list(planned_times(times, ZoneInfo("Europe/Berlin"), begin))
    assert [one.there for one in found] == [
        "Sat 2026-10-24 02:30:00 +0200",
        "Sun 2026-10-25 02:30:00 +0200",
        "Mon 2026-10-26 02:30:00 +0100",
    ]
    assert [one.changed for one in found] == [None, None, "clock moved back by 1 h since the previous time"]


def test_policies_are_said_in_words():
    said = " ".join(
        policies(
            Schedule(
                name="s",
                task="t",
                every_s=60,
                missed=Missed.ALL,
                missed_within_s=3_600,
                overlap=Overlap.CANCEL,
                jitter_s=5,
                pause_on_failure=True,
            )
        )
    )
    assert "the newest 100 of the last 1 h are caught up" in said
    assert "is canceled when the next job is due" in said
    assert "up to 5.0 s after its planned time" in said
    assert "schedule is paused when" in said
    others = [Schedule(name="s", task="t", every_s=60, overlap=overlap) for overlap in Overlap]
    assert len({text for schedule in others for text in policies(schedule)}) == 6


async def test_the_page_of_a_schedule_says_what_was_left_out_and_why_it_is_paused(open_web, database):
    async with open_web() as web:
        await nightly(web, missed="skip", args={"password": "swordfish99", "n": 2**60})
        database.psql(
            "INSERT INTO dl_schedule_events (name, kind, payload) VALUES ('nightly', 'left_out', '"
            '{"why": "overlap", "times": 3, "first": "2026-10-25T00:30:00+00:00", "last": "2026-10-27T01:30:00+00:00"}'
            "'), ('nightly', 'odd', NULL), ('nightly', 'left_out', '{\"why\": 7, \"first\": \"x\"}')"
        )
        await act(web, "/ui/look", zone="Europe/Berlin")
        await act(web, f"{SCHEDULES}/pause", name="nightly")
        shown = (await web.client.get("/ui/schedule?name=nightly")).text
        assert "3 skipped: an earlier job had not ended" in shown
        assert "2026-10-25 02:30:00+02:00" in shown
        assert "No jobs start at these times: the schedule is paused." in shown
        assert shown.count("02:30:00 +") == 10
        assert shown.count('<th scope="col">Europe/Berlin</th>') == 1
        await act(web, "/ui/look", zone="UTC")
        elsewhere = (await web.client.get("/ui/schedule?name=nightly")).text
        assert [elsewhere.count(f'<th scope="col">{zone}</th>') for zone in ("UTC", "Europe/Berlin")] == [1, 1]
        assert "swordfish99" not in shown
        assert str(2**60) in shown
        await act(web, f"{SCHEDULES}/resume", name="nightly", to="/ui/schedule?name=nightly")
        assert not (await web.schedules.get("nightly")).paused
        database.psql("UPDATE dl_schedules SET retired_at = now()")
        assert "no program declares it anymore" in (await web.client.get("/ui/schedule?name=nightly")).text
        assert (await web.client.get("/ui/schedule?name=nobody")).status_code == 404


async def test_u15_run_now_sent_twice_is_done_once(open_web, database):
    async with open_web() as web:
        await nightly(web)
        for page in ("/ui/schedule?name=nightly", f"{SCHEDULES}/run?name=nightly&part=dialog"):
            fields = fields_of((await web.client.get(page)).text)
            said = []
            for _ in range(2):
                done = await act(web, f"{SCHEDULES}/run", name="nightly", once=fields["once"], to=fields["to"])
                said.append((await web.client.get(done.headers["Location"])).text)
            assert f"Enqueued the job {fields['once']} in q." in said[0]
            assert f"The job was already enqueued: {fields['once']} in q." in said[1]
        assert database.psql("SELECT count(*) FROM dl_jobs").strip() == "2"
        assert "once" not in fields_of((await web.client.get("/ui/schedule?name=nightly&part=rows")).text)


async def test_u15_a_backfill_shows_its_times_first_and_adds_them_once(open_web, database):
    async with open_web() as web:
        await nightly(web)
        await act(web, "/ui/look", zone="Europe/Berlin")
        asked = (await web.client.get(f"{SCHEDULES}/backfill?name=nightly")).text
        assert "Time zone: Europe/Berlin." in asked
        assert 'method="post" action="/ui/schedules/backfill"' not in asked
        span = {"name": "nightly", "begin": "2026-10-24T00:00", "end": "2026-10-27T00:00", "again": "true"}
        tried = await web.client.get(f"{SCHEDULES}/backfill", params=span)
        assert "Jobs are enqueued for 3 planned times." in tried.text
        assert "2026-10-25 02:30:00+02:00" in tried.text
        assert database.psql("SELECT count(*) FROM dl_jobs").strip() == "0"
        fields = fields_of(tried.text)
        for added in (3, 0):
            await act(web, f"{SCHEDULES}/backfill", **fields)
            assert f"Enqueued {added} jobs" in (await web.client.get("/ui/schedule?name=nightly")).text
        assert database.psql("SELECT count(*) FROM dl_jobs").strip() == "3"
        none = await web.client.get(f"{SCHEDULES}/backfill", params=span | {"again": ""})
        assert "All planned times of this period have a job." in none.text
        assert "3 times already have a job" in none.text
        wrong = await web.client.get(f"{SCHEDULES}/backfill", params=span | {"end": "2026-10-01T00:00"})
        assert (wrong.status_code, "must be later than begin" in wrong.text) == (422, True)


@pytest.mark.slow
async def test_u16_a_backfill_of_more_than_a_thousand_jobs_is_typed(open_web, database):
    async with open_web() as web:
        await nightly(web, cron="* * * * *")
        span = {"name": "nightly", "begin": "2026-10-24T00:00", "end": "2026-10-25T00:00"}
        fields = fields_of((await web.client.get(f"{SCHEDULES}/backfill", params=span)).text)
        assert fields["shown"] == "1440"
        assert (await act(web, f"{SCHEDULES}/backfill", **fields)).status_code == 422
        assert (await act(web, f"{SCHEDULES}/backfill", **fields, typed="1,440")).status_code == 303


@pytest.mark.full
@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (360, "dark")])
async def test_u22_pages_of_schedules_have_no_fault_and_fit(open_web, open_tab, database, width, theme):
    async with open_web() as web, open_tab(web.url, width=width, color_scheme=theme) as tab:
        await nightly(web, args={"region": "EU", "n": 3}, pause_on_failure=True)
        await nightly(web, name=HOSTILE, cron=None, every_s=5_400, zone="UTC")
        await nightly(web, name="hourly", cron="@hourly", zone="America/New_York")
        await web.schedules.pause("hourly")
        database.psql(
            "INSERT INTO dl_jobs (job_id, queue, task, lock_key, schedule, planned_at, status, finished_at)"
            " SELECT gen_random_uuid(), 'q', 'report', 'k', 'nightly', now() - i * interval '1 d',"
            " (CASE i WHEN 2 THEN 'failed' ELSE 'succeeded' END)::dl_status, now() FROM generate_series(1, 9) AS i;"
            "INSERT INTO dl_schedule_events (name, kind, payload) VALUES ('nightly', 'left_out', '"
            '{"why": "overlap", "times": 3, "first": "2026-10-25T00:30:00+00:00", "last": "2026-10-27T01:30:00+00:00"}'
            "')"
        )
        await tab.go(SCHEDULES)
        await tab.check_looks()
        await tab.go("/ui/schedule?name=nightly")
        await tab.check_looks()
        begin = (datetime.now(UTC) - timedelta(days=3)).strftime("%Y-%m-%dT%H:%M")
        await tab.do(lambda page: page.click("a[data-dialog]"))
        await tab.do(lambda page: page.fill("dialog #field-begin", begin))
        await tab.do(lambda page: page.click("dialog button:text('Show the times')"))
        await tab.do(lambda page: page.wait_for_selector("button:text('Enqueue')"))
        await tab.check_looks()


SPECS = (
    "{}", "[1]", '"text"', '{"task": "t", "cron": "x"}', '{"task": "t", "cron": 7}', '{"task": "t", "every_s": "x"}',
    '{"task": "t", "cron": "* * * * *", "args": 3}', '{"task": "t", "cron": "* * * * *", "zone": []}',
    '{"task": "t", "cron": "* * * * *", "start_at": 3}', '{"task": "t", "cron": "* * * * *", "password": "hunter2"}',
)  # fmt: skip
"""Specifications that other programs may have written into the table."""


@pytest.mark.slow
async def test_an_unreadable_spec_is_shown_with_its_error_and_hides_no_other(open_web, database):
    async with open_web() as web:
        await nightly(web)
        database.psql(
            ";".join(
                "INSERT INTO dl_schedules (name, spec, task, origin, stored_by, next_at)"
                f" VALUES ('bad {number}', '{spec}', 't', 'code', 'w', now())"
                for number, spec in enumerate(SPECS)
            )
        )
        shown = (await web.client.get(SCHEDULES)).text
        assert shown.count("unreadable</span>") == len(SPECS)
        assert "30 2 * * *" in shown
        assert "task: is required" in shown
        listed = {one["name"]: one for one in (await web.client.get("/api/v1/schedules")).json()["schedules"]}
        assert listed["nightly"]["fault"] is None
        for number in range(len(SPECS)):
            assert listed[f"bad {number}"]["fault"]
            page = await web.client.get("/ui/schedule", params={"name": f"bad {number}"})
            assert page.status_code == 200
            assert "no jobs are enqueued until it is stored again" in page.text
            assert "hunter2" not in page.text
            assert (await web.client.get(f"/api/v1/schedules/bad {number}/next")).status_code == 422
        answer = await act(web, "/ui/schedules/pause", name="bad 1", to=SCHEDULES)
        assert answer.status_code == 303
        assert (await nightly(web, name="bad 1")).fault is None


@pytest.mark.slow
async def test_options_that_no_job_can_have_are_refused_when_a_schedule_is_put(open_web):
    async with open_web() as web:
        for job, field in (
            ({"queue": "q", "priority": "x"}, "job.priority"),
            ({"queue": "q", "status": "succeeded"}, "job.status"),
            ({"queue": 5}, "job.queue"),
            ({"lease_ttl_sec": [1]}, "job.lease_ttl_sec"),
        ):
            answer = await web.client.put("/api/v1/schedules/s", json={"task": "t", "every_s": 1, "job": job})
            assert (answer.status_code, [error["path"] for error in answer.json()["errors"]]) == (422, [field])
        assert (await web.client.get("/api/v1/schedules")).json()["schedules"] == []

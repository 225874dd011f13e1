"""A job's page: its text for waiting, running and ended jobs, and the actions of an operator."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from conditions import until
from web_server import TOKENS, all_tokens

from dataloader.jobs.states import Status

pytestmark = pytest.mark.requirement("E11")

ATTEMPTS = """
INSERT INTO dl_job_events (job_id, queue, ts, kind, payload) VALUES
 ('{id}', 'q', now() - interval '60 s', 'picked', '{{"attempt": 1, "worker": "host-a:1"}}'),
 ('{id}', 'q', now() - interval '58 s', 'log', '{{"level": "error", "message": "503 for page 7", "fields": {{"page": 7}}}}'),
 ('{id}', 'q', now() - interval '50 s', 'requeue', '{{"reason": "retry", "attempt": 1, "error": "HTTPError: 503", "delay_s": 5}}'),
 ('{id}', 'q', now() - interval '45 s', 'requeue', '{{"reason": "lock_key"}}'),
 ('{id}', 'q', now() - interval '40 s', 'picked', '{{"attempt": 2, "worker": "host-b:1"}}'),
 ('{id}', 'q', now() - interval '30 s', '{end}', '{{"attempt": 2, "error": "{error}"}}')
"""  # noqa: E501 - one line an event


async def page_of(web, job_id, path=""):
    answer = await web.client.get(f"/ui/jobs/{job_id}{path}")
    assert answer.status_code == 200, answer.text
    return re.sub(r"\s+", " ", answer.text)


async def act(web, job_id, what, **fields):
    answer = await web.client.post(f"/ui/jobs/{job_id}/{what}", data=fields, headers={"Origin": web.url})
    assert answer.status_code == 303, answer.text
    return re.sub(r"\s+", " ", (await web.client.get(answer.headers["Location"])).text)


def end(database, job_id, status="failed", error="HTTPError: 503"):
    database.psql(
        f"UPDATE dl_jobs SET status = '{status}', error = '{error}', started_at = created_at, finished_at = now()"
        f" WHERE job_id = '{job_id}'"
    )
    database.psql(ATTEMPTS.format(id=job_id, end=status, error=error))


async def test_an_ended_job_shows_its_attempts_log_and_event_history(open_web, database):
    async with open_web() as web:
        job_id = await web.trigger(args={"page": 7})
        end(database, job_id)
        text = await page_of(web, job_id)
        rows = re.findall(r"<strong>Attempt (\d)</strong><span><span class=\"badge bad\"><svg.*?</svg>([^<]+)<", text)
        assert rows == [("2", "failed"), ("1", "failed")]
        assert 'aria-label="1 failed 10 s, delay 5.0 s, queued 5.0 s, 2 failed 10 s, ' in text
        for told in ("10 s", "host-a:1", "host-b:1", "503 for page 7", "requeue: lock_key", "<dt>Created", "<dt>Ended"):
            assert told in text, told
        assert "Refresh-In" not in (await web.client.get(f"/ui/jobs/{job_id}?part=job")).headers
        log = await page_of(web, job_id, "/log?level=error")
        assert ("503 for page 7" in log, "host-a:1" in log) == (True, False)
        assert "503 for page 7" in (await web.client.get(f"/ui/jobs/{job_id}?part=log")).text
        assert (await web.client.get("/ui/jobs/00000000-0000-7000-8000-000000000001")).status_code == 404


async def test_a_waiting_job_shows_why_and_a_running_one_when_its_lease_ends(open_web, database):
    async with open_web() as web:
        soon = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
        job_id = await web.trigger(available_at=soon)
        text = await page_of(web, job_id)
        assert "</svg>Not due yet</h2> <p>It is not due until <time" in text
        assert "Then: No worker serves the queue q." in text
        assert '<a href="/ui/task?name=t">t</a>' in text
        part = await web.client.get(f"/ui/jobs/{job_id}?part=job")
        assert float(part.headers["Refresh-In"]) == 1
        tag = {"If-None-Match": part.headers["ETag"]}
        assert (await web.client.get(f"/ui/jobs/{job_id}?part=job", headers=tag)).status_code == 304
        database.psql(
            "UPDATE dl_jobs SET status = 'running', token = 7, claimed_by = 'host-b:1', started_at = now(),"
            " heartbeat_at = now(), lease_expires_at = now() + interval '60 s', progress = '{\"rows\": 7}'"
        )
        text = await page_of(web, job_id)
        assert "<dt>Worker</dt><dd>host-b:1</dd> <dt>Heartbeat</dt><dd><time" in text
        assert 'title="Without another heartbeat, the job is recovered then.">expires <time' in text
        assert "<i>rows</i> 7" in text
        assert text.index("<h2>Args") < text.rindex("<h2>Progress")
        # Args do not change: a script keeps those that are shown.
        part = (await web.client.get(f"/ui/jobs/{job_id}?part=job")).text
        assert ("Progress" in part, "Args" in part, '<div id="asked" data-keep>' in part) == (True, False, True)
        database.psql("UPDATE dl_jobs SET lease_expires_at = now() - interval '9 s'")
        assert "Its lease expired <time" in await page_of(web, job_id)


async def test_u9_integers_are_exact_and_secrets_are_hidden(open_web, database):
    async with open_web() as web:
        job_id = await web.trigger(
            args={"id": 9007199254740993, "big": 123456789012345678901234567890, "password": "hunter2"},
            lock_key="postgres://ann:hunter2@db/x",
        )
        end(database, job_id, error="login failed: password=hunter2")
        for path in ("", "/log", "/compare", "/cancel", "/again"):
            text = (await page_of(web, job_id, path)).replace("&#34;", '"')
            assert "hunter2" not in text, path
        text = (await page_of(web, job_id)).replace("&#34;", '"')
        assert "<i>id</i> 9007199254740993" in text
        assert "<i>big</i> 123456789012345678901234567890" in text
        assert '<i>password</i> "***"' in text


async def test_a_long_value_is_shown_by_its_beginning_with_a_link_to_all_of_it(open_web, database):
    args = {"items": [{"n": n, "text": "a" * 50} for n in range(9_000)], "password": "hunter2"}
    async with open_web() as web:
        job_id = await web.trigger(args=args)
        database.psql(f"UPDATE dl_jobs SET status = 'succeeded', result = '[\"{'b' * 100_000}\"]'")
        answer = await web.client.get(f"/ui/jobs/{job_id}")
        assert len(answer.content) < 300_000
        text = answer.text.replace("&#34;", '"')
        assert text.count("Download the whole value") == 2
        for name, whole in (("args", args | {"password": "***"}), ("result", ["b" * 100_000])):
            address = f"/ui/jobs/{job_id}?whole={name}"
            assert f'href="{address}"' in text
            assert (await web.client.get(address)).json() == whole
        short = await web.trigger(args={"a": 1}, lock_key="other")
        assert "Download the whole value" not in await page_of(web, short)


async def test_args_are_compared_with_those_of_the_last_success(open_web, database):
    async with open_web() as web:
        good = await web.trigger(args={"page": 6, "source": "ecb", "token": "a"})
        end(database, good, "succeeded")
        bad = await web.trigger(args={"page": 7, "source": "ecb", "token": "b"}, lock_key="other")
        text = (await page_of(web, bad, "/compare")).replace("&#34;", '"')
        assert '<del>- "page": 6,</del>' in text
        assert '<ins>+ "page": 7,</ins>' in text
        assert text.count('"source"') == 1
        assert "None of the latest" in await page_of(web, good, "/compare")


async def test_a_job_links_to_jobs_that_it_enqueued_and_compares_only_with_a_success(open_web, database):
    async with open_web() as web:
        job_id, other = await web.trigger(), await web.trigger(lock_key="other")
        end(database, job_id)
        text = await page_of(web, job_id)
        assert ("enqueued by this job" in text, "Compare args with" in text) == (False, False)
        for number in range(3):
            await web.trigger(lock_key=f"part-{number}", root=job_id)
        database.psql("UPDATE dl_jobs SET status = 'succeeded', finished_at = now() WHERE lock_key = 'part-1'")
        text = await page_of(web, job_id)
        assert f'<a href="/ui/jobs?root={job_id}">3 jobs enqueued by this job</a>' in text
        assert '<progress value="1" max="3"' in text
        assert f'href="/ui/jobs/{job_id}/compare"' in text
        assert "Compare args with" not in await page_of(web, other)


async def test_u15_cancel_asks_and_is_done_once(open_web):
    async with open_web() as web:
        job_id = await web.trigger()
        assert "The job is queued, and is canceled immediately." in await page_of(web, job_id, "/cancel")
        shown = await act(web, job_id, "cancel")
        assert "Canceled." in shown
        # The operator is shown.
        assert f'href="/ui/audit?job_id={job_id}"' in shown
        assert f'action="/ui/jobs/{job_id}/retry"' in shown
        await act(web, job_id, "cancel")
        kinds = [event.kind for event in (await web.jobs.events(job_id=UUID(job_id))).events]
        assert kinds == ["queued", "canceled"]


@pytest.mark.slow
async def test_u15_a_retry_sent_twice_is_done_once_and_can_be_undone(open_web, database):
    async with open_web() as web:
        job_id = await web.trigger()
        end(database, job_id)
        seen = re.search(r'name="seen" value="([^"]+)"', await page_of(web, job_id))[1]
        shown = await act(web, job_id, "retry", seen=seen)
        assert "Queued again" in shown
        assert f'<form method="post" action="/ui/jobs/{job_id}/cancel"' in shown
        assert '<input type="hidden" name="waiting" value="true">' in shown
        assert "No change: the job is queued now." in await act(web, job_id, "retry", seen=seen)
        database.psql(f"UPDATE dl_jobs SET status = 'running', claimed_by = 'w' WHERE job_id = '{job_id}'")
        assert "No change: the job is running now." in await act(web, job_id, "cancel", waiting="true")
        assert not (await web.jobs.get(UUID(job_id))).cancel_requested
        end(database, job_id)
        assert "No change: the job is failed now." in await act(web, job_id, "retry", seen=seen)
        assert (await web.jobs.get(UUID(job_id))).status is Status.FAILED


@pytest.mark.slow
async def test_u15_priority_is_set_and_taken_back_and_run_now_is_said(open_web):
    async with open_web() as web:
        job_id = await web.trigger(available_at=(datetime.now(UTC) + timedelta(hours=1)).isoformat())
        assert 'value="100"' in await page_of(web, job_id, "/priority")
        shown = await act(web, job_id, "priority", priority="5")
        assert "Changed the priority from 100 to 5." in shown
        assert re.search(r'name="priority" value="100"><input type="hidden" name="seen" value="5"> ?<button', shown)
        await act(web, job_id, "priority", priority="7")
        undone = await act(web, job_id, "priority", priority="100", seen="5")
        assert "No change: the priority is 7 now." in undone
        assert "from 7 to 100" in await act(web, job_id, "priority", priority="100", seen="7")
        due = (await web.jobs.get(UUID(job_id))).available_at
        shown = await act(web, job_id, "run-now")
        assert "The job is due now." in shown
        until = re.search(r'name="until" value="([^"]+)"', shown)[1].replace("&#43;", "+")
        assert "The job is delayed again." in await act(web, job_id, "postpone", until=until)
        job = await web.jobs.get(UUID(job_id))
        assert (job.available_at, job.waits_for) == (due, "time")
        await act(web, job_id, "run-now")
        await act(web, job_id, "cancel")
        assert "No change: the job is canceled now." in await act(web, job_id, "run-now")
        assert "No change: the job is canceled now." in await act(web, job_id, "postpone", until=until)


@pytest.mark.slow
async def test_u15_run_again_shows_the_args_and_adds_one_job_however_often_it_is_sent(open_web, database):
    async with open_web() as web:
        job_id = await web.trigger(args={"id": 9007199254740993, "password": "hunter2"}, priority=7)
        end(database, job_id)
        asked = await page_of(web, job_id, "/again")
        assert ("9007199254740993" in asked, "hunter2" in asked) == (True, False)
        once = re.search(r'name="once" value="([^"]+)"', asked)[1]
        for _ in range(2):
            assert "Enqueued a new job." in await act(web, job_id, "again", once=once)
        jobs = (await web.jobs.find()).jobs
        assert [str(job.job_id) for job in jobs] == [once, job_id]
        assert (jobs[0].args, jobs[0].priority, jobs[0].lock_key) == (jobs[1].args, 7, "k")


@pytest.mark.slow
async def test_u14_a_reader_sees_disabled_buttons_and_gets_a_403_for_actions(open_web):
    async with open_web(tokens=all_tokens()) as web:
        body = {"queue": "q", "task": "t", "lock_key": "k"}
        operator = {"Authorization": f"Bearer {TOKENS['operator']}"}
        added = await web.client.post("/api/v1/jobs/trigger", json=body, headers=operator)
        job_id = added.json()["job_id"]
        await web.client.post("/ui/sign-in", data={"token": TOKENS["reader"]}, headers={"Origin": web.url})
        text = await page_of(web, job_id)
        assert text.count('disabled title="Needs the role operate."') == 3
        for what in ("cancel", "retry", "run-now", "priority", "again"):
            answer = await web.client.post(f"/ui/jobs/{job_id}/{what}", headers={"Origin": web.url})
            assert answer.status_code == 403, what


@pytest.mark.slow
async def test_u7_u24_a_job_is_canceled_in_a_dialog_and_its_link_copied(open_web, open_tab):
    async with open_web() as web, open_tab(web.url) as tab:
        job_id = await web.trigger(args={"page": 7})
        await tab.go(f"/ui/jobs/{job_id}")
        assert "No attempt of 5 yet" in await tab.text(".sub")
        await tab.do(lambda page: page.click("text=Copy as"))
        await tab.do(lambda page: page.click("button:text('Copy the link')"))
        await until(lambda: tab.text(".copies"), lambda text: "Copied" in text or "Selected" in text)
        assert f"{web.url}/ui/jobs/{job_id}" in await tab.text(".copies")
        await tab.do(lambda page: page.click("text=Cancel…"))
        await until(lambda: tab.text("dialog"), lambda text: "canceled immediately" in text)
        await tab.do(lambda page: page.click("dialog button:text('Cancel the job')"))
        await until(lambda: tab.text("main"), lambda text: "Canceled." in text)


@pytest.mark.full
@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (360, "dark")])
async def test_u22_u23_a_job_s_pages_have_no_fault_that_axe_finds_and_fit(open_web, open_tab, database, width, theme):
    async with open_web() as web, open_tab(web.url, width=width, color_scheme=theme) as tab:
        ended = await web.trigger(args={"hostile": "<b>" + "x" * 2_000}, queue="load." + "long" * 40)
        end(database, ended, error="HTTPError: " + "y" * 3_000)
        waiting = await web.trigger(lock_key="b", after=[await web.trigger(lock_key="c")])
        for path in (f"/ui/jobs/{ended}", f"/ui/jobs/{waiting}", f"/ui/jobs/{ended}/again", f"/ui/jobs/{ended}/log"):
            await tab.go(path)
            await tab.check_looks()
            if path.endswith((ended, waiting)):
                await tab.do(lambda page: page.click("summary:text('Event history')"))
                await tab.check_looks()


async def test_u10_text_of_clients_and_handlers_is_shown_and_never_runs(open_web, database):
    hostile = "<script>alert(1)</script>\u202e\x1b[31m"
    async with open_web() as web:
        database.psql(
            "INSERT INTO dl_jobs (job_id, queue, task, lock_key, producer, error, progress, args) VALUES"
            f" (gen_random_uuid(), '{hostile}', '{hostile}', '{hostile}', '{hostile}', '{hostile}',"
            """ '{"a": "<script>alert(1)</script>"}', '{"<script>alert(1)</script>": 1}')"""
        )
        [job] = (await web.jobs.find()).jobs
        database.psql(
            f"INSERT INTO dl_job_events (job_id, queue, kind, payload) VALUES ('{job.job_id}', 'q', '{hostile}', null),"
            f" ('{job.job_id}', 'q', 'log', jsonb_build_object('level', 'info', 'message', '{hostile}',"
            f" 'fields', jsonb_build_object('{hostile}', '{hostile}')))"
        )
        for path in ("", "/log", "/compare", "/cancel", "/again", "/priority"):
            text = await page_of(web, job.job_id, path)
            assert "<script>alert" not in text, path
            assert not re.search("[\u202e\x1b]", text), path
        assert "No worker serves the queue &lt;script&gt;" in await page_of(web, job.job_id)

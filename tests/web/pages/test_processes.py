"""Pages of durable processes: the list and its search, one process with its timeline, actions, groups of errors."""

from __future__ import annotations

import os
import re
from html import unescape
from pathlib import Path
from uuid import uuid4

import pytest
from web_server import TOKENS, all_tokens

from dataloader.flows.processes import Done, Fail, Process, Processes, Refuse, Timer
from dataloader.jobs.process_requests import ProcessRequest
from dataloader.testing import process_tester
from dataloader.web.server.limits import HttpLimits

pytestmark = pytest.mark.requirement("E11", "P1")

LIST = "/ui/processes"
PAGE = "/ui/process?type=pay&id=1"
HOSTILE = "<script>alert(1)<b>\"'" + "x" * 150 + "\u202e"


async def act(web, path, **fields):
    return await web.client.post(path, data=fields, headers={"Origin": web.url})


async def sign_in(web, name):
    answer = await web.client.post("/ui/sign-in", data={"token": TOKENS[name]}, headers={"Origin": web.url})
    assert answer.status_code == 303, answer.text


async def said(web, answer):
    """Return the message of the page after an action."""
    assert answer.status_code == 303, answer.text
    text = (await web.client.get(answer.headers["Location"])).text
    return unescape(re.search(r'<div class="said panel" role="status">.*?<span>(.*?)</span>', text)[1])


def plain(html):
    """Return the words of a page."""
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", html)).split())


def a_type():
    """Return a type whose steps follow their arguments."""
    processes = Processes()
    kind = processes.define("pay", state=dict)

    @kind.init
    async def begin(p: Process, args: dict) -> Done:
        return Done("begun", state={"n": 0, "password": "hunter2"}, events=["begun"], next=Timer(after_s=900))

    @kind.call
    async def add(p: Process, n: int) -> Done | Refuse:
        return Refuse("it is too much") if n > 9 else Done(n, state=p.state | {"n": n}, events=[{"added": n}] * n)

    @kind.timeout
    async def due(p: Process) -> Fail:
        return Fail(f"the bank refused {p.process_id}", final=True)

    @kind.repair
    async def mend(p: Process, args: dict | None) -> Done:
        return Done("mended", events=["mended"], next=Timer(after_s=900))

    return processes


@pytest.mark.slow
async def test_p1_a_process_shows_its_state_its_timer_and_a_timeline_of_tasks(open_web, database):
    async with process_tester(database.dsn, a_type()) as tester, open_web() as web:
        ask = tester.processes
        await ask.start("pay", "1", {"token": "hunter2"}, metadata={"customer": "ann", "secret": "hunter2"})
        await ask.call("pay", "1", "add", 7)
        with pytest.raises(Exception, match="too much"):
            await ask.call("pay", "1", "add", 10)
        html = (await web.client.get(PAGE)).text
        assert "hunter2" not in html
        text = plain(html)
        assert "Waiting for its timer. Its timeout runs, unless a call arrives first:" in text
        assert "customer ann" in text
        rows = [plain(row) for row in re.findall(r'<tr id="task-\d+">.*?</tr>', html, re.DOTALL)]
        assert [row.split(" ")[0] for row in rows] == ["timeout", "call", "call", "start"]
        assert "refused" in rows[1]
        assert "→ it is too much" in rows[1]
        assert re.search(r'→ 7 2 \{"added": 7\} 3 .* 6 \{"added": 7\} more$', rows[2]), rows[2]
        assert rows[3].endswith("1 begun")
        # A step has a separate page, and so has the whole history.
        task = re.search(r'/ui/process/task/(\d+)">call add', html)[1]
        shown = plain((await web.client.get(f"/ui/process/task/{task}")).text)
        assert "Refused it is too much Args Download 10" in shown
        events = plain((await web.client.get("/ui/process/events?type=pay&id=1&after=7")).text)
        assert ("8 2" in events, '{"added": 7}' in events, '"begun"' in events) == (True, True, False)
        await tester.advance(900)
        failed = plain((await web.client.get(PAGE)).text)
        assert "the bank refused 1" in failed
        assert "In error: repair it, or resume it to try the failed timeout again." in failed
        await ask.remove("pay", "1")
        gone = await web.client.get(PAGE)
        assert (gone.status_code, "there is no process pay/1" in gone.text) == (404, True)


HOSTILE_ROWS = """
INSERT INTO dl_workers (worker, host, pid, version, queues, tasks, seen_at) VALUES
  ('host-b:7', 'host-b', 7, '1.4.0', '{{"process.pay": 8}}', '{{process.pay.v1}}', now());
INSERT INTO dl_processes (type, process_id, version, status, status_changed_at, created_at, detail, error_group,
                          corrupted_by, aux_state, metadata, last_event_id)
  SELECT '{it}', '{it}' || i, 3, (ARRAY['init', 'running', 'error'])[1 + i % 3], now() - make_interval(mins => i),
         now() - make_interval(hours => i), CASE WHEN i % 3 = 2 THEN '{it} ' || repeat('y', 3000) END,
         CASE WHEN i % 3 = 2 THEN i % 2 END, NULL, jsonb_build_object('{it}', '{it}'),
         jsonb_build_object('{it}', '{it}', 'n', 12345678901234567890, 'c', 'ann'), 3
  FROM generate_series(1, 6) AS i;
INSERT INTO dl_process_tasks (key, type, kind, method, status, args, context, idempotency_key, response, error,
                              started_at, finished_at)
  SELECT key, type, 'call', '{it}', s, to_jsonb('{it}'::text), to_jsonb('{it}'::text), '{it}' || key || s || i,
         to_jsonb('{it}'::text), CASE WHEN s = 'error' THEN '{it}' END, now() - interval '7 s',
         CASE WHEN s <> 'waiting' THEN now() END
  FROM dl_processes, unnest('{{waiting,finished,error,cancelled}}'::text[]) AS s, generate_series(1, 4) AS i
  WHERE type <> 'pay';
INSERT INTO dl_process_events (key, event_id, task_id, at, payload)
  SELECT p.key, n, t.task_id, t.finished_at, to_jsonb('{it}'::text)
  FROM dl_processes p CROSS JOIN generate_series(1, 3) AS n
  CROSS JOIN LATERAL (SELECT max(task_id) AS task_id, max(finished_at) AS finished_at FROM dl_process_tasks
                      WHERE key = p.key AND status = 'finished') AS t WHERE p.type <> 'pay';
"""


@pytest.mark.full
@pytest.mark.parametrize(("theme", "width"), [("light", 1280), ("dark", 360)])
async def test_u10_u22_u23_processes_look_well_with_any_data(open_web, open_tab, database, theme, width):
    options = {"width": width, "color_scheme": theme}
    async with open_web() as web:
        async with process_tester(database.dsn, a_type()) as tester:
            ask = tester.processes
            for number in range(3):
                await ask.start("pay", f"order-{number}", {"amount": 5}, metadata={"customer": "ann", "n": number})
            await ask.call("pay", "order-1", "add", 3)
            await tester.advance(900)
            await ask.start("pay", "order-7", {"amount": 5}, metadata={"customer": "bob"})
            await ask.call("pay", "order-7", "add", 3)
            with pytest.raises(Exception, match="too much"):
                await ask.call("pay", "order-7", "add", 10)
        await ask_later(web, "order-7")
        quoted = HOSTILE.replace("'", "''")
        async with open_tab(web.url, **options, expected=[422]) as tab:
            for path in (
                LIST, "/ui/process?type=pay&id=order-7", "/ui/process?type=pay&id=order-1", "/ui/processes/errors",
                "/ui/processes/new", "/ui", "/ui/processes/deliveries",
            ):  # fmt: skip
                await tab.go(path)
                await tab.check_looks()
                await rename_picture(tab, path)
            await tab.go("/ui/process?type=pay&id=order-7")
            await tab.do(lambda page: page.click("text=Call…"))
            await tab.do(lambda page: page.fill("#field-method", "add"))
            await tab.do(lambda page: page.fill("#field-args", "{5"))
            await tab.do(lambda page: page.click("dialog button"))
            assert "args: is not JSON" in await tab.text()
            await tab.check_looks()
            database.psql(HOSTILE_ROWS.format(it=quoted))
            [task] = database.psql("SELECT min(task_id) FROM dl_process_tasks WHERE type <> 'pay'").split()
            await tab.go(f"/ui/process/task/{task}")
            await tab.check_looks()
            await tab.go(f"{LIST}?status=error")
            await tab.check_looks()
            await rename_picture(tab, "hostile list")
            await tab.do(lambda page: page.click("tbody th a >> nth=0"))
            await tab.check_looks()
            await rename_picture(tab, "hostile one")


async def ask_later(web, process_id):
    """Send calls that no worker takes."""
    for number in range(3):
        request = ProcessRequest(type="pay", process_id=process_id, kind="call", method="add", args=number)
        await web.processes.ask(request)


async def rename_picture(tab, name):
    """Keep a picture next to the others of the same page."""
    if folder := os.environ.get("SCREENSHOTS"):
        there = Path(folder) / f"{tab.page_name()}.png"
        there.rename(there.with_name(f"{re.sub('[^a-z0-9]+', '-', name)}-{tab.page_name().rpartition('-')[2]}.png"))


@pytest.mark.slow
async def test_u6_u8_processes_are_found_by_the_query_and_never_by_a_secret(open_web, database):
    database.psql(
        "INSERT INTO dl_processes (type, process_id, status, metadata, detail, error_group)"
        " SELECT (ARRAY['pay', 'ship'])[1 + i % 2], i::text, (ARRAY['running', 'error'])[1 + i % 2],"
        " jsonb_build_object('customer', 'c' || i % 3, 'n', i, 'token', 'hunter2'),"
        " CASE WHEN i % 2 = 1 THEN 'late' END, CASE WHEN i % 2 = 1 THEN 7 END FROM generate_series(1, 120) AS i"
    )

    async def ids(query, status=200):
        answer = await web.client.get(f"{LIST}?{query}")
        assert answer.status_code == status, answer.text
        return re.findall(r'<tr id="process-\w+-(\d+)"', answer.text)

    async with open_web() as web:
        first = await web.client.get(LIST)
        assert ("120 processes" in first.text, "hunter2" in first.text) == (True, False)
        assert await ids("") == [str(number) for number in range(120, 70, -1)]
        older = unescape(re.search(r'rel="next" href="([^"]*)"', first.text)[1]).partition("?")[2]
        assert (await ids(older))[0] == "70"
        assert await ids("type=ship&metadata=customer%3Dc1&status=error") == [str(n) for n in range(115, 0, -6)]
        for one in ("metadata=n%3D7", "id=7", 'metadata={"n": 7, "customer": "c1"}'):
            assert await ids(one) == ["7"]
        assert await ids("metadata=n%3Dseven") == await ids("id=7&status=running") == []
        assert len(await ids("error_group=0000000000000007&type=ship")) == 50
        for wrong, words in (
            ("metadata=token%3Dhunter2", "secret"), ('metadata={"n": }', "line 1, column 7"),
            ("metadata=x", "name=value"),
            ('metadata={"n": [1]}', "must be a string"), ("type=a/b", "must not contain /"),
        ):  # fmt: skip
            assert await ids(wrong, 422) == []
            assert words in unescape((await web.client.get(f"{LIST}?{wrong}")).text), wrong


@pytest.mark.requirement("P11")
async def test_p11_the_list_of_a_type_tells_which_processes_wait_for_workers_of_a_version(open_web, database):
    database.psql(
        "INSERT INTO dl_process_types VALUES ('pay', 1, now() + interval '1 h'), ('pay', 2, now() - interval '1 h');"
        "INSERT INTO dl_processes (type, process_id, version, status)"
        " SELECT 'pay', n::text, CASE WHEN n > 2 THEN 2 ELSE 1 END, 'running' FROM generate_series(1, 5) AS n"
    )
    async with open_web() as web:
        shown = plain((await web.client.get("/ui/processes?type=pay")).text)
        assert "v2: 3 wait for workers of v2 v1: 2 processes" in shown
        assert "wait for workers" not in plain((await web.client.get("/ui/processes")).text)


@pytest.mark.slow
async def test_u14_u15_acts_ask_first_are_done_once_and_are_audited(open_web, database):
    async with process_tester(database.dsn, a_type()) as tester, open_web(tokens=all_tokens()) as web:
        await sign_in(web, "operator")
        bad = await act(web, "/ui/processes/new", type="pay", id="1", args="{5")
        assert (bad.status_code, "args: is not JSON" in bad.text, "{5" in bad.text) == (422, True, True)
        form = (await web.client.get("/ui/processes/new?type=pay")).text
        assert '<option value="pay">' in form
        once = re.search(r'name="once" value="([^"]+)"', form)[1]
        fields = {"type": "pay", "id": "1", "args": "{}", "metadata": '{"customer": "ann"}', "once": once}
        for _ in range(2):
            assert await said(web, await act(web, "/ui/processes/new", **fields)) == "Started."
        again = await act(web, "/ui/processes/new", **fields | {"once": "another"})
        assert (again.status_code, "a process with this ID exists" in again.text) == (409, True)
        await tester.settle()

        wrong = await act(web, "/ui/process/call", type="pay", id="1", method="add", args="seven")
        assert (wrong.status_code, "args: is not JSON: Expecting value at line 1, column 1" in wrong.text) == (
            422,
            True,
        )
        endless = await act(web, "/ui/process/call", type="pay", id="1", method="add", args="1e400")
        assert (endless.status_code, "1e400 is larger than any stored number" in endless.text) == (422, True)
        called = await act(web, "/ui/process/call", type="pay", id="1", method="add", args="7", once="c1")
        task = re.search(r"task (\d+)", await said(web, called))[1]
        other = await act(web, "/ui/process/call", type="pay", id="1", method="add", args="8", once="c1")
        assert (other.status_code, "was already sent, with other values" in other.text) == (409, True)
        await tester.settle()
        path = f"/ui/process/task/{task}/withdraw"
        assert (await act(web, path, ident=str(uuid4()))).status_code == 404
        form = (await web.client.get(path)).text
        ident = re.search(r'name="ident" value="([^"]+)"', form)[1]
        withdrawn = await act(web, path, ident=ident)
        assert await said(web, withdrawn) == "No change: the call has begun or ended."
        stopped = await act(web, "/ui/process/stop", type="pay", id="1")
        assert await said(web, stopped) == "No change: the process 1 is running; it has no running step."
        repaired = await act(web, "/ui/process/repair", type="pay", id="1", args="{}")
        assert (repaired.status_code, "repair needs a process with the status error" in repaired.text) == (409, True)

        await tester.advance(900)
        assert "Repair…" in (await web.client.get(PAGE)).text
        assert await said(web, await act(web, "/ui/process/resume", type="pay", id="1")) == "Resumed."
        await tester.settle()
        assert "task" in await said(web, await act(web, "/ui/process/repair", type="pay", id="1", args="{}"))
        await tester.settle()
        assert await said(web, await act(web, "/ui/process/remove", type="pay", id="1")) == "Removed pay 1."
        assert (await act(web, "/ui/process/remove", type="pay", id="1")).status_code == 404
        audit = database.psql(
            "SELECT actor || ' ' || action || ' ' || (detail ->> 'process_id') FROM dl_audit ORDER BY 1"
        )
        assert audit.split("\n") == [
            f"operator {done}_process 1" for done in ("call", "remove", "repair", "resume", "start")
        ]  # fmt: skip


@pytest.mark.slow
async def test_u14_u18_readers_and_foreign_pages_may_not_act_on_processes(open_web, database):
    paths = {
        "/ui/processes/new": {"type": "pay", "id": "2"},
        "/ui/process/task/1/withdraw": {},
        **{f"/ui/process/{one}": {"type": "pay", "id": "1"} for one in ("call", "repair", "resume", "stop", "remove")},
    }
    bulk = "/ui/processes/errors/mend"
    group = {"action": "resume", "type": "pay", "error_group": "0000000000000007"}
    async with open_web(tokens=all_tokens()) as web:
        await web.processes.ask(ProcessRequest(type="pay", process_id="1", kind="init"))
        await sign_in(web, "reader")
        shown = (await web.client.get(PAGE)).text
        assert re.search(r"<button[^>]* disabled title=\"Needs the role operate.\">Remove…", shown)
        for path, fields in paths.items():
            assert (await act(web, path, **fields)).status_code == 403, path
            assert (await web.client.get(path, params=fields)).status_code == 403, path
        await sign_in(web, "operator")
        assert (await act(web, bulk, **group)).status_code == 403
        for path, fields in (paths | {bulk: group}).items():
            foreign = await web.client.post(path, data=fields, headers={"Origin": "https://evil.example"})
            assert foreign.status_code == 403, path
        assert database.psql("SELECT count(*) FROM dl_processes") == "1"


@pytest.mark.slow
async def test_p6_u16_a_group_of_errors_is_repaired_or_resumed_as_a_whole(open_web, database):
    async with process_tester(database.dsn, a_type()) as tester, open_web() as web:
        for number in range(5):
            await tester.processes.start("pay", str(number), {})
        await tester.advance(900)
        html = (await web.client.get("/ui/processes/errors")).text
        assert "the bank refused #" in html
        href = unescape(re.search(r'href="([^"]*mend[^"]*action=resume[^"]*)"', html)[1])
        asked = plain((await web.client.get(href)).text)
        assert "Resume 5 processes?" in asked
        group = re.search(r"error_group=([0-9a-f]{16})", href)[1]
        listed = (await web.client.get(f"{LIST}?type=pay&error_group={group}")).text
        assert (plain(listed).count("the bank refused"), "Repair all…" in listed) == (6, True)
        fields = {"type": "pay", "error_group": group, "shown": "5"}
        mend = "/ui/processes/errors/mend"
        assert await said(web, await act(web, mend, **fields, action="resume")) == "Resumed 5 processes."
        await tester.settle()  # the bank refuses again
        wrong = await act(web, mend, **fields, action="repair", args="{")
        assert (wrong.status_code, "args: is not JSON" in wrong.text) == (422, True)
        done = await act(web, mend, **fields, action="repair", args="{}")
        assert await said(web, done) == "Requested the repair of 5 processes."
        await tester.settle()
        assert "No process matching the filter is in error" in (await web.client.get("/ui/processes/errors")).text


@pytest.mark.slow
async def test_u16_a_long_repair_continues_and_many_processes_need_their_number_typed(open_web, database):
    database.psql(
        "INSERT INTO dl_processes (type, process_id, status, error_group, detail)"
        " SELECT 'pay', i::text, 'error', 7, 'x' FROM generate_series(1, 1500) AS i"
    )
    mend = "/ui/processes/errors/mend"
    fields = {"type": "pay", "error_group": "0000000000000007", "action": "repair", "args": "{}", "shown": "1500"}
    # A request ends after its first batch of 1,000.
    async with open_web(limits=HttpLimits(batches_s=0)) as web:
        assert "typed: must be 1500" in (await act(web, mend, **fields)).text
        assert (await act(web, mend, **fields | {"shown": "1"})).status_code == 422
        part = await act(web, mend, **fields, typed="1,500")
        assert "Requested the repair of 1,000 processes so far. Continue with the remaining processes." in part.text
        after = re.search(r'name="after" value="([^"]+)"', part.text)[1]
        rest = await act(web, mend, **fields, after=after)
        assert await said(web, rest) == "Requested the repair of 500 processes."


@pytest.mark.slow
async def test_a_wake_up_job_leads_to_its_process_and_a_process_says_why_it_does_not_run(open_web, database):
    async def words():
        html = (await web.client.get(PAGE)).text
        why = re.search(r'<div class="panel why[^"]*" role="note">(.*?)</div>', html, re.DOTALL)[1]
        return plain(why), re.search(r'href="([^"]*)"', why)

    async with open_web() as web:
        await web.processes.ask(ProcessRequest(type="pay", process_id="1", kind="init"))
        job_id = database.psql("SELECT job_id FROM dl_processes")
        job = (await web.client.get(f"/ui/jobs/{job_id}")).text
        assert "This is the wake-up job of the durable process pay 1 . It runs the steps" in plain(job)
        assert ("/ui/process?type=pay&amp;id=1" in job, "Cancel…" in job, "Run again…" in job) == (True, False, False)
        assert "Durable processes 1 starting" in plain((await web.client.get("/ui")).text)
        text, link = await words()
        assert "1 request waits, but no worker serves the queue process.pay." in text
        assert link[1] == "/ui/queue?name=process.pay"
        database.psql(
            "INSERT INTO dl_workers (worker, host, pid, version, queues, tasks, seen_at)"
            """ VALUES ('b:7', 'b', 7, '1', '{"process.pay": 8}', '{process.pay.v2}', now())"""
        )
        assert "no worker of the queue process.pay has version 1 of the type" in (await words())[0]
        database.psql("UPDATE dl_workers SET tasks = '{process.pay.v1}'")
        text, link = await words()
        assert text.startswith("Ready: 1 request waits. A worker claims its wake-up job as soon as it has a free slot.")
        assert link[1] == f"/ui/jobs/{job_id}"
        await web.jobs.pause("process.pay")
        assert "its queue process.pay is paused" in (await words())[0]
        database.psql("DELETE FROM dl_jobs")
        assert "1 request waits, but it has no wake-up job." in (await words())[0]
        database.psql(
            "UPDATE dl_processes SET running_task = 1, running_kind = 'init', running_token = 1, running_at = now();"
            "INSERT INTO dl_jobs (job_id, queue, task, lock_key, keyed, status, claimed_by, token,"
            f" lease_expires_at) VALUES ('{job_id}', 'process.pay', 'process.pay.v1', 'k', false, 'running', 'b:7', 1,"
            " now() + interval '1 h')"
        )
        assert (await words())[0] == "Running: its start on b:7. Its wake-up job"
        database.psql("UPDATE dl_jobs SET lease_expires_at = now() - interval '1 h'")
        assert "its start runs on b:7, which sends no heartbeats" in (await words())[0]
        database.psql(
            "UPDATE dl_processes SET running_task = NULL, status = 'running';"
            "UPDATE dl_process_tasks SET status = 'finished', finished_at = now()"
        )
        assert (await words())[0].startswith("Idle: it has no waiting requests and no timer.")


@pytest.mark.slow
async def test_p9_deliveries_that_are_held_up_are_shown_and_released(open_web, database):
    held = "/ui/processes/deliveries"
    async with open_web(tokens=all_tokens()) as web:
        await web.processes.ask(ProcessRequest(type="pay", process_id="1", kind="init"))
        database.psql(
            "INSERT INTO dl_process_outbox (sink, partition, key, event_id, kind, held_up)"
            " SELECT 'ledger', 0, key, 7, 'event', true FROM dl_processes;"
            "INSERT INTO dl_process_holdups (sink, key, partition, tries, error)"
            " SELECT 'ledger', key, 0, 20, 'HTTP 503, token=hunter2' FROM dl_processes"
        )
        await sign_in(web, "reader")
        assert "Its deliveries to 1 sink have failed: errors and release" in plain((await web.client.get(PAGE)).text)
        shown = (await web.client.get(f"{held}?held=true&type=pay&id=1")).text
        row = plain(re.search(r'<tr id="held-.*?</tr>', shown, re.DOTALL)[0])
        assert re.match(r"held 1 pay ledger event 7 20 .* HTTP 503, token=\*\*\* Release…", row), row
        assert (await act(web, f"{held}/release", sink="ledger")).status_code == 403
        await sign_in(web, "operator")
        assert (await act(web, f"{held}/release")).status_code == 422
        released = await act(web, f"{held}/release", sink="ledger", type="pay", id="1")
        assert await said(web, released) == "Released the deliveries of 1 process."
        assert database.psql("SELECT tries FROM dl_process_holdups") == "0"
        assert "No failed delivery matches the filter" in (await web.client.get(f"{held}?sink=other")).text
        # Secrets in names are masked everywhere, including invisible attributes.
        database.psql(
            "UPDATE dl_processes SET type = 'token=hunter2', process_id = 'password=hunter2', status = 'error',"
            " detail = 'late', error_group = 7"
        )
        for path, row in ((LIST, "process"), (held, "held"), ("/ui/processes/errors", "group")):
            shown = (await web.client.get(path)).text
            assert (f'<tr id="{row}-' in shown, "hunter2" in shown) == (True, False), path

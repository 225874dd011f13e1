"""Runs: the list, the timeline, the log by tasks, cancel, comparison (U1 to U6, U10, U12)."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
from etl_runs import BEGAN, HOSTILE
from web_server import TOKENS, all_tokens

pytestmark = pytest.mark.requirement("E11")


LATER_RUNS = f"""
INSERT INTO dl_jobs (job_id, queue, task, lock_key, status, attempt, started_at, finished_at)
  SELECT md5(i::text)::uuid, 'loads', 'nightly', i::text, 'succeeded', 1, now(), now()
  FROM generate_series(1, 4100) AS i;
INSERT INTO dl_etl_runs (run_id, name, kind, status, started_at, finished_at)
  SELECT md5(i::text)::uuid, 'nightly', 'flow', 'succeeded', '{BEGAN}'::timestamptz + i * interval '1 min', now()
  FROM generate_series(1, 4100) AS i;
"""


async def get(web, path, status=200):
    answer = await web.client.get(path)
    assert answer.status_code == status, answer.text
    return answer.text


def words_of(html):
    """Return the visible text in one line."""
    return " ".join(re.sub(r"<[^>]+>", " ", html).split())


def rows_of(html):
    return [words_of(row) for row in re.findall(r"<tr id=.*?</tr>", html, re.DOTALL)]


def lines_of(html):
    return [words_of(line) for line in re.findall(r"<li.*?</li>", html.partition('<ol class="log">')[2], re.DOTALL)]


async def test_the_list_has_runs_newest_first_with_counts_and_filters_in_the_url(open_web, make, nightly):
    make.run([("ods.rates", "succeeded")], name="small", began=BEGAN - timedelta(days=1), minutes=0.5)
    make.run(
        [("a", "running")],
        name="x",
        status="running",
        began=BEGAN + timedelta(days=1),
        progress={"load": "a", "inserted": 42},
        args={"from": "2026-10-12", "pages": [1, 2], "password": "sesame"},
    )
    async with open_web() as web:
        shown = rows_of(await get(web, "/ui/runs"))
        assert [row.split()[0] for row in shown] == ["x", "nightly", "small"]
        assert shown[0].startswith("x from=2026-10-12 pages=[1, 2] password=*** running")
        assert "0 / 1 42 0" in shown[0]
        assert "failed 2026-11-20 02:00:00 20 min 2 / 3 2,003 3" in shown[1]
        assert "30 s 1 / 1 1,001 0" in shown[2]
        assert [row.split()[0] for row in rows_of(await get(web, "/ui/runs?name=small"))] == ["small"]
        assert [row.split()[0] for row in rows_of(await get(web, "/ui/runs?status=failed"))] == ["nightly"]
        assert "No run matches" in await get(web, "/ui/runs?name=small&status=failed")
        assert "status" in await get(web, "/ui/runs?status=odd", 422)


@pytest.mark.slow
async def test_the_list_of_one_status_continues_after_the_last_run_it_has_read(open_web, database, make):
    make.run([("a", "failed")], name="old", status="failed")
    database.psql(LATER_RUNS)
    async with open_web() as web:
        path, seen = "/ui/runs?status=failed", []
        for _ in range(4):
            shown = await get(web, path)
            seen.append(rows_of(shown))
            following = re.search(r'rel="next" href="([^"]+)"', shown)
            if following is None:
                break
            path = following[1].replace("&amp;", "&")
        # A request reads 2,000 runs.
        assert [[row.split()[0] for row in rows] for rows in seen] == [[], [], ["old"]]


async def test_u1_the_timeline_has_a_row_for_each_task_in_order_waiting_ones_too(open_web, nightly):
    async with open_web() as web:
        shown = await get(web, f"/ui/runs/{nightly}")
        rows = rows_of(shown)
        assert rows[0].startswith("ods.rates ods succeeded 02:00:00 02:10:00 10 min 1,001")
        assert rows[1].startswith("ods.countries ods failed 02:10:00 02:20:00 10 min 1,002 3 failed")
        assert rows[2] == "dwd dwd waiting"
        bars = re.findall(r'<svg class="span".*?</svg>', shown, re.DOTALL)
        assert len(bars) == 2
        assert 'aria-label="failed, 02:10:00 to 02:20:00, 10 min"' in bars[1]
        assert 'class="span-failed" x="50.00%" y="1" width="50.00%"' in bars[1]
        assert re.findall(r'class="(lane-\w+)" x="([\d.]+)%"', bars[1]) == [
            ("lane-requests", "50.00"),
            ("lane-processing", "55.00"),
            ("lane-writing", "65.00"),
        ]
        assert re.findall(r"<text x=\"([\d.]+)%\" y=\"12\">(.*?)</text>", shown)[:2] == [
            ("0.00", "02:00"),
            ("25.00", "02:05"),
        ]
        assert "style=" not in shown
        assert "dwd: at postgresql://***@db/x" in words_of(shown)
        assert "sesame" not in shown
        failures = await get(web, f"/ui/runs/{nightly}/failures")
        assert rows_of(failures)[0].startswith("ods.countries all request page 1 HTTP 503")
        assert 'href="/ui/load?name=ods.countries"' in failures
        assert f'href="/ui/runs/{nightly}/failures">3 failures' in shown


async def test_a_failure_that_failed_again_is_shown_as_replaced(open_web, database, make):
    first, second = (make.run([("rates", "failed")]) for _ in range(2))
    make.failures(first, "rates", 1)
    make.failures(second, "rates", 1)
    began = "UPDATE dl_etl_tasks SET started_at = started_at + interval '1 h'"
    database.psql(
        f"{began} WHERE run_id = '{second}'; UPDATE dl_etl_failures SET solved_at = now() WHERE failure_id = 1"
    )
    async with open_web() as web:
        assert rows_of(await get(web, f"/ui/runs/{first}/failures"))[0].endswith("replaced by failure 2")
        assert rows_of(await get(web, f"/ui/runs/{second}/failures"))[0].endswith("not yet")


@pytest.mark.slow
async def test_u2_a_block_has_its_tasks_lines_only_in_order_and_a_page_is_500_of_them(open_web, make, nightly):
    make.lines(nightly, "ods.rates", [("info", f"line {n}") for n in range(600)])
    async with open_web() as web:
        closed = await get(web, f"/ui/runs/{nightly}")
        assert not lines_of(closed)
        assert "603 lines" in closed
        assert "1 error" in closed
        one = f"/ui/runs/{nightly}?part=lines&open=2"
        assert [line.partition(" ")[2] for line in lines_of(await get(web, one))] == [
            "info GET /c?page=1 phase=requests status=503",
            "warning tried again phase=requests status=503",
            "error GET /c?page=7 503 after 3 tries phase=requests status=503",
        ]
        first = await get(web, f"/ui/runs/{nightly}?part=lines&open=1")
        behind = re.search(r'data-behind="(\d+)"', first)[1]
        second = await get(web, f"/ui/runs/{nightly}?part=lines&open=1&behind={behind}")
        said = [line.split(" info ")[1] for line in [*lines_of(first), *lines_of(second)]]
        assert len(lines_of(first)) == 500
        assert said == [*(f"GET /rates?page={n} phase=requests" for n in (1, 2, 3)), *(f"line {n}" for n in range(600))]
        own = lines_of(await get(web, f"/ui/runs/{nightly}?part=lines&open=0"))
        assert [line.partition(" ")[2] for line in own] == ["info attempt 1 began worker=host-b attempt=1"]
        assert "has a task with the number 9" in await get(web, f"/ui/runs/{nightly}?open=9", 404)
        assert "has a task with the number 9" in await get(web, f"/ui/runs/{nightly}?part=lines&open=9", 404)


@pytest.mark.slow
async def test_u2_u6_lines_are_filtered_by_the_url_and_name_their_task(open_web, nightly):
    async with open_web() as web:

        async def lines(query):
            return [
                line.partition(" ")[2] for line in lines_of(await get(web, f"/ui/runs/{nightly}?part=lines&{query}"))
            ]

        assert (await lines("view=all"))[:2] == [
            "info [run] attempt 1 began worker=host-b attempt=1",
            "info [ods.rates] GET /rates?page=1 phase=requests",
        ]
        assert len(await lines("view=all")) == 7
        assert len(await lines("view=all&level=warning")) == 2
        assert await lines("view=all&q=PAGE%3D7") == [
            "error [ods.countries] GET /c?page=7 503 after 3 tries phase=requests status=503"
        ]
        assert len(await lines("view=all&q=503")) == 3
        assert len(await lines("view=all&q=host-b")) == 1
        assert len(await lines("view=all&task=ods.rates&task=dwd")) == 3
        assert await lines("open=2&level=error&q=nothing") == []
        shown = await get(web, f"/ui/runs/{nightly}?task=ods.rates&level=error&q=%22")
        assert re.findall(r'id="block-(\d+)"', shown) == ["1"]
        assert '<option value="error" selected>' in shown
        assert 'name="q" value="&#34;"' in shown


async def test_u2_a_search_finds_no_masked_text(open_web, make, nightly):
    make.lines(nightly, "ods.rates", [("info", "at postgresql://me:sesame@db/x")] * 501, password="sesame")
    async with open_web() as web:
        nothing = await get(web, f"/ui/runs/{nightly}?part=lines&open=1&q=nowhere")
        assert lines_of(nothing) == []
        for text in ("sesame", "sesa"):
            # The end of a page does not reveal anything, either.
            assert await get(web, f"/ui/runs/{nightly}?part=lines&open=1&q={text}") == nothing.replace("nowhere", text)
        first = await get(web, f"/ui/runs/{nightly}?part=lines&open=1&q=POSTGRESQL")
        behind = re.search(r'data-behind="(\d+)"', first)[1]
        second = await get(web, f"/ui/runs/{nightly}?part=lines&open=1&q=POSTGRESQL&behind={behind}")
        assert [len(lines_of(first)), len(lines_of(second)), "More lines" in second] == [500, 1, False]


async def test_u2_the_text_has_each_line_whole_task_by_task_or_all_in_order(open_web, make, nightly):
    make.lines(nightly, "ods.rates", [("error", "two\nlines\x1b[31m")])
    async with open_web() as web:
        answer = await web.client.get(f"/ui/runs/{nightly}.txt")
        assert answer.headers["Content-Type"] == "text/plain; charset=utf-8"
        lines = answer.text.splitlines()
        titles = [line for line in lines if line.startswith("#")]
        assert titles == [
            f"# nightly, run {nightly}: failed",
            "## Run",
            "## 1 ods.rates: succeeded",
            "## 2 ods.countries: failed",
            "## 3 dwd: waiting",
        ]
        assert "2026-11-20 02:00:00.000 error   two\\nlines\\u001b[31m" in lines
        in_order = (await get(web, f"/ui/runs/{nightly}.txt?view=all&level=warning")).splitlines()
        assert [line.partition("[")[2] for line in in_order[1:]] == [
            "ods.countries] tried again phase=requests status=503",
            "ods.countries] GET /c?page=7 503 after 3 tries phase=requests status=503",
            "ods.rates] two\\nlines\\u001b[31m",
        ]


@pytest.mark.slow
async def test_u10_names_within_the_timeline_and_the_text_are_inert_and_add_no_lines(open_web, make):
    name = "a\n## forged\u202e"
    run_id = make.run([(name, "failed")], name=name, status="failed")
    make.failed_table(run_id, name, name, "no column")
    async with open_web() as web:
        for query in ("", ".txt", "?part=rows", "/failures"):
            assert "\u202e" not in await get(web, f"/ui/runs/{run_id}{query}"), query
        text = await get(web, f"/ui/runs/{run_id}.txt")
        assert [line for line in text.splitlines() if line.startswith("#")] == [
            f"# a\\n## forged\\u202e, run {run_id}: failed",
            "## Run",
            "## 1 a\\n## forged\\u202e: failed",
        ]


async def test_u2_lines_that_an_older_program_has_kept_are_found_without_their_range(open_web, database, nightly):
    database.psql("DELETE FROM dl_etl_logs")
    async with open_web() as web:
        assert len(lines_of(await get(web, f"/ui/runs/{nightly}?part=lines&open=2"))) == 3


async def test_u3_an_ended_task_changes_no_more_and_a_running_one_is_marked(open_web, make):
    run_id = make.run([("a", "succeeded"), ("b", "running")], status="running")
    make.lines(run_id, "a", [("info", "one")])
    async with open_web() as web:
        shown = await get(web, f"/ui/runs/{run_id}")
        blocks = dict(re.findall(r'<details id="block-(\d)".*?<summary>(.*?)</summary>', shown, re.DOTALL))
        assert 'data-state="live"' in blocks["2"]
        assert 'data-state="live"' not in blocks["1"]
        ended = re.search(r'id="block-1"[^>]*data-last="([^"]+)"', shown)[1]
        make.lines(run_id, "b", [("info", "two")])
        again = await get(web, f"/ui/runs/{run_id}?part=rows")
        assert re.search(r'id="block-1"[^>]*data-last="([^"]+)"', again)[1] == ended
        assert re.search(r'id="block-2"[^>]*data-last="([^"]+)"', again)[1] != "0running"


async def test_u5_a_running_load_shows_its_progress_and_an_ended_run_stops_refreshing(open_web, make, nightly):
    progress = {
        "load": "a",
        "segment": "2026-11",
        "segments_planned": 12,
        "segments": 3,
        "requests": 1_045,
        "queued": 5,
        "active_workers": 2,
        "unwritten": 7,
        "inserted": 900,
        "waiting": {"for": "pause", "until": "2026-11-23T08:13:32+00:00"},
    }
    run_id = make.run([("a", "running")], status="running", progress=progress)
    async with open_web() as web:
        answer = await web.client.get(f"/ui/runs/{run_id}?part=rows")
        shown = words_of(answer.text)
        for said in (
            "Requests 1,045 sent",
            "Segments 3 of 12 2026-11",
            "Answers to process 5 7 rows to write",
            "Workers 2 active",
            "Next request 08:13:32 after the pause",
        ):
            assert said in shown
        assert "900 rows" in shown
        assert float(answer.headers["Refresh-In"]) == 1
        # The bar of a running task ends now, and the page has not changed because of that.
        same = {"If-None-Match": answer.headers["ETag"]}
        assert (await web.client.get(f"/ui/runs/{run_id}?part=rows", headers=same)).status_code == 304
        assert "Refresh-In" not in (await web.client.get(f"/ui/runs/{nightly}?part=rows")).headers


async def test_u5_a_cancel_asks_first_and_the_run_ends_with_its_counts(open_web, make, database):
    run_id = make.run([("a", "running")], status="running")
    async with open_web(tokens=all_tokens()) as web:
        for name, status in (("reader", 403), ("operator", 200)):
            await web.client.post("/ui/sign-in", data={"token": TOKENS[name]}, headers={"Origin": web.url})
            asks = await web.client.get(f"/ui/runs/{run_id}/cancel")
            assert asks.status_code == status
        assert "Responses already received are still processed and written" in asks.text
        path = f"/ui/runs/{run_id}/cancel"
        # Withdrawing a retry does not stop a run that has begun.
        await web.client.post(path, data={"waiting": "true"}, headers={"Origin": web.url})
        assert "No change: the run&#39;s job is running now." in await get(web, f"/ui/runs/{run_id}")
        assert not (await web.jobs.get(run_id)).cancel_requested
        for _ in range(2):
            done = await web.client.post(path, headers={"Origin": web.url})
            assert (done.status_code, done.headers["Location"]) == (303, f"/ui/runs/{run_id}")
        shown = words_of(await get(web, f"/ui/runs/{run_id}"))
        assert "Requested the cancel of nightly. Data already received is still written." in shown
        assert "cancel requested" in shown
        asked = database.psql("SELECT status, cancel_requested FROM dl_jobs")
        assert "running" in asked
        assert "t" in asked.replace("running", "")


async def test_a_run_and_its_job_lead_to_each_other(open_web, nightly):
    async with open_web() as web:
        assert f'href="/ui/jobs/{nightly}"' in await get(web, f"/ui/runs/{nightly}")
        assert f'href="/ui/runs/{nightly}">Run of this job' in await get(web, f"/ui/jobs/{nightly}")
        assert "Run of this job" not in await get(web, f"/ui/jobs/{await web.trigger()}")


async def test_u15_a_failed_run_is_retried_from_its_page_once(open_web, nightly, database):
    async with open_web() as web:
        seen = re.search(r'name="seen" value="([^"]+)">\s*<button[^>]*>Retry', await get(web, f"/ui/runs/{nightly}"))[1]
        for said in ("It continues with the remaining work", "No change: the run&#39;s job is queued now"):
            done = await web.client.post(f"/ui/runs/{nightly}/retry", data={"seen": seen}, headers={"Origin": web.url})
            assert done.status_code == 303
            assert said in await get(web, f"/ui/runs/{nightly}")
        assert database.psql(f"SELECT status FROM dl_jobs WHERE job_id = '{nightly}'").split() == ["queued"]


async def test_a_run_is_compared_with_the_last_success_task_by_task(open_web, make, nightly):
    tasks = [("ods.rates", "succeeded"), ("ods.countries", "succeeded"), ("old", "succeeded")]
    for day, minutes in ((3, 30), (2, 4), (1, 2)):
        good = make.run(tasks, began=BEGAN - timedelta(days=day), minutes=minutes, rows=100)
    make.run(tasks, began=BEGAN + timedelta(days=1), minutes=1)  # later than the run
    make.run(tasks, name="other", began=BEGAN - timedelta(hours=1))
    async with open_web() as web:
        shown = await get(web, f"/ui/runs/{nightly}")
        assert "(usually 12 min 0 s)" in words_of(shown) or "(usually 12 min)" in words_of(shown)
        link = re.search(r'href="(/ui/runs/[^"]+/with/[^"]+)"', shown)[1]
        assert link == f"/ui/runs/{nightly}/with/{good}"
        compared = words_of(await get(web, link))
        assert "ods.rates succeeded succeeded 10 min 2 min slower +8 min 1,001 +900 0 0" in compared
        assert "ods.countries failed succeeded 10 min 2 min slower +8 min 1,002 +900 3 +3" in compared
        assert "dwd waiting not in the other run" in compared
        assert "old not in this run succeeded" in compared
        other = make.run(tasks, name="third")
        assert "must be a run of the same load or flow" in await get(web, f"/ui/runs/{nightly}/with/{other}", 422)


@pytest.mark.slow
async def test_tables_that_could_not_be_merged_are_failures_too(open_web, make, nightly):
    make.failed_table(nightly, "dwd", "dim_rate", "no column <b>, at postgresql://me:sesame@db/x")
    async with open_web() as web:
        assert "3 / 3 2,003 4" in rows_of(await get(web, "/ui/runs"))[0]
        assert "0 1 failed" in rows_of(await get(web, f"/ui/runs/{nightly}"))[2]
        failures = await get(web, f"/ui/runs/{nightly}/failures")
        assert "dwd table dim_rate no column &lt;b&gt;, at postgresql://***@db/x" in words_of(failures)


async def test_a_run_that_is_none_is_a_page_that_says_so(open_web):
    nobody = "0197a1b2-c3d4-7e5f-8a6b-9c0d1e2f3a4b"
    async with open_web() as web:
        for path in (f"/ui/runs/{nobody}", f"/ui/runs/{nobody}.txt", f"/ui/runs/{nobody}/with/{nobody}"):
            assert "no run has the ID" in (await get(web, path, 404)).replace("&#39;", "'")


@pytest.mark.slow
async def test_u10_names_of_tasks_and_log_lines_are_shown_and_never_run(open_web, make):
    run_id = make.run([(name, "succeeded") for name in HOSTILE], name=HOSTILE[0])
    for name in HOSTILE:
        make.lines(run_id, name, [("info", name)], **{"<b>": name})
    async with open_web() as web:
        for path in ("/ui/runs", f"/ui/runs/{run_id}", f"/ui/runs/{run_id}?view=all", f"/ui/runs/{run_id}?open=1"):
            shown = await get(web, path)
            assert "<script>alert" not in shown
            assert "<b>=" not in shown
            assert not re.search("[\u202e\x1b\u200b]", shown)
        shown = await get(web, f"/ui/runs/{run_id}?task=a%2Fb%3Fc%23d%26e%3D1%2Cf")
        assert re.findall(r'id="block-(\d)"', shown) == ["4"]

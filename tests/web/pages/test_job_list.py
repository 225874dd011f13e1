"""The list of jobs: its address, the search in args, and its live updates."""

from __future__ import annotations

import json
import re
from uuid import uuid4

import pytest
from conditions import until

from dataloader.jobs.args_pattern import ArgsPattern
from dataloader.jobs.errors import BadRequest

pytestmark = pytest.mark.requirement("E11")

JOBS = "/ui/jobs"


def add(database, number, args=None):
    """Add `number` jobs, all with the same time."""
    database.psql(
        "INSERT INTO dl_jobs (job_id, queue, task, lock_key, created_at, args)"
        " SELECT gen_random_uuid(), 'q', 't', i::text, '2026-11-22 23:30:00Z', "
        f"'{json.dumps(args or {})}' FROM generate_series(1, {number}) AS i"
    )


def rows_of(text):
    return re.findall(r'<tr id="job-([^"]+)"', text)


async def list_of(web, **query):
    answer = await web.client.get(JOBS, params=query)
    assert answer.status_code == 200, answer.text
    return answer.text


@pytest.mark.slow
async def test_u6_the_filter_is_in_the_address_the_form_and_the_chips(open_web, database):
    async with open_web() as web:
        wanted = await web.trigger(queue="load.cbr", task="load.rates", lock_key="cbr:2026-11", args={"source": "cbr"})
        running = await web.trigger(queue="other", lock_key="b")
        database.psql(
            f"UPDATE dl_jobs SET status = 'running', claimed_by = 'host-b:1', token = 7 WHERE job_id = '{running}'"
        )
        await web.trigger(queue="third", lock_key="c")
        database.psql("UPDATE dl_jobs SET created_at = '2026-11-22 23:30:00Z' WHERE queue = 'third'")
        group = await web.trigger(lock_key="d", root=wanted)
        for query, found in (
            ({"queue": "load.cbr"}, [wanted]),
            ({"task": "load.rates"}, [wanted]),
            ({"key": "cbr:2026-11"}, [wanted]),
            ({"status": "running"}, [running]),
            ({"worker": "host-b:1"}, [running]),
            ({"root": wanted}, [group, wanted]),
            ({"args": "source=cbr", "queue": "load.cbr"}, [wanted]),
            ({"queue": "load.cbr", "status": "failed,lost"}, []),
            ({"schedule": "nightly"}, []),
        ):
            text = await list_of(web, **query)
            assert rows_of(text) == found, query
            for name, value in query.items():
                assert f'name="{name}"' in text
                assert name == "status" or f'value="{value}"' in text
            assert text.count('aria-label="Remove the filter') == len(query)
        assert len(rows_of(await list_of(web))) == 4
        wrong = await web.client.get(JOBS, params={"from": "yesterday", "queue": "q"})
        assert wrong.status_code == 422
        assert "from: must be a time such as" in wrong.text
        assert 'value="q"' in wrong.text


async def test_u21_times_of_the_filter_are_in_the_readers_zone(open_web, database):
    async with open_web() as web:
        await web.trigger()
        database.psql("UPDATE dl_jobs SET created_at = '2026-11-22 23:30:00Z'")
        assert not rows_of(await list_of(web, **{"from": "2026-11-23T00:00"}))
        await web.client.post("/ui/look", data={"zone": "Europe/Berlin"}, headers={"Origin": web.url})
        assert rows_of(await list_of(web, **{"from": "2026-11-23T00:00", "to": "2026-11-23T00:31"}))
        assert not rows_of(await list_of(web, **{"from": "2026-11-23T00:00Z"}))


async def test_u10_u21_instants_at_the_ends_of_time_keep_no_page_from_being_seen(open_web, database):
    async with open_web() as web:
        job_id = await web.trigger(lock_key="0001-01-01 00:00:00Z")
        for zone in ("America/New_York", "Asia/Tokyo"):
            web.client.cookies.set(f"dl_look_{web.url.rpartition(':')[2]}", f"{zone}|system|on")
            for instant in ("-infinity", "infinity"):
                database.psql(f"UPDATE dl_jobs SET created_at = '{instant}', started_at = '{instant}'")
                for path in ("/ui/jobs", f"/ui/jobs/{job_id}"):
                    assert (await web.client.get(path)).status_code == 200, (zone, instant, path)


@pytest.mark.slow
async def test_a_page_goes_on_behind_the_last_and_counts_all(open_web, database):
    # All with the same time: none is lost between two pages.
    add(database, 120)
    async with open_web() as web:
        seen, path = [], f"{JOBS}?queue=q"
        while path:
            text = (await web.client.get(path)).text
            seen += rows_of(text)
            following = re.search(r'rel="next" href="([^"]+)"', text)
            path = following and following[1].replace("&amp;", "&")
        assert sorted(seen) == sorted(database.psql("SELECT job_id FROM dl_jobs").split())
        assert len(set(seen)) == 120
        assert "120 jobs" in await list_of(web)


@pytest.mark.slow
async def test_a_list_that_takes_long_has_no_count_and_one_that_takes_too_long_no_rows(open_web, database):
    add(database, 6)
    slow = "CREATE OR REPLACE VIEW dl_jobs AS SELECT * FROM real_jobs WHERE pg_sleep({}) IS NOT NULL"
    async with open_web() as web:
        assert "6 jobs" in await list_of(web)
        database.psql(f"ALTER TABLE dl_jobs RENAME TO real_jobs; {slow.format(0.03)}")
        text = await list_of(web)
        assert ("6 jobs" in text, len(rows_of(text)), "exceeds the page deadline" in text) == (False, 6, False)
        database.psql(slow.format(0.5))
        text = await list_of(web)
        assert ("6 jobs" in text, len(rows_of(text)), "exceeds the page deadline" in text) == (False, 0, True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "args", "found"),
    [
        ("source=ecb", {"source": "ecb", "more": 1}, True),
        ("n=5", {"n": 5}, True),
        ("n=5", {"n": "5"}, True),
        ("n=9007199254740993", {"n": 9007199254740993}, True),
        ("n=9007199254740993", {"n": 9007199254740992}, False),
        ("n=1.5", {"n": 1.5}, True),
        ("done=true", {"done": True}, True),
        ("done=true", {"done": 1}, False),
        ('{"a": {"b": [2]}}', {"a": {"b": [1, 2], "c": 3}}, True),
        ('{"a": {"b": [3]}}', {"a": {"b": [1, 2]}}, False),
        ("name=", {"name": ""}, True),
    ],
)
async def test_u8_jobs_are_found_by_parts_of_their_args(open_web, text, args, found):
    async with open_web() as web:
        job_id = await web.trigger(args=args)
        assert rows_of(await list_of(web, args=text)) == [job_id] * found


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "password=x",
        '{"db": {"api_key": "s"}}',
        '{"list": [{"token": "x"}]}',
        "url=postgres://ann:hunter2@db/x",
        "no equals",
        "{no",
        "{}x",
    ],
)
async def test_u8_a_search_for_a_secret_or_with_invalid_syntax_is_refused(open_web, text):
    async with open_web() as web:
        await web.trigger(args={"password": "x", "url": "postgres://ann:hunter2@db/x"})
        answer = await web.client.get(JOBS, params={"args": text})
        assert answer.status_code == 422
        assert "args: " in answer.text
        assert not rows_of(answer.text)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "text"),
    [
        ({"name": "DB_PASSWORD", "value": "hunter2"}, "value=hunter2"),
        ({"argv": ["load", "--password", "hunter2"]}, '{"argv": ["hunter2"]}'),
        ({"header": ["X-Api-Key", "hunter2"]}, '{"header": ["hunter2"]}'),
    ],
)
async def test_u8_masked_values_never_match_and_do_not_affect_the_search(open_web, database, args, text):
    add(database, 120, args)
    async with open_web() as web:
        given = text, text.replace("hunter2", "hunter3")
        right, wrong = [(await list_of(web, args=one)).partition("<main")[2] for one in given]
        assert right.replace("hunter2", "hunter3") == wrong.replace("hunter2", "hunter3")
        assert not rows_of(right)


async def test_u8_a_search_looks_at_so_many_and_says_where_to_go_on(open_web, database):
    async with open_web() as web:
        oldest = await web.trigger(args={"a": 1}, lock_key="0")
        database.psql("UPDATE dl_jobs SET created_at = '2026-11-22 23:00:00Z'")
        add(database, 20_000, {"a": 2})
        first = await list_of(web, args="a=1")
        assert "Searched the args of 20,000 jobs" in first
        assert not rows_of(first)
        further = re.search(r'rel="next" href="([^"]+)">Search further', first)[1].replace("&amp;", "&")
        assert rows_of((await web.client.get(further)).text) == [oldest]


@pytest.mark.parametrize("text", ['{"a": NaN}', "x" * 3_000, '{"a":' * 20 + "1" + "}" * 20])
def test_a_search_that_is_no_json_or_too_much_of_it_is_refused(text):
    with pytest.raises(BadRequest, match="args"):
        ArgsPattern.parsed(text)


async def test_u9_u10_secrets_are_hidden_and_hostile_texts_are_inert(open_web, database):
    async with open_web() as web:
        for name in ("<script>alert(1)</script>", "a\u202eb", "postgres://ann:hunter2@db/x"):
            database.psql(
                "INSERT INTO dl_jobs (job_id, queue, task, lock_key, status, error, finished_at)"
                f" VALUES ('{uuid4()}', '{name}', '{name}', '{name}', 'failed', '{name}' || repeat('x', 8000), now())"
            )
        text = await list_of(web)
        assert "<script>alert" not in text
        assert "\u202e" not in text
        assert "hunter2" not in text
        assert len(text) < 60_000


@pytest.mark.slow
async def test_u12_rows_change_in_place_and_new_ones_wait_while_a_reader_is_below(open_web, open_tab, database):
    async with open_web() as web, open_tab(web.url) as tab:
        database.psql(
            "INSERT INTO dl_jobs (job_id, queue, task, lock_key) SELECT gen_random_uuid(), 'q', 't', i::text"
            " FROM generate_series(1, 50) AS i"
        )
        await tab.take_clock()
        await tab.go(JOBS)

        def later(look):
            async def looked():
                await tab.pass_time()
                return await tab.do(look)

            return looked

        await tab.do(lambda page: page.evaluate("scrollTo(0, 600)"))
        first = await tab.do(lambda page: page.get_attribute("tbody tr", "id"))
        await web.trigger(lock_key="new")
        await until(later(lambda page: page.query_selector("#newer") is not None))
        assert await tab.do(lambda page: page.get_attribute("tbody tr", "id")) == first
        database.psql("UPDATE dl_jobs SET status = 'canceled', finished_at = now() WHERE lock_key <> 'new'")
        await until(later(lambda page: page.inner_text("tbody tr .badge")), lambda text: "canceled" in text)
        await tab.do(lambda page: page.click("#newer"))
        assert await tab.do(lambda page: page.get_attribute("tbody tr", "id")) != first


@pytest.mark.slow
@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (360, "dark")])
async def test_u22_u23_the_list_has_no_fault_that_axe_finds_and_fits(open_web, open_tab, database, width, theme):
    async with open_web() as web, open_tab(web.url, width=width, color_scheme=theme) as tab:
        database.psql(
            "INSERT INTO dl_jobs (job_id, queue, task, lock_key, status, error, started_at, finished_at, attempt)"
            " SELECT gen_random_uuid(), 'load.' || repeat('long', i * 20), 'load.rates', repeat('key', i * 50),"
            " (ARRAY['queued', 'running', 'succeeded', 'failed', 'canceled', 'lost'])[i]::dl_status,"
            " CASE WHEN i > 3 THEN 'HTTPError: 503 ' || repeat('x', i * 300) END, now() - interval '90 s', now(), i"
            " FROM generate_series(1, 6) AS i"
        )
        await tab.go(f"{JOBS}?queue=&status=&from=2026-01-01T00:00")
        await tab.check_looks()


async def test_a_row_says_what_a_queued_job_waits_for_and_how_far_a_running_one_is(open_web, database):
    async with open_web() as web:
        ids = {
            key: await web.trigger(queue=key, lock_key=key) for key in ("served", "lonely", "paused", "busy", "held")
        }
        database.psql(
            "INSERT INTO dl_workers (worker, host, pid, version, queues, tasks)"
            """ VALUES ('w', 'h', 7, '1', '{"served": 1, "paused": 1, "busy": 1, "held": 1}', '{t}');"""
            "UPDATE dl_jobs SET waits_for = 'lock' WHERE queue = 'held';"
            "UPDATE dl_jobs SET status = 'running', claimed_by = 'w', token = 7, started_at = now(),"
            """ progress = '{"rows": 7, "of": 20}' WHERE queue = 'busy'"""
        )
        await web.jobs.pause("paused")
        text = re.sub(r"\s+", " ", (await web.client.get(JOBS)).text)
        details = {
            key: re.search(rf'id="job-{job_id}".*?data-label="Detail"[^>]*>(.*?)</td>', text)[1]
            for key, job_id in ids.items()
        }
        assert details["served"] == "ready, waits for a free slot"
        assert details["lonely"] == "no worker serves the queue lonely"
        assert details["paused"] == "its queue is paused"
        assert details["held"] == "blocked by its lock key"
        assert '<progress value="35" max="100"' in details["busy"]
        assert "7 of 20 rows" in details["busy"]


async def test_numbers_beside_the_list_follow_its_filter(open_web, database):
    async with open_web() as web:
        for number in range(3):
            await web.trigger(queue="mail", task="receipt", lock_key=str(number))
        await web.trigger(queue="stock", task="reserve", lock_key="x")
        database.psql("UPDATE dl_jobs SET status = 'failed', finished_at = now() WHERE lock_key IN ('0', 'x')")

        async def numbers(**query):
            facets = (await list_of(web, **query)).partition('aria-label="Facets"')[2].partition("</nav>")[0]
            return dict(re.findall(r"<span>([^<]+)</span><b>([^<]*)</b>", facets))

        every = await numbers()
        assert {name: every[name] for name in ("all", "queued", "failed", "mail", "stock", "receipt", "reserve")} == {
            "all": "4", "queued": "2", "failed": "2", "mail": "3", "stock": "1", "receipt": "3", "reserve": "1",
        }  # fmt: skip
        # The statuses are those without the filter's status: another one can be chosen.
        failed = await numbers(queue="mail", status="failed")
        assert (failed["queued"], failed["failed"], failed["receipt"], "stock" in failed) == ("2", "1", "1", False)
        link = '<a href="/ui/jobs?queue=mail&amp;status=queued">'
        assert link in await list_of(web, queue="mail", status="failed")

"""Health, readiness, status, metrics, the description, and the headers of every response."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest
import trio
from conditions import patience_s, until
from databases import raw_connection
from logged import capture_logs
from prometheus_client.parser import text_string_to_metric_families
from statements import record_statements
from turns import all_taken, waiting_for
from web_server import open_server

from dataloader.store.queue import reads
from dataloader.web.api import queue_depths
from dataloader.web.app import ROUTES
from dataloader.web.problems import PROBLEMS
from dataloader.web.server.limits import HttpLimits

pytestmark = pytest.mark.requirement("Q5")

NOWHERE = "postgresql://me:hush@127.0.0.1:1/x"


async def test_health_needs_no_database():
    async with open_server(NOWHERE) as web:
        answer = await web.client.get("/health")
        assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


async def test_without_a_database_everything_else_is_a_503_that_leaks_nothing():
    async with open_server(NOWHERE) as web:
        body = {"queue": "q", "task": "t", "lock_key": "k"}
        for answer in (
            await web.client.get("/ready"),
            await web.client.get("/api/v1/jobs"),
            await web.client.post("/api/v1/jobs/trigger", json=body),
            await web.client.get("/api/v1/jobs/0197a1b2-c3d4-7e5f-8a6b-9c0d1e2f3a4b/status?wait=20"),
        ):
            assert (answer.status_code, answer.headers["Retry-After"]) == (503, "5")
            assert answer.headers["Content-Type"] == "application/problem+json"
            assert not any(word in answer.text for word in ("hush", "127.0.0.1:1", "Errno", "SELECT"))
        status = await web.client.get("/status")
        assert (status.status_code, status.json()["database"], status.json()["queues"]) == (200, "unreachable", None)
        shown = await web.client.get("/metrics")
        assert shown.status_code == 200
        assert "dataloader_database_up 0.0" in shown.text


async def test_readiness_ends_with_the_drain_and_comes_and_goes_with_the_database(open_web):
    async with open_web() as web:
        assert (await web.client.get("/ready")).status_code == 200
        web.change(store_ready=False)
        assert (await web.client.get("/ready")).json()["type"] == "/problems/store-unavailable"
        web.change(store_ready=True, draining=True)
        assert (await web.client.get("/ready")).json()["type"] == "/problems/draining"
        assert (await web.client.get("/health")).status_code == 200


async def test_a_request_to_an_empty_database_is_a_503(empty_database):
    body = {"task": "t", "lock_key": "k"}
    async with open_server(empty_database.dsn) as web:
        web.change(starting=True)
        for answer in (
            await web.client.post("/api/v1/jobs/trigger", json={"queue": "q", **body}),
            await web.client.get("/ui/jobs"),
        ):
            assert (answer.status_code, answer.headers["Retry-After"]) == (503, "5")
        web.change(starting=False)
        later = await web.client.post("/api/v1/jobs/trigger", json={"queue": "q", **body})
        assert (later.status_code, later.json()["type"]) == (503, "/problems/store-unavailable")
        assert "must run `dataloader migrate`" in later.json()["detail"]


async def test_a_task_without_a_stored_queue_is_a_503_during_the_start_and_a_422_later(open_web):
    body = {"task": "t", "lock_key": "k"}
    async with open_web() as web:
        web.change(starting=True)
        early = await web.client.post("/api/v1/jobs/trigger", json=body)
        assert (early.status_code, early.json()["type"]) == (503, "/problems/store-unavailable")
        assert (await web.client.post("/api/v1/jobs/trigger", json={**body, "priority": "high"})).status_code == 422
        web.change(starting=False)
        assert (await web.client.post("/api/v1/jobs/trigger", json=body)).status_code == 422


async def test_the_status_shows_what_runs(open_web, database):
    database.psql("INSERT INTO dl_workers (worker, host, pid, version, queues) VALUES ('w', 'h', 7, '1', '{\"q\": 2}')")
    async with open_web() as web:
        await web.trigger()
        status = (await web.client.get("/status")).json()
        assert (status["version"], status["worker"], status["database"]) == ("1.2.3", "host:1", "reachable")
        assert status["serving"] == {"q": {"concurrency": 4, "running": 1}}
        assert [(queue["queue"], queue["ready"]) for queue in status["queues"]] == [("q", 1)]
        assert [worker["worker"] for worker in status["workers"]] == ["w"]
        assert (await web.client.get("/api/v1/workers")).json()["workers"] == status["workers"]


async def test_the_metrics_have_counts_times_and_depths(open_web):
    async with open_web() as web:
        await web.trigger()
        web.telemetry.claimed("q", 3, 0.004)
        web.telemetry.picked_up("q", 0.02)
        web.telemetry.job_ended("q", "t", "succeeded", 0.3)
        web.telemetry.job_ended("q", "t", "succeeded", 1e9)
        web.telemetry.taken_back([("q", "lost"), ("q", "queued"), ("q", "lost")])
        web.telemetry.lease_lost(2)
        web.telemetry.loop_stalled(0.2)
        web.telemetry.fenced(1)
        web.telemetry.found_endless(4)
        web.telemetry.lanes_closed("an entry", 1)
        web.telemetry.lanes_closed("another entry", 2)
        answer = await web.client.get("/metrics")
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        for line in (
            'dataloader_jobs_ended_total{outcome="succeeded",queue="q",task="t"} 2.0',
            'dataloader_job_run_seconds_bucket{le="0.1",queue="q",task="t"} 0.0',
            'dataloader_job_run_seconds_bucket{le="0.5",queue="q",task="t"} 1.0',
            'dataloader_job_run_seconds_count{queue="q",task="t"} 2.0',
            'dataloader_jobs_claimed_total{queue="q"} 3.0',
            'dataloader_claim_seconds_bucket{le="0.005",queue="q"} 1.0',
            'dataloader_pickup_seconds_sum{queue="q"} 0.02',
            'dataloader_jobs_taken_back_total{queue="q",status="lost"} 2.0',
            "dataloader_leases_lost_total 2.0",
            "dataloader_writes_fenced_total 1.0",
            "dataloader_endless_leases 4.0",
            "dataloader_limit_queues_closed 3.0",
            "dataloader_loop_stall_seconds_count 1.0",
            'dataloader_queue_jobs{queue="q",state="ready"} 1.0',
            'dataloader_slots{queue="q",state="free"} 3.0',
            "dataloader_listener_connected 1.0",
            "dataloader_database_up 1.0",
            'dataloader_info{version="1.2.3",worker="host:1"} 1.0',
        ):
            assert line in answer.text.splitlines(), line


@pytest.mark.slow
async def test_a_database_that_is_slow_to_count_is_not_gone(open_web, database):
    async with open_web(limits=HttpLimits(database_s=0.3, ping_s=0.3)) as web, raw_connection(database.dsn) as other:
        await web.client.get("/ready")
        await other.execute("BEGIN")
        await other.execute("LOCK TABLE dl_queues")
        status = (await web.client.get("/status")).json()
        assert (status["database"], status["queues"], status["workers"]) == ("reachable", None, [])
        shown = (await web.client.get("/metrics")).text
        assert "dataloader_database_up 1.0" in shown.splitlines()
        assert "dataloader_queue_jobs{" not in shown


def hostile_queues(database, number):
    database.psql(
        "INSERT INTO dl_jobs (job_id, queue, task, lock_key)"
        " SELECT gen_random_uuid(), 'hostile ' || lpad(i::text, 6, '0'), 't', i::text"
        f" FROM generate_series(1, {number}) i"
    )


async def test_made_up_queue_names_are_summed_in_one_metric_line(open_web, database):
    hostile_queues(database, 1_000)
    database.psql(
        "INSERT INTO dl_workers (worker, host, pid, version, queues) VALUES ('w', 'h', 7, '1', '{\"served\": 2}');"
        "INSERT INTO dl_jobs (job_id, queue, task, lock_key)"
        " SELECT gen_random_uuid(), q, 't', q FROM unnest('{served, busy, busy, busy}'::text[]) AS q"
    )
    async with open_web() as web:
        shown = (await web.client.get("/metrics")).text
    families = {family.name: family for family in text_string_to_metric_families(shown)}
    ready = {
        s.labels["queue"]: s.value for s in families["dataloader_queue_jobs"].samples if s.labels["state"] == "ready"
    }
    assert len(ready) == queue_depths.MOST_NAMED + 1
    assert (ready["served"], ready["busy"], ready["other"]) == (1, 3, 1_000 - queue_depths.MOST_NAMED + 2)
    assert len(families["dataloader_queue_paused"].samples) == queue_depths.MOST_NAMED + 1


async def test_queues_come_in_pages_and_the_status_shows_the_first(open_web, database):
    hostile_queues(database, 250)
    async with open_web() as web:
        pages, after = [], {}
        while True:
            page = (await web.client.get("/api/v1/queues", params={"limit": 100} | after)).json()
            pages.append([queue["queue"] for queue in page["queues"]])
            if page["next"] is None:
                break
            after = {"after": page["next"]}
        assert [len(page) for page in pages] == [100, 100, 50]
        assert len({name for page in pages for name in page}) == 250
        status = (await web.client.get("/status")).json()
        assert [queue["queue"] for queue in status["queues"]] == pages[0]
        following = (await web.client.get("/api/v1/queues", params={"after": status["queues_next"]})).json()["queues"]
        assert [queue["queue"] for queue in following] == pages[1] + pages[2]


async def test_scrapes_are_written_one_in_a_turn_of_the_loop(open_web):
    async with open_web() as web:
        turns, scraped = web.services.turns.scrapes, []

        async def scrape():
            scraped.append((await web.client.get("/metrics")).status_code)

        assert turns.total_tokens == 1
        with trio.fail_after(patience_s()):
            async with trio.open_nursery() as nursery, all_taken(turns):
                for _ in range(20):
                    nursery.start_soon(scrape)
                await until(lambda: waiting_for(turns), lambda number: number == 20)
                assert scraped == []
        assert scraped == [200] * 20


async def test_queue_depths_are_counted_once_for_concurrent_scrapes(open_web, database):
    hostile_queues(database, 1)
    async with open_web() as web:
        statements, found = await record_statements(web.services.database), []

        async def scrape():
            found.append("dataloader_queue_jobs{" in (await web.client.get("/metrics")).text)

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(scrape)
        assert found == [True] * 5
        assert [one.query for one in statements].count(reads.DEPTHS) == 1
        await web.trigger()
        assert 'dataloader_queue_jobs{queue="q"' not in (await web.client.get("/metrics")).text
        web.services.depths._asked_at -= 5
        assert 'dataloader_queue_jobs{queue="q"' in (await web.client.get("/metrics")).text


async def test_a_decent_request_id_comes_back_and_any_other_is_refused(open_web):
    async with open_web() as web:
        for given, status in (("abc-1", 200), ("a" * 128, 200), ("a" * 129, 400), ("ä", 400), ("", 200)):
            answer = await web.client.get("/health", headers={"X-Request-ID": given.encode()})
            assert answer.status_code == status
            assert (answer.headers["X-Request-ID"] == given) == (status == 200 and given != "")
            assert answer.headers["X-Request-ID"]
        missing = await web.client.get("/nowhere", headers={"X-Request-ID": "abc-1"})
        assert missing.json()["request_id"] == "abc-1"


@pytest.mark.requirement("Q16")
async def test_a_request_is_logged_with_its_id_and_without_secrets(open_web):
    async with open_web() as web:
        with capture_logs() as lines:
            await web.client.get("/api/v1/jobs?token=hush", headers={"X-Request-ID": "abc-1"})
        [line] = [line for line in lines if line["event"] == "request"]
        assert (line["request_id"], line["method"], line["status"], line["log_level"]) == ("abc-1", "GET", 422, "info")
        assert "hush" not in str(line)


async def test_every_answer_has_the_headers_of_a_careful_server(open_web):
    async with open_web() as web:
        for method, path in (
            ("GET", "/health"),
            ("GET", "/api/v1/jobs"),
            ("GET", "/no"),
            ("DELETE", "/health"),
            ("HEAD", "/health"),
        ):
            answer = await web.client.request(method, path)
            assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'")
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            assert answer.headers["Cache-Control"] == "no-store"
            assert "Server" not in answer.headers


@pytest.mark.slow
async def test_errors_of_routing_are_problems(open_web):
    async with open_web() as web:
        missing = await web.client.get("/api/v2/jobs")
        assert (missing.status_code, missing.headers["Content-Type"]) == (404, "application/problem+json")
        wrong = await web.client.delete("/api/v1/jobs/trigger")
        assert (wrong.status_code, wrong.headers["Content-Type"]) == (405, "application/problem+json")
        assert "POST" in wrong.headers["Allow"]
        assert (await web.client.options("/api/v1/jobs/trigger")).status_code == 200
        assert (await web.client.get("/api/v1/jobs/")).status_code == 200


async def test_the_type_of_a_problem_leads_to_what_it_means(open_web):
    raised = {
        kind
        for file in (Path(__file__).parents[3] / "web").rglob("*.py")
        if "pages" not in file.parts  # there, `kind` is a field of a form
        for kind in re.findall(r"""(?:kind="(?=[a-z]+-)|unavailable\([^\n]*, ")([a-z-]+)\"""", file.read_text())
    }
    async with open_web() as web:
        refused = await web.client.get("/api/v1/jobs", params={"limit": 0})
        shown = await web.client.get(refused.json()["type"])
        assert shown.json()["type"] == refused.json()["type"] == "/problems/invalid-request"
        for kind in PROBLEMS:
            assert (await web.client.get(f"/problems/{kind}")).json()["description"] == PROBLEMS[kind]
        assert (await web.client.get("/problems/none")).status_code == 404
    assert raised == PROBLEMS.keys()


async def test_an_unexpected_error_is_a_500_with_its_request_id_and_a_logged_traceback(open_web, database):
    odd = "postgresql://me:hush@db SELECT"
    database.psql(f"ALTER TYPE dl_status ADD VALUE '{odd}'")
    async with open_web() as web:
        await web.trigger()
        database.psql(f"UPDATE dl_jobs SET status = '{odd}'")
        with capture_logs() as lines:
            answer = await web.client.get("/api/v1/jobs", headers={"X-Request-ID": "abc-1"})
        assert answer.status_code == 500
        assert "abc-1" in answer.json()["detail"]
        assert "hush" not in answer.text
        [error] = [line for line in lines if line["log_level"] == "error"]
        assert isinstance(error["exc_info"], ValueError)
        assert odd in str(error["exc_info"])


INSTANTS = {
    *("available_at", "created_at", "started_at", "finished_at", "heartbeat_at", "lease_expires_at", "seen_at", "ts"),
    *("oldest_ready_at", "upto", "moved_at", "failed_at", "solved_at", "created_from", "finished_to"),
}


@pytest.mark.slow
async def test_the_description_covers_every_route_and_its_examples_hold(open_web):
    async with open_web() as web:
        described = (await web.client.get("/openapi.json")).json()
        assert described["openapi"] == "3.1.0"
        operations = {(method.upper(), path) for path, methods in described["paths"].items() for method in methods} | {
            ("GET", "/openapi.json"),
            ("GET", "/docs"),
        }
        assert len(operations) == len(ROUTES)
        text = json.dumps(described)
        names = set(described["components"]["schemas"])
        assert all(f'schemas/{name}"' in text for name in names - {"FieldError"})
        assert {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]} <= names
        kinds = {kind for route in ROUTES for kind in (route.body, *route.answers.values())}
        shown = {kind: kind.EXAMPLE for kind in kinds if hasattr(kind, "EXAMPLE")}
        assert len(shown) >= 11
        for kind, example in shown.items():
            assert described["components"]["schemas"][kind.__name__]["examples"] == [example]
            msgspec.convert(example, kind)
        for name, schema in described["components"]["schemas"].items():
            for field, shown in schema.get("properties", {}).items():
                kinds = [shown, *shown.get("anyOf", [])]
                assert any("description" in kind for kind in kinds), (name, field)
                if field in INSTANTS:
                    assert "date-time" in {kind.get("format") for kind in kinds}, (name, field)
        answers = {
            (path, status): set(answer["headers"])
            for path, methods in described["paths"].items()
            for operation in methods.values()
            for status, answer in operation["responses"].items()
        }
        assert all("X-Request-ID" in headers for headers in answers.values())
        assert all("Retry-After" in headers for (_, status), headers in answers.items() if status in {"429", "503"})
        assert "Link" in answers["/api/v1/jobs", "200"]
        assert "Location" in answers["/api/v1/jobs/trigger", "201"]
        assert {status for _, status in answers} >= {"408"}


async def test_the_page_of_the_description_runs_its_own_script_only(open_web):
    async with open_web() as web:
        first, second = [await web.client.get("/docs") for _ in range(2)]
        policy = first.headers["Content-Security-Policy"]
        nonce = policy.partition("script-src 'nonce-")[2].partition("'")[0]
        assert len(nonce) >= 16
        assert first.text.count(f'nonce="{nonce}"') == 2
        assert "{nonce}" not in first.text
        assert nonce not in second.text
        assert "unsafe" not in policy
        assert not any(word in first.text for word in ("https://", "src=", "innerHTML"))


@pytest.mark.slow
async def test_health_answers_while_all_else_waits_for_the_database(open_web, database):
    async with open_web() as web:
        job_id = await web.trigger()
        async with trio.open_nursery() as nursery:
            for _ in range(30):
                nursery.start_soon(web.client.get, f"/api/v1/jobs/{job_id}/status?wait=30")
            while await trio.to_thread.run_sync(database.psql, "SELECT watched FROM dl_jobs") != "t":
                await trio.lowlevel.checkpoint()
            with trio.fail_after(patience_s()):
                assert (await web.client.get("/health")).status_code == 200
            nursery.cancel_scope.cancel()

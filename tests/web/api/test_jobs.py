"""The job API over HTTP, with a real server and a real database."""

from __future__ import annotations

import json
import uuid
from datetime import UTC, datetime, timedelta
from urllib.parse import quote

import pytest
import trio
from calls import counted_calls
from conditions import patience_s, until
from turns import all_taken, waiting_for

from dataloader.jobs.errors import BadRequest, ConfigError
from dataloader.jobs.model import JOB_FIELDS, NewJob
from dataloader.jobs.tasks import Tasks
from dataloader.supervisor.settings import Settings, Worker
from dataloader.web import decoding
from dataloader.web.api.trigger import BatchRequest
from dataloader.web.problems import ProblemError

pytestmark = pytest.mark.requirement("Q2")

BODY = {"queue": "load.cbr", "task": "t", "lock_key": "k", "args": {"year": 2026}}
TRIGGER = "/api/v1/jobs/trigger"


async def test_a_new_job_is_created_with_its_address(open_web):
    async with open_web() as web:
        answer = await web.client.post(TRIGGER, json=BODY)
        assert answer.status_code == 201
        job = answer.json()
        expected = {
            "status": "queued",
            "created": True,
            "queue_state": "no_worker",
            "queue": "load.cbr",
            "did": "added",
        }
        assert job == {"job_id": job["job_id"]} | expected
        shown = await web.client.get(answer.headers["Location"])
        assert shown.status_code == 200
        assert shown.json()["args"] == {"year": 2026}
        assert shown.json()["created_at"].endswith("Z")


async def test_the_same_key_and_body_returns_the_first_job(open_web):
    async with open_web() as web:
        first = await web.client.post(TRIGGER, json=BODY | {"idempotency_key": "once"})
        again = await web.client.post(TRIGGER, json=BODY | {"idempotency_key": "once"})
        assert (first.status_code, again.status_code) == (201, 200)
        assert again.json() == first.json() | {"created": False, "did": "again"}


@pytest.mark.requirement("Q3")
async def test_the_status_of_a_job_has_its_result_without_secrets(open_web, database):
    async with open_web() as web:
        address = f"/api/v1/jobs/{await web.trigger()}/status"
        assert (await web.client.get(address)).json()["result"] is None
        database.psql('update dl_jobs set status = \'succeeded\', result = \'{"rows": 7, "token": "sesame"}\'')
        assert (await web.client.get(address)).json()["result"] == {"rows": 7, "token": "***"}


@pytest.mark.requirement("Q3")
async def test_jobs_are_found_by_when_they_ended_and_retried_by_it(open_web, database):
    async with open_web() as web:
        old, new = await web.trigger(lock_key="a"), await web.trigger(lock_key="b")
        await web.trigger(lock_key="c")
        for job_id, day in ((old, 1), (new, 2)):
            database.psql(
                f"update dl_jobs set status = 'failed', finished_at = '2026-11-{day:02}Z' where job_id = '{job_id}'"
            )

        async def found(**params):
            jobs = (await web.client.get("/api/v1/jobs", params=params)).json()["jobs"]
            return [job["job_id"] for job in jobs]

        assert await found(finished_from="2026-11-01T00:00:00Z") == [new, old]
        assert await found(finished_from="2026-11-02T00:00:00Z") == [new]
        assert await found(finished_to="2026-11-02T00:00:00Z") == [old]
        assert await found(finished_to="2026-11-02T00:00:00Z", status="succeeded,queued") == []
        retried = await web.client.post("/api/v1/jobs/retry", json={"finished_from": "2026-11-02T00:00:00Z"})
        assert retried.json() == {"changed": 1}
        assert await found(status="failed") == [old]


@pytest.mark.requirement("Q3")
async def test_a_job_shows_that_its_queue_is_paused_full_or_unserved(open_web, database):
    database.psql(
        "insert into dl_workers (worker, host, pid, version, queues)"
        """ values ('w', 'h', 1, '1', '{"free": 1, "full": 1}')"""
    )
    database.psql("insert into dl_queues (queue, paused) values ('paused', true)")
    database.psql(
        "insert into dl_jobs (job_id, queue, task, lock_key, status, claimed_by, token)"
        " values (gen_random_uuid(), 'full', 't', 'x', 'running', 'w', 1)"
    )
    states = {"free": None, "full": "full", "paused": "paused", "mistyped": "no_worker"}
    async with open_web() as web:
        for queue, state in states.items():
            triggered = (await web.client.post(TRIGGER, json=BODY | {"queue": queue})).json()
            # A trigger does not count running jobs: only a read of the job reports that all slots are taken.
            assert triggered["queue_state"] == (None if state == "full" else state)
            address = f"/api/v1/jobs/{triggered['job_id']}"
            assert (await web.client.get(address)).json()["queue_state"] == state
            assert (await web.client.get(f"{address}/status")).json()["queue_state"] == state
        batch = await web.client.post(f"{TRIGGER}/batch", json={"jobs": [BODY | {"queue": name} for name in states]})
        told = [job["queue_state"] for job in batch.json()["jobs"]]
        assert told == [None, None, "paused", "no_worker"]


@pytest.mark.requirement("Q3")
async def test_the_answer_to_a_trigger_says_that_no_worker_of_the_queue_knows_the_task(open_web, database):
    database.psql(
        "insert into dl_workers (worker, host, pid, version, queues, tasks)"
        """ values ('w', 'h', 1, '1', '{"q": 1}', '{t, "of password=sesame"}')"""
    )
    async with open_web() as web:
        batch = await web.client.post(
            f"{TRIGGER}/batch", json={"jobs": [BODY | {"queue": "q", "task": task} for task in ("t", "bad.wrok")]}
        )
        assert [job["queue_state"] for job in batch.json()["jobs"]] == [None, "unknown_task"]
        [worker] = (await web.client.get("/api/v1/workers")).json()["workers"]
        assert worker["tasks"] == ["t", "of password=***"]


async def test_the_header_idempotency_key_is_the_same_as_the_field(open_web, database):
    async with open_web() as web:

        async def triggered(*keys, url=TRIGGER, body=BODY):
            return await web.client.post(url, json=body, headers=[("Idempotency-Key", key) for key in keys])

        first = await triggered("once")
        for again in (await triggered('"once"'), await triggered("once", body=BODY | {"idempotency_key": "once"})):
            assert (again.status_code, again.json()["job_id"]) == (200, first.json()["job_id"])
        assert (await web.client.post(TRIGGER, json=BODY | {"idempotency_key": "once"})).status_code == 200
        assert database.psql("SELECT idempotency_key FROM dl_jobs") == "once"
        refused = {
            "idempotency_key": await triggered("once", body=BODY | {"idempotency_key": "twice"}),
            "Idempotency-Key": await triggered("a", "b"),
        }
        for path, answer in refused.items():
            assert (answer.status_code, [error["path"] for error in answer.json()["errors"]]) == (422, [path])
        for key in ("", '""', "é".encode(), "x" * 513):
            assert (await triggered(key)).status_code == 422, key
        batch = await triggered("once", url=f"{TRIGGER}/batch", body={"jobs": [BODY]})
        assert (batch.status_code, batch.json()["errors"][0]["path"]) == (422, "Idempotency-Key")
        assert database.psql("SELECT count(*) FROM dl_jobs") == "1"


async def test_the_same_key_with_another_body_is_a_conflict(open_web):
    async with open_web() as web:
        await web.client.post(TRIGGER, json=BODY | {"idempotency_key": "once"})
        other = await web.client.post(TRIGGER, json=BODY | {"idempotency_key": "once", "args": {"year": 1999}})
        assert other.status_code == 409
        assert other.json()["type"] == "/problems/idempotency-conflict"
        assert other.headers["Content-Type"] == "application/problem+json"


async def test_all_fields_of_the_table_are_taken(open_web):
    at = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=2)
    sent = BODY | {
        "partition_key": "p",
        "priority": 7,
        "available_at": at.isoformat(),
        "max_attempts": 9,
        "lease_ttl_sec": 45,
        "producer": "airflow",
        "consumer_group": "dwh",
        "idempotency_key": "i",
    }
    assert sent.keys() == JOB_FIELDS.keys() - {"job_id", "after", "when_failed", "root", "version"}
    async with open_web() as web:
        job_id = await web.trigger(**sent)
        shown = (await web.client.get(f"/api/v1/jobs/{job_id}")).json()
        assert sent | {"available_at": at.isoformat().replace("+00:00", "Z")} == {name: shown[name] for name in sent}
        assert shown["waits_for"] == "time"


async def test_null_means_not_given(open_web):
    async with open_web() as web:
        answer = await web.client.post(TRIGGER, json=BODY | {"priority": None, "args": None, "available_at": None})
        assert answer.status_code == 201


@pytest.mark.slow
async def test_a_known_task_gives_its_own_defaults(open_web, database):
    database.psql(
        "INSERT INTO dl_tasks (task, queue, max_attempts, lease_ttl_sec, layout, declared_by)"
        " VALUES ('known', 'own', 7, 33, 1, 'w')"
    )
    async with open_web(default_lease_s=99) as web:
        known = (await web.client.get(f"/api/v1/jobs/{await web.trigger(task='known')}")).json()
        other = (await web.client.get(f"/api/v1/jobs/{await web.trigger(task='other')}")).json()
        asked = (await web.client.get(f"/api/v1/jobs/{await web.trigger(task='known', max_attempts=2)}")).json()
        assert (known["max_attempts"], known["lease_ttl_sec"]) == (7, 33)
        assert (other["max_attempts"], other["lease_ttl_sec"]) == (5, 99)
        assert (asked["max_attempts"], asked["lease_ttl_sec"]) == (2, 33)
        answer = await web.client.post(TRIGGER, json={"task": "known", "lock_key": "k"})
        assert (answer.status_code, answer.json()["queue"]) == (201, "own")
        answer = await web.client.post(TRIGGER, json={"task": "other", "lock_key": "k"})
        assert answer.status_code == 422
        message = (
            'is required, because the task "other" has no queue; no process has declared it yet:'
            " start `dataloader serve` with it once, or set queue"
        )
        assert answer.json()["errors"] == [{"path": "queue", "message": message}]


async def test_all_bad_fields_are_named_together(open_web):
    bad = {"queue": 5, "task": "", "args": [], "priority": -1, "available_at": "2026-01-01T00:00:00", "colour": "red"}
    async with open_web() as web:
        answer = await web.client.post(TRIGGER, json=bad)
        assert answer.status_code == 422
        errors = {error["path"]: error["message"] for error in answer.json()["errors"]}
        assert set(errors) == {"queue", "task", "args", "priority", "available_at", "colour", "lock_key"}
        assert errors["priority"] == "must be an integer from 0 to 2,147,483,647, not -1"
        assert "time zone" in errors["available_at"]
        assert errors["lock_key"] == "is required"
        assert errors["queue"] == "must be a string or null, not an integer"
        assert errors["args"] == "must be an object or null, not an array"


BAD_VALUES = [
    ("limit=0", "must be an integer from 1 to 1,000"),
    (f"limit={2**70}", "must be an integer from 1 to 1,000"),
    ("limit=many", "must be an integer, not a string"),
    ("after=" + "a" * 2_001, f"must be the `next` of the previous page, not '{'a' * 59}"),
    ("status=failed,gone", "must be one of queued, running, succeeded, failed, canceled, lost"),
    ("created_from=yesterday", "must be a timestamp with a time zone (RFC 3339), such as 2026-11-20T12:00:00Z"),
    (
        "finished_to=2026-11-20T12:00:00",
        "must be a timestamp with a time zone (RFC 3339), such as 2026-11-20T12:00:00Z",
    ),
]


async def test_a_bad_value_is_answered_with_what_is_allowed_in_words_of_json(open_web):
    async with open_web() as web:
        for query, said in BAD_VALUES:
            answer = await web.client.get(f"/api/v1/jobs?{query}")
            assert answer.status_code == 422, query
            [error] = answer.json()["errors"]
            assert error["path"].partition("[")[0] == query.partition("=")[0]
            assert error["message"] == said


async def test_the_bounds_of_large_numbers_are_written_out(open_web):
    async with open_web() as web:
        address = f"/api/v1/jobs/{await web.trigger()}"
        answer = await web.client.get(f"{address}/events?limit=1001")
        assert answer.json()["errors"][0]["message"] == "must be an integer from 1 to 1,000"
        answer = await web.client.get(f"{address}/status?wait=61")
        assert answer.json()["errors"][0]["message"] == "must be a number from 0 to 60"


async def test_a_batch_names_each_bad_field_with_its_place(open_web, database):
    async with open_web() as web:
        jobs = [BODY, BODY | {"priority": "high"}, {"queue": "q", "task": "t"}, BODY | {"lease_ttl_sec": 1}, 5]
        answer = await web.client.post(f"{TRIGGER}/batch", json={"jobs": jobs})
        assert answer.status_code == 422
        paths = [error["path"] for error in answer.json()["errors"]]
        assert paths == ["jobs[1].priority", "jobs[2].lock_key", "jobs[3].lease_ttl_sec", "jobs[4]"]
        assert database.psql("SELECT count(*) FROM dl_jobs") == "0"


async def test_a_batch_is_added_in_order_all_or_none(open_web, database):
    async with open_web() as web:
        jobs = [BODY | {"idempotency_key": f"k{number}"} for number in range(1000)]
        answer = await web.client.post(f"{TRIGGER}/batch", json={"jobs": jobs})
        assert answer.status_code == 201
        again = await web.client.post(f"{TRIGGER}/batch", json={"jobs": jobs})
        assert again.status_code == 200
        ids = [job["job_id"] for job in again.json()["jobs"]]
        assert ids == [job["job_id"] for job in answer.json()["jobs"]]
        clash = [BODY | {"idempotency_key": "new"}, BODY | {"idempotency_key": "k5", "task": "another"}]
        refused = await web.client.post(f"{TRIGGER}/batch", json={"jobs": clash})
        assert refused.status_code == 409
        assert database.psql("SELECT count(*) FROM dl_jobs") == "1000"


@pytest.mark.parametrize(("number", "wrong"), [(1_000, "jobs[500].priority"), (10_000, "jobs")])
def test_only_the_wrong_jobs_of_a_batch_are_checked_field_by_field(number, wrong):
    """The check takes a millisecond for each job."""
    jobs = [BODY] * 500 + [BODY | {"priority": "high"}] + [BODY] * (number - 501)
    with counted_calls(decoding) as calls, pytest.raises(ProblemError) as caught:
        decoding.convert({"jobs": jobs}, BatchRequest)
    assert [error.path for error in caught.value.errors] == [wrong]
    assert 0 < calls.total() < number


async def test_numbers_come_back_as_they_were_sent(open_web):
    numbers = [2**63, 2**64, -(2**63) - 1, -(2**64), 10**300, 1e-7, 0.1, 5e-324]
    async with open_web() as web:
        job_id = await web.trigger(args={"numbers": numbers})
        shown = (await web.client.get(f"/api/v1/jobs/{job_id}")).json()["args"]["numbers"]
        assert list(zip(shown, map(type, shown), strict=True)) == list(zip(numbers, map(type, numbers), strict=True))


BAD_NAMES = ["a\nb", "\x1b[31m", "\x7f", "\x85", "\u2028", "\u2029", " ", " \u2003", "\x00", "\ud800"]


async def test_one_rule_for_names_and_keys_wherever_they_are_given(open_web):
    """HTTP, Python, a task's registration and the settings refuse the same names."""
    async with open_web() as web:
        for name in BAD_NAMES:
            await refused_everywhere(web, name)


async def refused_everywhere(web, name):
    fields = ("queue", "task", "lock_key", "idempotency_key", "partition_key", "producer", "consumer_group")
    body = json.dumps(BODY | dict.fromkeys(fields, name))
    answer = await web.client.post(TRIGGER, content=body, headers={"Content-Type": "application/json"})
    if name == "\ud800":  # not valid JSON
        assert answer.status_code == 400
    else:
        assert {error["path"] for error in answer.json()["errors"]} == {*fields}
        address = f"/api/v1/queues/{quote(name, safe='')}"
        assert {(await web.client.post(f"{address}/{action}")).status_code for action in ("pause", "resume")} <= {
            404,
            422,
        }
    for field in fields:
        with pytest.raises(BadRequest, match=field):
            NewJob(**{"queue": "q", "task": "t", field: name})
    with pytest.raises(ValueError, match="task"):
        Tasks().task(name)
    with pytest.raises(ConfigError, match="queue"):
        Settings(db_dsn="postgresql://x/y", workers=(Worker(name, 1),))


async def test_an_address_that_is_no_text_is_refused_and_acts_on_nothing(open_web, database):
    async with open_web() as web:
        for method, path in (
            ("POST", "/api/v1/queues/%FF%FE/pause"),
            ("GET", "/api/v1/jobs?queue=%FF"),
            ("GET", "/api/v1/loads/%C3"),
            ("GET", "/%ff"),
        ):
            answer = await web.client.request(method, path)
            assert (answer.status_code, answer.json()["title"]) == (400, "Bad Request")
        assert database.psql("SELECT count(*) FROM dl_queues") == "0"


async def test_a_filter_of_null_is_refused_and_not_dropped(open_web):
    async with open_web() as web:
        for name in ("created_from", "created_to"):
            answer = await web.client.get("/api/v1/jobs", params={name: "null"})
            assert (answer.status_code, answer.json()["errors"][0]["path"]) == (422, name)
        await web.trigger(queue="null")
        assert len((await web.client.get("/api/v1/jobs", params={"queue": "null"})).json()["jobs"]) == 1


OTHER_METHODS = [
    ("PATCH", "trigger", {"OPTIONS", "POST"}),
    ("GET", "trigger", {"OPTIONS", "POST"}),
    ("GET", "cancel", {"OPTIONS", "POST"}),
    ("DELETE", "0197a1b2-c3d4-7e5f-8a6b-9c0d1e2f3a4b", {"GET", "HEAD", "OPTIONS", "PATCH"}),
]


async def test_a_wrong_method_is_a_405_that_names_the_allowed_ones(open_web):
    async with open_web() as web:
        for method, path, allowed in OTHER_METHODS:
            answer = await web.client.request(method, f"/api/v1/jobs/{path}")
            assert (answer.status_code, {*answer.headers["Allow"].split(", ")}) == (405, allowed)


@pytest.mark.parametrize("jobs", [[], [BODY] * 1001], ids=["none", "too many"])
async def test_a_batch_has_one_to_a_thousand_jobs(open_web, jobs):
    async with open_web() as web:
        answer = await web.client.post(f"{TRIGGER}/batch", json={"jobs": jobs})
        assert answer.status_code == 422
        assert answer.json()["errors"][0]["path"] == "jobs"


NOT_STORED = [
    (b"{", 400, None),
    (b"", 400, None),
    (b"\xff", 400, None),
    (b'{"queue":"\xff"}', 400, None),
    (b"[" * 5000 + b"]" * 5000, 400, None),
    (b"[]", 422, "$"),
    (b'{"queue":"q","task":"t","lock_key":"k","args":{"a":1e999}}', 422, "args[...]"),
    (b'{"queue":"q","task":"t","lock_key":"k","args":{"a":"\\u0000"}}', 422, "args"),
    (b'{"queue":"q\\u0000","task":"t","lock_key":"k"}', 422, "queue"),
    (b'{"queue":"q","task":"t","lock_key":"k","args":{"a":[' + b"1e308," * 60_000 + b"1]}}", 422, "args"),
    (b'{"queue":"q","task":"t","lock_key":"k","args":{"a":' + b"9" * 309 + b"}}", 422, "args"),
    (b'{"queue":"q","task":"t","lock_key":"k","priority":true}', 422, "priority"),
]


@pytest.mark.slow
async def test_an_unstorable_value_is_refused_and_never_a_500(open_web):
    async with open_web() as web:
        for content, status, path in NOT_STORED:
            answer = await web.client.post(TRIGGER, content=content, headers={"Content-Type": "application/json"})
            assert answer.status_code == status, (content[:100], answer.text)
            assert [error["path"] for error in answer.json().get("errors", [])] == ([path] if path else []), content[
                :100
            ]


async def test_a_body_that_is_too_long_is_refused_announced_or_not(open_web):
    async with open_web(max_body_bytes=1000, max_batch_body_bytes=5000) as web:
        long = BODY | {"args": {"text": "x" * 2000}}
        assert (await web.client.post(TRIGGER, json=long)).status_code == 413

        async def chunks():
            yield b'{"queue":"q","args":{"a":"'
            for _ in range(20):
                yield b"x" * 100
            yield b'"}}'

        chunked = await web.client.post(TRIGGER, content=chunks(), headers={"Content-Type": "application/json"})
        assert chunked.status_code == 413
        assert (await web.client.post(f"{TRIGGER}/batch", json={"jobs": [long]})).status_code == 201
        assert (await web.client.post(f"{TRIGGER}/batch", json={"jobs": [long] * 3})).status_code == 413


async def test_only_json_is_taken_and_as_it_is(open_web):
    json_type = {"Content-Type": "application/json"}
    async with open_web() as web:
        for headers in (
            {},
            {"Content-Type": "text/plain"},
            {"Content-Type": "application/x-www-form-urlencoded"},
            json_type | {"Content-Encoding": "gzip"},
            json_type | {"Content-Encoding": "identity, br"},
        ):
            answer = await web.client.post(TRIGGER, content=json.dumps(BODY).encode(), headers=headers)
            assert answer.status_code == 415, headers
            assert answer.headers["Content-Type"] == "application/problem+json"
            assert ("Accept-Encoding" in answer.headers) == ("Content-Encoding" in headers)
        answer = await web.client.post(TRIGGER, json=BODY, headers=json_type | {"Content-Encoding": "identity"})
        assert answer.status_code == 201


async def test_a_draining_process_takes_no_jobs_and_still_answers(open_web):
    async with open_web() as web:
        job_id = await web.trigger()
        web.change(draining=True)
        refused = await web.client.post(TRIGGER, json=BODY)
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "5")
        assert refused.json()["type"] == "/problems/draining"
        assert (await web.client.post(f"{TRIGGER}/batch", json={"jobs": [BODY]})).status_code == 503
        assert (await web.client.get(f"/api/v1/jobs/{job_id}/status")).status_code == 200
        assert (await web.client.post(f"/api/v1/jobs/{job_id}/cancel")).json()["status"] == "canceled"


@pytest.mark.requirement("Q3")
async def test_the_status_has_the_fields_of_the_contract_without_secrets(open_web, database):
    async with open_web() as web:
        job_id = await web.trigger()
        database.psql(
            "UPDATE dl_jobs SET status = 'running', attempt = 1, token = 5, started_at = now(), heartbeat_at = now(),"
            """ error = 'no way to postgresql://me:hush@db/x', progress = '{"rows": 3, "password": "hush"}'"""
        )
        status = (await web.client.get(f"/api/v1/jobs/{job_id}/status")).json()
        assert {"job_id", "status", "attempt", "started_at", "finished_at", "heartbeat_at", "error", "progress"} <= set(
            status
        )
        assert (status["status"], status["attempt"], status["finished_at"]) == ("running", 1, None)
        assert status["progress"] == {"rows": 3, "password": "***"}
        assert "hush" not in status["error"]
        assert "hush" not in (await web.client.get(f"/api/v1/jobs/{job_id}")).text
        assert "hush" not in (await web.client.get("/api/v1/jobs")).text


@pytest.mark.requirement("Q3")
@pytest.mark.parametrize("path", ["", "/status"])
async def test_a_job_shows_the_begin_of_its_first_and_of_its_last_run(open_web, database, path):
    async with open_web() as web:
        job_id = await web.trigger()
        url = f"/api/v1/jobs/{job_id}{path}"
        assert (await web.client.get(url)).json()["run_started_at"] is None
        database.psql("UPDATE dl_jobs SET started_at = '2026-01-01Z', run_started_at = '2026-01-02Z'")
        job = (await web.client.get(url)).json()
        assert (job["started_at"], job["run_started_at"]) == ("2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z")
        # The claims of other services do not write it.
        database.psql("UPDATE dl_jobs SET run_started_at = NULL")
        assert (await web.client.get(url)).json()["run_started_at"] == "2026-01-01T00:00:00Z"


@pytest.mark.requirement("Q3")
async def test_an_unknown_job_is_not_found(open_web):
    async with open_web() as web:
        for job_id in ("nonsense", "00000000-0000-7000-8000-000000000000"):
            for rest in ("", "/status", "/events"):
                answer = await web.client.get(f"/api/v1/jobs/{job_id}{rest}")
                assert (answer.status_code, answer.json()["title"]) == (404, "Not Found"), (job_id, rest)


MORE_PROGRESS = """
UPDATE dl_jobs SET progress = jsonb_build_object('rows', coalesce(progress ->> 'rows', '0')::int + 1)
"""


@pytest.mark.requirement("Q3")
async def test_a_waiting_reader_is_notified_of_a_change_immediately(open_web, database):
    # Without a periodic read only the notification can wake the reader.
    async with open_web(reread_s=3_600) as web:
        job_id = await web.trigger()
        answers = []

        async def wait() -> None:
            answers.append(await web.client.get(f"/api/v1/jobs/{job_id}/status", params={"wait": 30}))

        with trio.fail_after(patience_s()):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait)
                # Repeatedly: the progress that the reader finds when it begins is not a change for it.
                while not answers:
                    await trio.to_thread.run_sync(database.psql, MORE_PROGRESS)
                    web.services.performer.waits.changed(uuid.UUID(job_id))
                    await trio.sleep(0.05)
        assert answers[0].json()["progress"]["rows"] > 0


@pytest.mark.requirement("Q3")
async def test_a_wait_ends_after_its_timeout_and_immediately_for_an_ended_job(open_web):
    async with open_web() as web:
        job_id = await web.trigger()
        with trio.fail_after(patience_s()):
            answer = await web.client.get(f"/api/v1/jobs/{job_id}/status", params={"wait": 0.05})
        assert answer.json()["status"] == "queued"
        await web.client.post(f"/api/v1/jobs/{job_id}/cancel")
        with trio.fail_after(patience_s()):
            answer = await web.client.get(f"/api/v1/jobs/{job_id}/status", params={"wait": 60})
        assert answer.json()["status"] == "canceled"
        too_long = await web.client.get(f"/api/v1/jobs/{job_id}/status", params={"wait": 61})
        assert (too_long.status_code, too_long.json()["errors"][0]["path"]) == (422, "wait")


@pytest.mark.requirement("Q4")
async def test_a_queued_job_is_canceled_immediately_and_a_running_one_on_request(open_web, database):
    async with open_web() as web:
        queued, running = await web.trigger(), await web.trigger()
        database.psql(f"UPDATE dl_jobs SET status = 'running', token = 5 WHERE job_id = '{running}'")
        answer = (await web.client.post(f"/api/v1/jobs/{queued}/cancel")).json()
        assert answer["status"] == "canceled"
        assert "note" not in answer
        answer = (await web.client.post(f"/api/v1/jobs/{running}/cancel")).json()
        assert (answer["status"], answer["cancel_requested"]) == ("running", True)


@pytest.mark.requirement("Q4")
async def test_canceling_an_ended_job_changes_nothing_and_says_so(open_web, database):
    async with open_web() as web:
        job_id = await web.trigger()
        database.psql("UPDATE dl_jobs SET status = 'succeeded', finished_at = now()")
        answer = (await web.client.post(f"/api/v1/jobs/{job_id}/cancel")).json()
        assert answer["status"] == "succeeded"
        assert "its status is succeeded" in answer["note"]


async def test_a_failed_job_can_be_retried_and_a_queued_one_can_not(open_web, database):
    async with open_web() as web:
        job_id = await web.trigger()
        refused = await web.client.post(f"/api/v1/jobs/{job_id}/retry")
        assert (refused.status_code, refused.json()["type"]) == (409, "/problems/not-allowed-now")
        database.psql("UPDATE dl_jobs SET status = 'failed', attempt = 5, finished_at = now()")
        answer = await web.client.post(f"/api/v1/jobs/{job_id}/retry")
        assert (answer.json()["status"], answer.json()["attempt"]) == ("queued", 0)


async def test_a_running_job_with_an_endless_lease_can_be_retried_by_force(open_web, database):
    async with open_web() as web:
        job_id = await web.trigger()
        database.psql("UPDATE dl_jobs SET status = 'running', heartbeat_at = now() - interval '1 hour'")
        refused = await web.client.post(f"/api/v1/jobs/{job_id}/retry")
        assert refused.status_code == 409
        assert "its lease never expires" in refused.json()["detail"]
        wrong = await web.client.post(f"/api/v1/jobs/{job_id}/retry?force=perhaps")
        assert wrong.status_code == 422
        answer = await web.client.post(f"/api/v1/jobs/{job_id}/retry?force=true")
        assert (answer.status_code, answer.json()["status"]) == (200, "queued")


async def test_a_waiting_job_gets_another_priority_and_runs_now(open_web):
    async with open_web() as web:
        job_id = await web.trigger(available_at=(datetime.now(UTC) + timedelta(days=1)).isoformat())
        changed = await web.client.patch(f"/api/v1/jobs/{job_id}", json={"priority": 3})
        assert (changed.status_code, changed.json()["priority"]) == (200, 3)
        bad = await web.client.patch(f"/api/v1/jobs/{job_id}", json={"priority": -3})
        assert (bad.status_code, bad.json()["errors"][0]["path"]) == (422, "priority")
        assert (await web.client.post(f"/api/v1/jobs/{job_id}/run-now")).json()["waits_for"] is None


@pytest.mark.requirement("Q11")
async def test_the_journal_is_read_in_pages(open_web):
    async with open_web() as web:
        job_id = await web.trigger()
        await web.client.post(f"/api/v1/jobs/{job_id}/cancel")
        address = f"/api/v1/jobs/{job_id}/events"
        first = (await web.client.get(address, params={"limit": 1})).json()["events"]
        rest = (await web.client.get(address, params={"after": first[-1]["event_id"]})).json()["events"]
        assert [event["kind"] for event in first + rest] == ["queued", "canceled"]


async def test_jobs_are_listed_by_filter_in_pages(open_web):
    async with open_web() as web:
        ids = [await web.trigger(queue="a" if number % 2 else "b", lock_key=str(number)) for number in range(5)]
        await web.client.post(f"/api/v1/jobs/{ids[1]}/cancel")
        pages, after = [], {}
        while True:
            page = (await web.client.get("/api/v1/jobs", params={"limit": 2} | after)).json()
            pages.append([job["job_id"] for job in page["jobs"]])
            if page["next"] is None:
                break
            after = {"after": page["next"]}
        assert pages == [[ids[4], ids[3]], [ids[2], ids[1]], [ids[0]]]

        async def listed(**params):
            answer = await web.client.get("/api/v1/jobs", params=params)
            return [job["job_id"] for job in answer.json()["jobs"]]

        assert await listed(queue="a") == [ids[3], ids[1]]
        assert await listed(queue="a", status="canceled") == [ids[1]]
        assert await listed(queue="a", status="canceled,queued") == [ids[3], ids[1]]
        assert await listed(status=["canceled", "failed"]) == [ids[1]]
        assert await listed(lock_key="2") == [ids[2]]
        assert await listed(created_from="2100-01-01T00:00:00Z") == []


async def test_a_bad_query_names_every_bad_parameter(open_web):
    async with open_web() as web:
        params = {"limit": "many", "status": "queued,gone", "created_from": "2026-01-01T00:00:00", "colour": "red"}
        answer = await web.client.get("/api/v1/jobs", params=params | {"queue": "a\x00"})
        assert answer.status_code == 422
        paths = {error["path"].partition("[")[0] for error in answer.json()["errors"]}
        assert paths == {"limit", "status", "created_from", "colour", "queue"}
        for cursor in ("nonsense", "ä", "\x00"):
            answer = await web.client.get("/api/v1/jobs", params={"after": cursor})
            assert (answer.status_code, answer.json()["errors"][0]["path"]) == (422, "after")


async def test_many_jobs_are_canceled_and_retried_by_a_filter(open_web):
    async with open_web() as web:
        for number in range(3):
            await web.trigger(queue="a" if number else "b")
        assert (await web.client.post("/api/v1/jobs/cancel", json={"queue": "a"})).json() == {"changed": 2}
        assert (await web.client.post("/api/v1/jobs/retry", json={"queue": "a", "limit": 1})).json() == {"changed": 1}
        everything = await web.client.post("/api/v1/jobs/cancel", json={})
        assert everything.status_code == 422
        assert "at least one of" in everything.json()["errors"][0]["message"]


async def test_many_jobs_run_now_or_get_another_priority_by_a_filter(open_web, database):
    async with open_web() as web:
        for number in range(3):
            await web.trigger(queue="a" if number else "b", available_at="2100-01-01T00:00:00Z")
        changes = "/api/v1/jobs/reprioritize", {"queue": "a", "priority": 7}
        assert [(await web.client.post(changes[0], json=changes[1])).json()["changed"] for _ in range(2)] == [2, 0]
        assert database.psql("SELECT string_agg(queue || priority, ' ' ORDER BY queue) FROM dl_jobs") == "a7 a7 b100"
        run_now = "/api/v1/jobs/run-now", {"queue": "a", "limit": 1}
        assert [(await web.client.post(run_now[0], json=run_now[1])).json()["changed"] for _ in range(3)] == [1, 1, 0]
        assert database.psql("SELECT string_agg(queue, ' ') FROM dl_jobs WHERE waits_for = 'time'") == "b"
        for address, missing in ((changes[0], {"queue": "a"}), (changes[0], {"priority": 1}), (run_now[0], {})):
            assert (await web.client.post(address, json=missing)).status_code == 422


async def test_a_queue_with_any_name_is_paused_and_resumed(open_web, database):
    async with open_web() as web:
        await web.trigger(queue="a/b c")
        assert (await web.client.post("/api/v1/queues/a%2Fb%20c/pause")).json() == {"queue": "a/b c", "paused": True}
        [queue] = (await web.client.get("/api/v1/queues")).json()["queues"]
        assert (queue["queue"], queue["paused"], queue["ready"]) == ("a/b c", True, 1)
        assert (await web.client.post("/api/v1/queues/a/b%20c/resume")).json()["paused"] is False
        assert (await web.client.post("/api/v1/queues/a%00/pause")).status_code == 422
        assert database.psql("SELECT count(*) FROM dl_queues WHERE paused") == "0"


@pytest.mark.requirement("Q16")
async def test_a_job_of_megabytes_is_masked_off_the_loop(open_web):
    async with open_web() as web:
        job_id = await web.trigger(args={"password": "hunter2", "text": "a" * 500_000})
        address, threads, answers = f"/api/v1/jobs/{job_id}", web.services.turns.masking.places, []

        async def ask(method, path, body):
            answers.append((await web.client.request(method, path, json=body)).json())

        with trio.fail_after(patience_s()):
            for method, path, body in (
                ("GET", address, None),
                ("GET", "/api/v1/jobs", None),
                ("PATCH", address, {"priority": 1}),
            ):
                async with trio.open_nursery() as nursery, all_taken(threads):
                    nursery.start_soon(ask, method, path, body)
                    await until(lambda: waiting_for(threads), lambda number: number == 1)
                    assert (await web.client.get("/health")).status_code == 200
    shown = [answer["jobs"][0] if "jobs" in answer else answer for answer in answers]
    assert [job["args"]["password"] for job in shown] == ["***"] * 3

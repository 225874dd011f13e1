"""The API keeps to its own description for every request: no server errors, and no answer that deceives a browser.

Schemathesis generates requests from /openapi.json: for each operation alone, and in sequences in which one uses the IDs
from the answers of another. CONTRACT_EXAMPLES is the number of requests for each operation, and of sequences.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sysconfig
from collections import defaultdict
from urllib.parse import quote, urlsplit

import pytest
import trio
from conditions import patience_s
from prometheus_client.parser import text_string_to_metric_families

EXAMPLES = os.environ.get("CONTRACT_EXAMPLES", "8")
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "ensure_resource_availability",
)
CONFIGURATION = """
[parameters]
"path.run_id" = "{run_id}"
"path.load" = "rates"
"path.task" = "quick"
"path.kind" = "draining"
"path.name" = "nightly"
"path.supplier" = "hr"
"path.group" = "00c8f1de4a91b37e"
"path.process_type" = "payment"
"path.process_id" = "77"
"path.task_id" = 1

[[operations]]
include-path = "/api/v1/jobs/{{job_id}}/status"
parameters = {{ wait = 0.05 }}

[[operations]]
include-path = "/api/v1/processes/{{process_type}}/{{process_id}}/repair"
parameters = {{ "path.process_id" = "mended", wait = 0.05 }}

[[operations]]
include-name = "PUT /api/v1/processes/{{process_type}}/{{process_id}}"
parameters = {{ "path.process_id" = "imported" }}

[[operations]]
include-path = "/api/v1/processes/{{process_type}}/{{process_id}}/remove"
parameters = {{ "path.process_id" = "removed" }}

[[operations]]
include-path = "/api/v1/processes/{{process_type}}/{{process_id}}/call"
parameters = {{ wait = 0.05 }}

[[operations]]
include-path-regex = "/api/v1/processes/({{process_type}}|{{process_type}}/{{process_id}}|tasks/{{task_id}})"
parameters = {{ wait = 0.05 }}

[[operations]]
include-name = "DELETE /api/v1/tasks/{{task}}"
parameters = {{ "path.task" = "gone" }}

[[operations]]
include-name = "POST /api/v1/schedules/{{name}}/run"
parameters = {{ "path.name" = "hourly" }}

[[operations]]
include-path-regex = "/api/v1/tasks/[^{{].*"
enabled = false
"""
"""A run or a load cannot be created in another way; tasks may do harm; many status requests would wait for a minute."""
HEADERS = {
    "content-security-policy": r"default-src 'none'(;.*)?",
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-request-id": ".+",
}
TYPES = {"application/json", "application/problem+json", "text/plain; version=0.0.4; charset=utf-8"}
"""Media types of all answers; only /docs is a page."""
HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</script><svg/onload=alert(1)>",
    "javascript:alert(1)//",
    "{{7*7}}${7*7}<%= 7*7 %>",
    "'; DROP TABLE dl_jobs; --",
    'a"} 1\nforged_metric{x="1"} 1\n# HELP \\',
    "a\r\nX-Forged: 1\r\n\r\n<html>",
    "../../../etc/hosts",
    "\u2028\u2029\u202e\ufeff\x1b[31m\x07",
    "𝕳ö\u0301 日本",
]


def judge(status, headers, body, where):
    """Return the faults of an answer, in words."""
    found = {name.lower(): value for name, value in headers}
    wrong = [name for name, value in HEADERS.items() if not re.fullmatch(value, found.get(name, ""))]
    if status >= 500:
        wrong.append(f"status {status}")
    if found.keys() & {"set-cookie", "x-forged"}:
        wrong.append("a header that we do not send")
    if body and found.get("content-type") not in TYPES:
        wrong.append(f"content type {found.get('content-type')}")
    return [f"{where}: {what}" for what in wrong]


@pytest.mark.full
@pytest.mark.long
@pytest.mark.requirement("Q2", "Q3", "Q4", "Q5")
async def test_the_service_keeps_to_its_description(unmeasured, serve, add, row_when, raw, client_of, tmp_path):
    service = await serve({"load.cbr": 2, "q": 2})
    # So that there is an object of every kind to show.
    run_id = await add("quick", {"answer": {"rows": 3}})
    await row_when(run_id, "succeeded")
    await raw.execute("INSERT INTO dl_etl_runs (run_id, name, kind) VALUES ($1, 'rates', 'load')", run_id)
    await raw.execute(
        "INSERT INTO dl_etl_tasks (run_id, ordinal, task, status) VALUES ($1, 1, 'rates', 'failed')", run_id
    )
    await raw.execute(
        "INSERT INTO dl_etl_failures (run_id, load, segment, phase, key, error)"
        " VALUES ($1, 'rates', 'all', 'record', 'x', 'x')",
        run_id,
    )
    await raw.execute("UPDATE dl_tasks SET queue = 'q' WHERE task = 'quick'")
    await raw.execute("INSERT INTO dl_tasks (task, layout, declared_by) VALUES ('employee', 1, 'w'), ('gone', 1, 'w')")
    await raw.execute(
        "INSERT INTO dl_schedules (name, spec, task, origin, stored_by)"
        """ VALUES ('hourly', '{"task": "quick", "cron": "@hourly", "job": {"queue": "q"}}', 'quick', 'code', 'x')"""
    )
    await row_when(await add("log", {"password": "sesame"}, max_attempts=1), "failed")
    await row_when(await add("sleep", {"s": 3_600}), "running")
    await add("no such task", lock_key="k")
    await raw.execute(
        "UPDATE dl_jobs SET status = 'lost', finished_at = now() WHERE job_id = $1", await add("x", queue="x")
    )
    await raw.execute(
        "INSERT INTO dl_processes (type, process_id, status, error_group) VALUES"
        " ('payment', '77', 'running', NULL), ('payment', 'mended', 'error', 1),"
        " ('payment', 'removed', 'running', NULL)"
    )
    await raw.execute(
        "INSERT INTO dl_process_tasks (task_id, key, type, kind)"
        " SELECT 1, min(key), 'payment', 'call' FROM dl_processes"
    )
    configuration, report = tmp_path / "schemathesis.toml", tmp_path / "report.har"
    configuration.write_text(CONFIGURATION.format(run_id=run_id))
    program = shutil.which("schemathesis", path=f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}")
    assert program, "schemathesis comes with the extra dev"
    command = [
        *(program, "--config-file", str(configuration)),
        *("run", f"{service.url}/openapi.json", "--no-color", "--continue-on-failure"),
        *("--checks", ",".join(CHECKS), "--max-examples", EXAMPLES, "--seed", os.environ.get("CONTRACT_SEED", "1")),
        *("--workers", "1", "--request-timeout", "20", "--generation-database", "none"),
        *("--output-sanitize", "false", "--suppress-health-check", "all", "--report-har-path", str(report)),
    ]
    with trio.fail_after(900):
        result = await trio.run_process(
            command, capture_stdout=True, stderr=subprocess.STDOUT, check=False, cwd=tmp_path
        )
    said = result.stdout.decode()
    print(said)  # noqa: T201 - for readers of the output
    assert result.returncode == 0, said
    async with client_of(service) as client:
        described = (await client.get("/openapi.json")).json()["paths"]
        assert (await client.get("/ready")).status_code == 200
    entries = json.loads(report.read_text())["log"]["entries"]
    wrong, good = [], defaultdict(int)
    addresses = {re.compile(re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(path))): path for path in described}
    for entry in entries:
        asked, answered = entry["request"], entry["response"]
        headers = [(header["name"], header["value"]) for header in answered["headers"]]
        body = answered["content"].get("size", 0) > 0
        wrong += judge(answered["status"], headers, body, f"{asked['method']} {asked['url'][:200]}")
        for address, path in addresses.items():
            if answered["status"] < 300 and address.fullmatch(urlsplit(asked["url"]).path):
                good[f"{asked['method']} {path}"] += 1
    assert wrong == []
    one_task = re.compile(r"/api/v1/tasks/[^{].*")
    operations = {
        f"{method.upper()} {path}"
        for path, methods in described.items()
        for method in methods
        if not one_task.fullmatch(path)
    }
    # Each was served, including those that need an existing job: the sequences have led to them.
    one_process = "/api/v1/processes/{process_type}/{process_id}"
    needs_another_status = {
        "POST /api/v1/jobs/{job_id}/retry",
        "POST /api/v1/errors/{group}/retry",
        f"POST {one_process}/resume",
        f"POST {one_process}/stop",
    }
    needs_a_new_id = {"POST /api/v1/schedules/{name}/run"}  # the sequences give it the IDs of jobs
    assert operations - good.keys() - needs_another_status - needs_a_new_id == set()
    wrong = [line for line in service.lines if line["level"] in {"error", "critical", "no JSON"}]
    # This is the machine's fault.
    assert [line for line in wrong if line["event"] != "the event loop is blocked"] == []


@pytest.mark.full
@pytest.mark.requirement("Q2", "Q16")
@pytest.mark.parametrize("text", HOSTILE)
async def test_hostile_text_is_returned_as_data_and_never_as_a_page(open_web, database, text):
    async with open_web() as web:
        fields = dict.fromkeys(("queue", "task", "lock_key", "partition_key", "producer", "consumer_group"), text)
        # Another service may use names that we refuse.
        job_id = await web.trigger(args={text: [text]})
        database.psql(
            f"UPDATE dl_jobs SET {', '.join(f'{name} = $kn${text}$kn$' for name in (*fields, 'idempotency_key'))};"
            f" UPDATE dl_jobs SET error = $kn${text}$kn$, progress = args, result = args, status = 'failed';"
            f" INSERT INTO dl_job_events (job_id, queue, kind, payload) SELECT job_id, queue, 'log', args FROM dl_jobs;"
            f" INSERT INTO dl_etl_runs (run_id, name, kind) SELECT job_id, task, 'load' FROM dl_jobs;"
            " INSERT INTO dl_etl_tasks (run_id, ordinal, layer, task, started_at, summary)"
            "   SELECT job_id, 1, task, task, now(), jsonb_build_object('counts', args) FROM dl_jobs;"
            " INSERT INTO dl_etl_failures (run_id, load, segment, phase, key, error, sample)"
            "   SELECT job_id, task, task, task, task, task, task FROM dl_jobs;"
            f" INSERT INTO dl_jobs (job_id, queue, task, lock_key) VALUES (gen_random_uuid(), $kn${text}$kn$, 't', 'k')"
        )
        paths = (await web.client.get("/openapi.json")).json()["paths"]
        wrong = []
        part = quote(text, safe="")
        parts = {"job_id": job_id, "run_id": job_id, "load": part, "kind": part, "name": part, "group": part}
        parts |= {"task": part, "supplier": part, "bulk_id": job_id}
        parts |= {"process_type": part, "process_id": part, "task_id": 1}
        for path in (path.format(**parts) for path, methods in paths.items() if "get" in methods):
            answer = await web.client.get(path)
            wrong += judge(answer.status_code, answer.headers.items(), answer.content, path)
        shown = (await web.client.get(f"/api/v1/jobs/{job_id}")).json()
        assert {name: shown[name] for name in fields} == fields
        assert shown["args"] == shown["progress"] == shown["result"] == {text: [text]}
        [failure] = (await web.client.get(f"/api/v1/runs/{job_id}/failures")).json()["failures"]
        assert {failure[name] for name in ("load", "segment", "phase", "key", "error", "sample")} == {text}
        [run] = (await web.client.get("/api/v1/runs", params={"name": text})).json()["runs"]
        [task] = (await web.client.get(f"/api/v1/runs/{run['run_id']}/timeline")).json()["tasks"]
        assert (run["name"], task["task"], task["counts"]) == (text, text, {text: [text]})
        assert (await web.client.get("/api/v1/jobs", params={"queue": text})).json()["jobs"][-1]["job_id"] == job_id
        paused = await web.client.post(f"/api/v1/queues/{quote(text, safe='')}/pause")
        wrong += judge(paused.status_code, paused.headers.items(), paused.content, "pause")
        if "\n" in text:
            assert paused.status_code == 404  # no address leads to a name of several lines
        elif "\x1b" in text:
            assert paused.status_code == 422
        else:
            assert paused.json() == {"queue": text, "paused": True}
        # One metric per line, whatever a label contains.
        web.services.depths._asked_at -= 5
        metrics = (await web.client.get("/metrics")).text
        families = {family.name: family for family in text_string_to_metric_families(metrics)}
        assert all(name.startswith(("dataloader_", "python_", "process_")) for name in families)
        assert text in {sample.labels["queue"] for sample in families["dataloader_queue_jobs"].samples}
        assert text not in (await web.client.get("/docs")).text
    assert wrong == []


@pytest.mark.slow
@pytest.mark.requirement("Q16")
async def test_text_of_a_refused_request_is_returned_as_data_or_not_at_all(open_web):
    async with open_web() as web:
        for text in HOSTILE:
            await refused_requests(web, text)


async def refused_requests(web, text):
    line = re.sub(r"[^ -~]", "?", text)
    trigger, job = "/api/v1/jobs/trigger", {"queue": "q", "task": "t", "lock_key": "k"}
    answers = [
        await web.client.get(f"/{quote(text)}"),
        await web.client.delete(f"/api/v1/jobs/{quote(text, safe='')}"),
        await web.client.get(f"/api/v1/jobs/{quote(text, safe='')}"),
        await web.client.get("/api/v1/jobs", params={text: text, "status": text, "after": text, "created_from": text}),
        await web.client.post(trigger, json=job | {text: text, "priority": text, "available_at": text}),
        await web.client.post(trigger, json=[text]),
        await web.client.post(trigger, content=text.encode(), headers={"Content-Type": "application/json"}),
        await web.client.post(trigger, content=b"{}", headers={"Content-Type": line}),
        await web.client.get("/health", headers={"X-Request-ID": line}),
        await web.client.get("/api/v1/jobs", headers={"Host": line.replace(" ", "") or "x"}),
        await web.client.post(trigger, json=job, headers={"Origin": line}),
        await web.client.get("/api/v1/jobs", headers={"Accept": "text/html", "X-Forwarded-Host": line}),
    ]
    wrong = []
    for number, answer in enumerate(answers):
        wrong += judge(answer.status_code, answer.headers.items(), answer.content, number)
        answer.json()
    assert wrong == [], text


EDGES = (
    "0001-01-01T00:00:00+14:00",
    "0001-01-01T00:00:00Z",
    "9999-12-31T23:59:59.999999-14:00",
    "9999-12-31T23:59:59Z",
)
BIG = 10**4_000


@pytest.mark.requirement("Q2")
async def test_values_at_the_edge_of_what_can_be_kept_are_taken_or_refused(open_web):
    """Accepted values can be shown."""
    wide = "".join(chr(0x10000 + n) for n in range(512))
    bodies = [
        *({"available_at": edge} for edge in EDGES),
        *({"available_at": edge, "idempotency_key": edge} for edge in EDGES),
        {"lock_key": wide, "idempotency_key": wide, "partition_key": wide, "producer": wide, "consumer_group": wide},
        {"queue": wide[:200], "task": wide[:200]},
        {"priority": 2**31 - 1, "max_attempts": 1_000_000, "lease_ttl_sec": 86_400},
        {"args": {"": {"": [None, True, 1.7976931348623157e308, 5e-324, -0.0, 2**63, -(2**64)]}}},
        {"args": {"big": BIG}},
        {"args": {"deep": json.loads("[" * 200 + "]" * 200)}},
    ]
    raw_bodies = [
        b'{"queue":"q","task":"t","lock_key":"k","args":{"a":"\\ud800"}}',
        b'{"queue":"q","task":"t","lock_key":"k","args":{"\\u0000":1}}',
        b'{"queue":"q","task":"t","lock_key":"k","args":{"a":1,"a":2}}',
        b'{"queue":"q","task":"t","lock_key":"k","args":{"a":' + b"1" * 100_000 + b"}}",
        b'{"queue":"q","task":"t","lock_key":"k","args":{"a":1.' + b"1" * 100_000 + b"}}",
        b'{"queue":"q","task":"t","lock_key":"k","args":{"a":1e-400}}',
        b'{"queue":"q","task":"t","lock_key":"k","priority":1e0}',
        b'\xef\xbb\xbf{"queue":"q","task":"t","lock_key":"k"}',
    ]
    job = {"queue": "q", "task": "t", "lock_key": "k"}
    contents = [json.dumps(job | body).encode() for body in bodies] + raw_bodies
    async with open_web() as web:
        failed = {}
        for content in contents:
            answer = await web.client.post(
                "/api/v1/jobs/trigger", content=content, headers={"Content-Type": "application/json"}
            )
            if answer.status_code not in {200, 201, 400, 422}:
                failed[content[:120]] = answer.status_code
        for path in ("/api/v1/jobs", "/api/v1/queues", "/status", "/metrics"):
            assert (await web.client.get(path)).status_code == 200
    assert failed == {}


@pytest.mark.requirement("Q1")
async def test_rows_nested_too_deeply_to_be_read_are_shown_by_their_beginning_and_obey(open_web, database):
    deep = "(repeat('[', {0}) || repeat(']', {0}))::jsonb"
    failed = {}
    async with open_web() as web:
        for depth in (990, 5_000):
            value = deep.format(depth)
            job_id = database.psql(
                "INSERT INTO dl_jobs (job_id, queue, task, lock_key, args, progress, available_at)"
                f" VALUES (gen_random_uuid(), 'q', 't', '{depth}', {value}, {value}, now() + '1 h') RETURNING job_id"
            )
            database.psql(
                "INSERT INTO dl_job_events (job_id, queue, kind, payload)"
                f" SELECT '{job_id}', 'q', kind, {value} FROM unnest('{{log,picked}}'::text[]) AS kind"
            )
            shown = {"truncated": "[" * depth + "]" * depth, "bytes": 2 * depth}
            job = f"/api/v1/jobs/{job_id}"
            reads = [("GET", job + end) for end in ("", "/status", "/events", "/logs")]
            for method, path in [
                ("GET", "/api/v1/jobs"),
                *reads,
                ("POST", f"{job}/run-now"),
                ("POST", f"{job}/cancel"),
            ]:
                answer = await web.client.request(method, path)
                if answer.status_code not in {200, 202}:
                    failed[f"{depth} at {method} {path}"] = answer.status_code
                elif path == job:
                    assert (answer.json()["args"], answer.json()["progress"]) == (shown, shown)
                elif path.endswith("/events"):
                    assert [event["payload"] for event in answer.json()["events"][:2]] == [shown, shown]
            assert database.psql(f"SELECT status FROM dl_jobs WHERE job_id = '{job_id}'") == "canceled"
    assert failed == {}


QUESTIONS = [
    *(("GET", f"/api/v1/jobs?{name}={quote(edge)}") for name in ("created_from", "finished_to") for edge in EDGES),
    *(("POST", f"/api/v1/jobs/{action}") for action in ("cancel", "retry")),
    *(("GET", f"/api/v1/stats?{name}={quote(edge)}&by=day") for name in ("from", "to") for edge in EDGES),
    ("GET", "/api/v1/stats?from=&by=week&queue="),
    ("GET", "/api/v1/stats?after=WyIwMDAxLTAxLTAxVDAwOjAwOjAwWiIsInEiLCJ0Iiwic3VjY2VlZGVkIl0&by=total"),
    ("GET", "/api/v1/jobs?limit=1000&after=" + "A" * 32),
    ("GET", "/api/v1/jobs?after=" + "f" * 32),
    ("GET", "/api/v1/jobs?queue=&task=&lock_key="),
    ("GET", "/api/v1/jobs?status="),
    ("GET", "/api/v1/audit?before=0"),
    ("GET", f"/api/v1/audit?before={2**63 - 1}"),
    ("GET", f"/api/v1/audit?before={2**63}"),
    ("GET", f"/api/v1/audit?limit={BIG}"),
    *(("GET", f"/api/v1/jobs/{{job_id}}/status?wait={wait}") for wait in ("nan", "inf", "-0.0", "1e-320", "1e400")),
    ("GET", f"/api/v1/jobs/{{job_id}}/events?after={2**63 - 1}&limit=1000"),
    *(("GET", f"/api/v1/jobs/{form}") for form in ("urn:uuid:{job_id}", "{{{job_id}}}", "%00", "%ff", "{job_id}%20")),
]


@pytest.mark.requirement("Q2")
async def test_questions_at_the_edge_are_answered_or_refused(open_web):
    async with open_web() as web:
        job_id = await web.trigger()
        for method, path in QUESTIONS:
            address = path.replace("{{{job_id}}}", "{%s}").replace("{job_id}", "%s").replace("%s", job_id)
            bodies = [{"created_from": edge} for edge in EDGES] if method == "POST" else [None]
            for body in bodies:
                with trio.fail_after(patience_s()):
                    answer = await web.client.request(method, address, json=body)
                assert answer.status_code in {200, 400, 404, 422}, (address, body, answer.text)


@pytest.mark.slow
@pytest.mark.requirement("Q1")
async def test_rows_that_only_another_service_would_write_are_shown(open_web, database):
    """The contract's tables accept values that no Python datetime and no JSON number of ours can represent."""
    values = {
        "available_at": ("'infinity'", "'-infinity'", "'294276-12-31'", "'4713-01-01 BC'"),
        "created_at": ("'infinity'", "'294276-12-31'", "'4713-01-01 BC'"),
        "args": (
            "'[]'",
            "'null'",
            "'\"x\"'",
            "'[1e400, -1e400, 1e-400]'",
            "repeat('[', 900)::text || repeat(']', 900)",
        ),
        "progress": ("'null'", "'[true]'"),
        "queue": ("''", "repeat('q', 900)"),
        "lock_key": ("''",),
    }
    failed = {}
    async with open_web() as web:
        for column, value in [(column, value) for column, candidates in values.items() for value in candidates]:
            kind = "::jsonb" if column in {"args", "progress"} else "::timestamptz" if column.endswith("_at") else ""
            row = {"queue": "'q'", "task": "'t'", "lock_key": "'k'"} | {column: f"({value}){kind}"}
            job_id = database.psql(
                "DELETE FROM dl_jobs;"
                f"INSERT INTO dl_jobs (job_id, {', '.join(row)})"
                f" VALUES (gen_random_uuid(), {', '.join(row.values())}) RETURNING job_id"
            )
            for path in (f"/api/v1/jobs/{job_id}", f"/api/v1/jobs/{job_id}/status", "/api/v1/jobs", "/api/v1/queues"):
                answer = await web.client.get(path)
                if answer.status_code != 200:
                    failed[f"{column} {value} at {path.replace(job_id, '…')}"] = answer.status_code
    assert failed == {}

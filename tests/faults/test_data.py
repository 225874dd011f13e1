"""Data of the queue and its users: hostile values, unknown tasks, added and removed queues, deletion under readers.

These are the faults F40, F41, F44 and F45.
"""

from __future__ import annotations

import base64
import json
import re
import signal
import struct
from functools import partial
from urllib.parse import quote
from uuid import uuid4

import pytest
import trio
from conditions import until
from services import FAST, LEASE_S, PATIENT, PATIENT_LEASE_S

TRIGGER = "/api/v1/jobs/trigger"
JSON = {"Content-Type": "application/json"}


# F40: hostile values


def nested(levels):
    return b"[" * levels + b"]" * levels


VALUES = {
    "NUL": rb'"a\u0000b"',
    "NUL as a key": rb'{"a\u0000b": 1}',
    "a raw NUL": b'"a\x00b"',
    "no NUL, it only looks like one": rb'"a\\u0000b"',
    "half a pair": rb'"\ud800"',
    "half a pair as a key": rb'{"\udc00": 1}',
    "a pair the wrong way round": rb'"\udc00\ud800"',
    "a pair": rb'"\ud83d\ude00"',
    "no UTF-8": b'"\xff\xfe"',
    "a surrogate in UTF-8": b'"\xed\xa0\x80"',
    "NaN": b"NaN",
    "Infinity": b"-Infinity",
    "more than a float holds": b"1e999",
    "less than a float holds": b"1e-999",
    "more than 64 bits": b"18446744073709551616",
    "4,000 digits": b"9" * 4_000,
    "100,000 digits": b"9" * 100_000,
    "nothing": b"",
    "the same key twice": b'{"a": 1, "a": 2}',
    "an empty key": b'{"": {"": ""}}',
    "1 MB": b'"' + b"x" * 1_000_000 + b'"',
    "1 MB of quotes": b'"' + rb"\"" * 500_000 + b'"',
    "1 MB of what is longer as JSON": b'"' + b"\x7f" * 500_000 + rb"\u0001" * 80_000 + b'"',
    "1 MB of items": b"[" + b"0," * 500_000 + b"0]",
    "50,000 keys": json.dumps({f"key {n}": n for n in range(50_000)}).encode(),
    "2 MB": b'"' + b"x" * 2_000_000 + b'"',
    "a secret of 1 MB": b'{"password": "' + b"x" * 1_000_000 + b'"}',
} | {f"{levels:,} levels": nested(levels) for levels in (100, 500, 800, 900, 1_000, 3_000, 6_000, 100_000)}

TEXTS = [
    "",
    "\x00",
    "a\x00b",
    "\ud800",
    "x" * 200,
    "x" * 513,
    "x" * 100_000,
    "\U0001f600" * 200,
    "\u202e\r\n\x1b[31m",
    "../..",
    "{}",
]
INSTANTS = [
    "0001-01-01T00:00:00Z",
    "0001-01-01T00:00:00+23:59",
    "9999-12-31T23:59:59.999999Z",
    "9999-12-31T23:59:59-23:59",
    "2026-02-30T00:00:00Z",
    "2026-11-20T12:00:00",
    "infinity",
    "",
    1e300,
]
NUMBERS = [-1, 0, 2**31, 2**63, 2**64, 10**30, 1.5, True, "1", [], {}]
FIELDS = (
    dict.fromkeys(("queue", "task", "lock_key", "idempotency_key", "partition_key", "producer"), TEXTS)
    | {"available_at": INSTANTS, "args": ["", [], 1, None, {"a": "\ud800"}]}
    | dict.fromkeys(("priority", "max_attempts", "lease_ttl_sec"), NUMBERS)
)
ADDRESSES = [
    "GET /api/v1/jobs/%00",
    "GET /api/v1/jobs/%ff/status",
    "GET /api/v1/jobs/%ED%A0%80/events",
    "GET /api/v1/jobs?queue=%00",
    "GET /api/v1/jobs?queue=%ff",
    "GET /api/v1/jobs?lock_key=%ED%A0%80",
    "GET /api/v1/jobs?status=bogus,,%00",
    "GET /api/v1/jobs?limit=99999999999999999999",
    "GET /api/v1/jobs?limit=NaN",
    *(f"GET /api/v1/jobs?created_from={quote(str(instant))}" for instant in INSTANTS),
    *(f"GET /api/v1/jobs?created_to={quote(str(instant))}" for instant in INSTANTS),
    *(
        f"GET /api/v1/jobs?after={base64.urlsafe_b64encode(struct.pack('>q16s', us, b'x' * 16)).decode()}"
        for us in (-(2**63), -62_135_596_800_000_000, 0, 253_402_300_799_999_999, 2**63 - 1)
    ),
    "GET /api/v1/jobs?after=%00",
    "GET /api/v1/audit?before=99999999999999999999",
    "GET /api/v1/audit?before=0&limit=0",
    *(f"POST /api/v1/queues/{quote(text, errors='surrogatepass')}/pause" for text in TEXTS if len(text) < 1_000),
    *(f"POST /api/v1/queues/{quote(text, errors='surrogatepass')}/resume" for text in TEXTS if len(text) < 1_000),
]
SAID = {
    "50 MB": "succeeded",
    "NUL and half pairs": "succeeded",
    "not a number": "succeeded",
    "100,000 levels": "succeeded",
    "a traceback of 900 calls": "failed",
    "a message of 10 MB": "failed",
    "1,000 errors in groups": "failed",
}
"""Results or errors of the task `hostile`, and how its job ends."""


def bodies():
    """Return the bodies of triggers, by their oddity."""
    for number, (name, value) in enumerate(VALUES.items()):
        head = f'{{"queue": "q", "task": "quick", "lock_key": "value {number}", "max_attempts": 1, "args": {{"answer": '
        yield name, head.encode() + value + b"}}"
    for field, values in FIELDS.items():
        for number, value in enumerate(values):
            request = {"queue": "q", "task": "quick", "lock_key": f"{field} {number}", "max_attempts": 1, field: value}
            yield f"{field} = {value!r:.40}", json.dumps(request).encode()


def changes():
    """Return the bodies of changes, one field at a time; none of them matches an existing job."""
    for field, values in (FIELDS | {"created_from": INSTANTS, "created_to": INSTANTS}).items():
        if field in {"queue", "lock_key", "created_from", "created_to"}:
            for value in values:
                yield "/api/v1/jobs/cancel", field, value
                yield "/api/v1/jobs/retry", field, value
    for value in NUMBERS:
        yield f"/api/v1/jobs/{uuid4()}", "priority", value


async def all_pages(asked):
    """Read the list of all jobs."""
    after = ""
    while after is not None:
        page = await asked("the list", "GET", f"/api/v1/jobs?limit=10{after and f'&after={after}'}")
        after = page.json().get("next")


@pytest.mark.full
@pytest.mark.requirement("Q2", "Q9")
async def test_f40_hostile_requests_are_refused_or_become_jobs_that_end_and_can_be_read(serve, client_of, raw):
    service = await serve(**FAST)
    accepted, wrong = {}, []
    async with client_of(service) as client:

        async def asked(what, method, path, **more):
            answer = await client.request(method, path, **more)
            if answer.status_code >= 500:
                wrong.append((what, answer.status_code))
            return answer

        for what, content in bodies():
            # A connection is closed after an answer that did not wait for the whole body.
            headers = JSON | ({"Connection": "close"} if len(content) > 2**20 else {})
            answer = await asked(what, "POST", TRIGGER, content=content, headers=headers)
            if answer.is_success:
                accepted[answer.json()["job_id"]] = what
        for path, field, value in changes():
            method = "PATCH" if field == "priority" else "POST"
            request = json.dumps({"task": "of nobody"} | {field: value} if method == "POST" else {field: value})
            await asked(f"{path}: {field} = {value!r:.40}", method, path, content=request, headers=JSON)
        for address in ADDRESSES:
            await asked(address, *address.split(" ", 1))
        runnable = "queue = 'q' AND task = 'quick' AND available_at <= now()"
        left = f"SELECT count(*) FROM dl_jobs WHERE status IN ('queued', 'running') AND {runnable}"
        await until(lambda: raw.fetchval(left), lambda count: count == 0, within_s=30)
        for job_id, what in accepted.items():
            for path in ("", "/status", "/events"):
                answer = await asked(f"reading {what}", "GET", f"/api/v1/jobs/{job_id}{path}")
                wrong.extend([(what, path, answer.status_code)] * (answer.status_code != 200))
        await all_pages(asked)
        assert (await client.get("/ready")).status_code == 200
    assert not wrong, "\n".join(map(str, wrong))
    # Some of each kind were stored, and their results are unchanged.
    same = "SELECT status::text, args -> 'answer' = result AS same FROM dl_jobs WHERE job_id = $1"
    by_what = {what: job_id for job_id, what in accepted.items()}
    for what in ("1 MB", "a pair", "500 levels", "no NUL, it only looks like one"):
        row = await raw.fetchrow(same, by_what[what])
        assert (what, row["status"], row["same"]) == (what, "succeeded", True)
    assert not {"NUL", "half a pair", "NaN", "2 MB", "100,000 levels"} & by_what.keys()


@pytest.mark.slow
@pytest.mark.requirement("Q9")
async def test_f40_a_job_ends_readable_with_any_output_of_its_handler(serve, add, row_when, client_of):
    service = await serve(**FAST)
    jobs = {what: await add("hostile", {"what": what}, max_attempts=1) for what in SAID}
    quick = await add("quick")
    async with client_of(service) as client:
        for what, status in SAID.items():
            row = await row_when(jobs[what], status, within_s=30)
            assert row["attempt"] == 1
            assert len(row["error"] or "") < 100_000
            assert len(row["result"] or "") < 2_000_000
            for path in ("", "/status", "/events"):
                assert (what, (await client.get(f"/api/v1/jobs/{jobs[what]}{path}")).status_code) == (what, 200)
        assert (await client.get("/api/v1/jobs")).status_code == 200
    # Its outcome is written together with theirs.
    await row_when(quick, "succeeded")


@pytest.mark.slow
@pytest.mark.requirement("Q2")
async def test_f40_an_early_answer_to_a_long_body_closes_the_connection(serve, client_of):
    service = await serve(**FAST)
    async with client_of(service) as client:
        answer = await client.post(TRIGGER, content=b"x" * 2_000_000, headers=JSON)
        assert (answer.status_code, answer.headers.get("connection")) == (413, "close")
        # Otherwise a client with a pool would send its next request into the end of this one.
        assert (await client.get("/health")).status_code == 200


# F41: unknown tasks

NEXT_RELEASE = """
from service_tasks import tasks


@tasks.task("of the next release")
async def of_the_next_release(job):
    return "known"
"""


@pytest.mark.slow
@pytest.mark.requirement("Q6")
async def test_f41_a_job_of_an_unknown_task_waits_for_a_worker_that_knows_it(
    serve, add, row_when, raw, client_of, tmp_path
):
    settings = FAST | {"claim_backoff_sec": 0.3}
    old = await serve({"q": 2}, **settings)
    waiting = await add("of the next release", max_attempts=1)
    async with client_of(old) as client:

        async def metrics():
            return (await client.get("/metrics")).text

        # The alarm is raised, and they do not delay other jobs.
        await until(metrics, lambda text: 'dataloader_queue_jobs{queue="q",state="unknown_task"} 1.0' in text)
    await row_when(await add("quick"), "succeeded")
    skipped = await raw.fetchrow("SELECT waits_for, attempt, crashes FROM dl_jobs WHERE job_id = $1", waiting)
    assert tuple(skipped) == (None, 0, 0)
    (tmp_path / "next_release.py").write_text(NEXT_RELEASE)
    new = await serve({"q": 2}, tasks="next_release:tasks", **settings)
    jobs = [waiting] + [await add("of the next release", max_attempts=1) for _ in range(5)]
    for job_id in jobs:
        ended = await row_when(job_id, "succeeded", within_s=30)
        assert (ended["attempt"], ended["crashes"], ended["error"]) == (1, 0, None)
    picked = await raw.fetch(
        "SELECT job_id, payload ->> 'worker' AS worker FROM dl_job_events WHERE kind = 'picked' AND job_id = ANY ($1)",
        jobs,
    )
    assert sorted(line["job_id"] for line in picked) == sorted(jobs)
    assert {line["worker"].split(":")[-2] for line in picked} == {str(new.process.pid)}
    assert old.process.poll() is None


# F44: added and removed queues


@pytest.mark.full
@pytest.mark.requirement("Q14", "Q15")
async def test_f44_jobs_of_a_queue_that_was_taken_out_wait_until_it_is_put_back(serve, add, row_when, raw):
    first = await serve({"q": 2, "r": 2}, **FAST)
    running = await add("sleep", {"s": 1}, queue="r", lease_ttl_sec=LEASE_S)
    await row_when(running, "running")
    first.signal(signal.SIGTERM)
    assert await first.exit_code(within_s=20) == 0
    await row_when(running, "succeeded", within_s=0)
    await serve({"q": 2}, **FAST)
    left = [await add("quick", queue="r") for _ in range(5)]
    for _ in range(3):
        await row_when(await add("quick"), "succeeded")
    rows = await raw.fetch("SELECT status::text, attempt, waits_for FROM dl_jobs WHERE job_id = ANY ($1)", left)
    assert [tuple(row) for row in rows] == [("queued", 0, None)] * 5
    await serve({"q": 2, "r": 2}, **FAST)
    for job_id in left:
        assert (await row_when(job_id, "succeeded"))["attempt"] == 1


@pytest.mark.full
@pytest.mark.requirement("Q6", "Q14")
async def test_f44_a_pause_in_the_middle_of_claims_holds_in_all_processes_until_the_resume(
    serve, raw, counts, client_of
):
    one, other = [await serve({"q": 8}, poll_sec=0.3, **PATIENT) for _ in range(2)]
    await raw.execute(
        "INSERT INTO dl_jobs (job_id, queue, task, lock_key, lease_ttl_sec)"
        " SELECT gen_random_uuid(), 'q', 'churn', 'key ' || n, 15 FROM generate_series(1, 1500) AS n"
    )
    await until(counts, lambda counts: counts.get("succeeded", 0) > 50)
    async with client_of(one) as at_one, client_of(other) as at_other:
        assert (await at_one.post("/api/v1/queues/q/pause")).status_code == 200
        settled = await until(counts, lambda counts: "running" not in counts)
        assert settled["queued"] > 0

        async def claims():
            texts = [(await client.get("/metrics")).text for client in (at_one, at_other)]
            return [int(re.search(r'claim_seconds_count\{queue="q"\} (\d+)', text)[1]) for text in texts]

        asked = await claims()
        await until(claims, lambda now: all(n >= before + 3 for n, before in zip(now, asked, strict=True)))
        assert await counts() == settled
        assert (await at_other.post("/api/v1/queues/q/resume")).status_code == 200
    assert (await until(counts, lambda counts: len(counts) == 1, within_s=180)) == {"succeeded": 1_500}
    assert await raw.fetchval("SELECT count(*) FROM dl_jobs WHERE attempt <> 1") == 0


@pytest.mark.full
@pytest.mark.requirement("Q14", "Q15")
async def test_f44_a_queue_restarted_with_fewer_slots_keeps_its_new_limit(serve, add, row_when, ledger, raw):
    wide = await serve({"q": 6}, drain_timeout_sec=0.3, **PATIENT)
    jobs = [await add("visit", {"s": 600}, lease_ttl_sec=PATIENT_LEASE_S) for _ in range(8)]
    await until(ledger.visits, lambda visits: len(visits) == 6)
    # The next handler has a shorter task.
    await raw.execute("""UPDATE dl_jobs SET args = '{"s": 1.5}'""")
    narrow = await serve({"q": 2}, **PATIENT)
    wide.signal(signal.SIGTERM)
    assert await wide.exit_code(within_s=20) == 0
    for job_id in jobs:
        row = await row_when(job_id, "succeeded")
        assert (row["attempt"], row["crashes"]) == (1, 0)
    visits = [visit for visit in await ledger.visits() if visit["pid"] == narrow.process.pid]
    assert len(visits) >= 2
    for visit in visits:
        at_once = [v for v in visits if v["began_at"] <= visit["began_at"] < v["ended_at"]]
        assert len(at_once) <= 2


# F45: deletion under readers


@pytest.mark.slow
@pytest.mark.requirement("R4")
async def test_f45_pages_read_during_deletions_neither_fail_nor_repeat_nor_skip(serve, raw, client_of):
    await raw.execute("""
        INSERT INTO dl_jobs (job_id, queue, task, lock_key, status, created_at, finished_at)
        SELECT gen_random_uuid(), 'q', 'quick', 'key ' || n, 'succeeded', now() - n * interval '1 s',
               now() - CASE WHEN n % 20 = 0 THEN interval '1 hour' ELSE interval '2 days' END
        FROM generate_series(1, 20000) AS n;
        INSERT INTO dl_job_events (job_id, queue, kind) SELECT job_id, queue, 'done' FROM dl_jobs""")
    recent = await raw.fetch("SELECT job_id FROM dl_jobs WHERE finished_at > now() - interval '1 day'")
    kept = {str(row["job_id"]) for row in recent}
    count = "SELECT count(*) FROM dl_jobs"
    reader = await serve({"other": 1})
    under_deletion = 0
    async with client_of(reader) as client, trio.open_nursery() as nursery:
        nursery.start_soon(partial(serve, {"another": 1}, retain_succeeded_days=1))

        async def page(after):
            answer = await client.get("/api/v1/jobs", params={"status": "succeeded", "limit": 250} | after)
            assert answer.status_code == 200
            return answer.json()

        left = await raw.fetchval(count)
        while left > len(kept):
            seen, after = [], {}
            while after is not None:
                found = await page(after)
                seen.extend(job["job_id"] for job in found["jobs"])
                after = {"after": found["next"]} if found["next"] else None
                answer = await client.get(f"/api/v1/jobs/{seen[-1]}/events")
                assert answer.status_code in {200, 404}
            assert len(seen) == len(set(seen))
            assert kept <= set(seen)
            before, left = left, await raw.fetchval(count)
            under_deletion += left < before
    assert under_deletion >= 1
    assert left == len(kept)
    assert await raw.fetchval("SELECT count(*) FROM dl_job_events") == len(kept)

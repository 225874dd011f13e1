"""No secret leaves a process: not in its logs, errors, event histories, metrics, answers, nor in the list of processes.

Only its name (`password`) or its form (`https://user:…@`) distinguishes a secret from other values; under another name
it is shown. `args`, `progress` and `result`, and the values by which jobs are found, queue, task and keys, are stored
unchanged and masked when they are shown: a role that may read the tables can read them.
"""

from __future__ import annotations

import json
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio
from canaries import CANARY, canaries
from conditions import until
from services import FAST

pytestmark = pytest.mark.requirement("Q16")

ENDS = {
    "raise": "failed",
    "raise a group": "failed",
    "fail in SQL": "failed",
    "raise at length": "failed",
    "give up": "failed",
    "retry": "queued",
    "snooze": "queued",
    "return": "succeeded",
}
TOKENS = {role: f"{CANARY}-of-{role}-{'x' * 16}" for role in ("read", "operate", "admin")}
KEPT = """
SELECT string_agg(row::text, E'\n') FROM (
  SELECT to_jsonb(j) - '{args,progress,result,idempotency_key,lock_key,partition_key,producer}'::text[] FROM dl_jobs j
  UNION ALL SELECT to_jsonb(e) FROM dl_job_events e
  UNION ALL SELECT to_jsonb(a) FROM dl_audit a
  UNION ALL SELECT to_jsonb(w) FROM dl_workers w
) AS kept (row)
"""
"""All stored data of jobs, operators and processes, except the values that are stored unchanged."""
SESSIONS = """
SELECT string_agg(application_name || query, E'\n') FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid()
"""


def bearer(role):
    return {"Authorization": f"Bearer {TOKENS[role]}"}


@contextmanager
def roles(database):
    """Create two roles of the database whose passwords are canaries; yield their addresses, by role."""
    passwords = {f"{use}_of_{database.name}": f"{CANARY}-password-of-{use}" for use in ("pool", "locks")}
    for role, password in passwords.items():
        database.psql(f"CREATE ROLE {role} SUPERUSER LOGIN PASSWORD '{password}'")
    try:
        yield {
            role: database.dsn.replace(f"postgres:{database.server.password}@", f"{role}:{password}@")
            for role, password in passwords.items()
        }
    finally:
        for role in passwords:
            database.psql(f"DROP ROLE {role}")


async def lock_out(service, raw, addresses):
    """Change the passwords and end the connections; restore them as soon as the service has logged an error."""
    for role in addresses:
        await raw.execute(f"ALTER ROLE {role} PASSWORD 'another'")
    await raw.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = ANY ($1)", [*addresses])

    async def complaints():
        said = [line.get("error", "") for line in [*service.lines]]
        return {role for role in addresses if any("authentication failed" in text and role in text for text in said)}

    await until(complaints, lambda roles: len(roles) == len(addresses), within_s=30)
    for role, address in addresses.items():
        password = address.partition(f"{role}:")[2].partition("@")[0]
        await raw.execute(f"ALTER ROLE {role} PASSWORD '{password}'")


async def spill_all(client, raw):
    """Run a job for each way to end, all of which contain secrets; return their IDs, once they have ended."""
    ids = {}
    for how, status in ENDS.items():
        job = {
            "queue": "q",
            "task": "spill",
            **{
                name: f"token={CANARY}-{name}-{how}"
                for name in ("lock_key", "idempotency_key", "partition_key", "producer")
            },
            "max_attempts": 2 if status == "queued" else 1,
        }
        args = canaries("args") | {"how": how, "remark": "shown as it is"}
        answer = await client.post("/api/v1/jobs/trigger", json=job | {"args": args}, headers=bearer("operate"))
        assert answer.status_code == 201, answer.text
        ids[how] = answer.json()["job_id"]
    statuses = "SELECT lock_key, status FROM dl_jobs WHERE finished_at IS NOT NULL OR waits_for = 'time'"
    await until(lambda: raw.fetch(statuses), lambda rows: len(rows) == len(ENDS), within_s=30)
    found = {row["lock_key"].rpartition("-")[2]: row["status"] for row in await raw.fetch(statuses)}
    assert found == ENDS
    return ids


async def fail_to_load(raw, ids):
    """Store failures of a load's run, as if written by a program that masks nothing."""
    told = f"password={CANARY} refused by https://u:{CANARY}@h/"
    for job_id in ids:
        await raw.execute("INSERT INTO dl_etl_runs (run_id, name, kind) VALUES ($1, 'spill', 'load')", job_id)
        await raw.execute("INSERT INTO dl_etl_tasks (run_id, ordinal, task) VALUES ($1, 1, 'spill')", job_id)
        await raw.execute(
            "INSERT INTO dl_etl_failures (run_id, load, segment, phase, key, error, sample)"
            " VALUES ($1, 'spill', 's', 'record', 'k', $2, $3)",
            job_id,
            told,
            json.dumps(canaries("sample")),
        )


async def fail_to_plan(raw):
    """Store a schedule with secrets, and its events, as another program may have written them.

    Return its error group.
    """
    told = f"password={CANARY} refused by https://u:{CANARY}@h/"
    spec = {"task": "spill", "every_s": 3_600, "args": canaries("schedule"), "job": {"queue": "q"}}
    await raw.execute(
        "INSERT INTO dl_schedules (name, spec, task, origin, stored_by, next_at, paused, paused_why)"
        " VALUES ('spill', $1, 'spill', 'operator', $2, now() + interval '1 h', true, $2)",
        json.dumps(spec),
        told,
    )
    await raw.execute(
        "INSERT INTO dl_schedule_events (name, kind, payload) VALUES ('spill', 'paused', $1)", json.dumps({"why": told})
    )
    await raw.execute(
        "INSERT INTO dl_tasks (task, layout, declared_by) VALUES ('spill', 1, $1) ON CONFLICT DO NOTHING", told
    )
    await raw.execute("INSERT INTO dl_sources (source) VALUES ('spill')")
    return await raw.fetchval("SELECT error_group FROM dl_jobs WHERE error_group IS NOT NULL LIMIT 1")


async def fail_to_step(raw):
    """Store a durable process with secrets in all its fields; return the ID of a task of it."""
    told, secrets = f"password={CANARY} refused by https://u:{CANARY}@h/", json.dumps(canaries("process"))
    key = await raw.fetchval(
        "INSERT INTO dl_processes (type, process_id, status, detail, error_group, aux_state, metadata, last_event_id)"
        " VALUES ('spill', 'spill', 'error', $1, 1, $2, $2, 1) RETURNING key",
        told,
        secrets,
    )
    await raw.execute(
        "INSERT INTO dl_process_events (key, event_id, task_id, payload) VALUES ($1, 1, 1, $2)", key, secrets
    )
    return await raw.fetchval(
        "INSERT INTO dl_process_tasks (key, type, kind, method, status, args, context, response, error)"
        " VALUES ($1, 'spill', 'call', 'm', 'error', $2, $2, $2, $3) RETURNING task_id",
        key,
        secrets,
        told,
    )


async def crawl(client, ids, group, task_id):
    """Return every page that can be read, by its address, with its headers."""
    chosen = {"action": "run_now", "lock_key": f"token={CANARY}-lock_key-return"}
    begun = await client.post("/api/v1/bulk", json=chosen, headers=bearer("admin"))
    parts = {"load": "spill", "run_id": "{job_id}", "kind": "draining", "group": group} | dict.fromkeys(
        ("name", "task", "supplier", "process_type", "process_id"), "spill"
    )
    parts["task_id"] = str(task_id)
    parts["bulk_id"] = begun.json()["bulk_id"]
    paths = (await client.get("/openapi.json")).json()["paths"]
    addresses = ["/openapi.json", "/docs"]
    for path, methods in paths.items():
        if "get" in methods:
            page = path
            for part, value in parts.items():
                page = page.replace(f"{{{part}}}", value)
            addresses += [page.replace("{job_id}", job_id) for job_id in ids] if "{job_id}" in page else [page]
    assert not [address for address in addresses if "{" in address]
    pages = {}
    for address in addresses:
        answer = await client.get(address, headers=bearer("admin"))
        assert answer.status_code == 200, (address, answer.text)
        pages[address] = f"{answer.text} {[*answer.headers.items()]}"
    return pages


async def ask_wrongly(client):
    """Return the answers to rejected requests, with secrets in each."""
    job = {"queue": "q", "task": "spill", "lock_key": "k", "args": canaries("refused")}
    trigger, operator = "/api/v1/jobs/trigger", bearer("operate")
    answers = {
        "an unknown token": await client.get("/status", headers={"Authorization": f"Bearer {CANARY}-unknown"}),
        "another scheme": await client.get("/status", headers={"Authorization": f"Basic {CANARY}"}),
        "too small a role": await client.post(trigger, json=job, headers=bearer("read")),
        "a query": await client.get(f"/api/v1/jobs?token={CANARY}-query&limit=x", headers=bearer("read")),
        "nowhere": await client.get(f"/nowhere?password={CANARY}-query", headers=bearer("read")),
        "fields": await client.post(trigger, json=job | canaries("field") | {"priority": -1}, headers=operator),
        "no JSON": await client.post(
            trigger, content=json.dumps(job).encode()[:-1], headers=operator | {"Content-Type": "application/json"}
        ),
    }
    assert {name: answer.status_code for name, answer in answers.items()} == {
        "an unknown token": 401,
        "another scheme": 401,
        "too small a role": 403,
        "a query": 422,
        "nowhere": 404,
        "fields": 422,
        "no JSON": 400,
    }
    return {name: f"{answer.text} {[*answer.headers.items()]}" for name, answer in answers.items()}


@pytest.mark.full
async def test_no_secret_of_settings_jobs_handlers_or_requests_is_shown_anywhere(
    serve, database, raw, client_of, tmp_path
):
    with roles(database) as addresses:
        pool, locks = addresses.values()
        tokens = json.dumps([{"name": role, "role": role, "token": token} for role, token in TOKENS.items()])
        service = await serve(dsn=pool, direct_dsn=locks, tokens=tokens, log_level="debug", **FAST)
        async with client_of(service) as client:
            ids = await spill_all(client, raw)
            said = await ask_wrongly(client)
            await lock_out(service, raw, addresses)
            await until(lambda: client.get("/ready"), lambda answer: answer.status_code == 200, within_s=30)
            cancel = f"/api/v1/jobs/{ids['snooze']}/cancel"
            await client.post(cancel, headers=bearer("operate"))
            await client.post("/api/v1/jobs/retry", json={"status": ["canceled"]}, headers=bearer("admin"))
            by_key = {"status": ["succeeded"], "lock_key": f"token={CANARY}-lock_key-return"}
            await client.post("/api/v1/jobs/cancel", json=by_key, headers=bearer("admin"))
            await client.post(f"/api/v1/queues/password={CANARY}-queue/pause", headers=bearer("operate"))
            await fail_to_load(raw, ids.values())
            group = f"{await fail_to_plan(raw) % 2**64:016x}"
            said |= await crawl(client, ids.values(), group, await fail_to_step(raw))
            shown = (await client.get(f"/api/v1/jobs/{ids['return']}", headers=bearer("read"))).json()
        process = Path("/proc", str(service.process.pid))
        said["the list of processes"] = process.joinpath("cmdline").read_text()
        said["the list of sessions"] = await raw.fetchval(SESSIONS)
        service.signal(signal.SIGTERM)
        assert await service.exit_code(within_s=20) == 0
        said["the tables"] = await raw.fetchval(KEPT)
        for number, line in enumerate(service.lines):
            said[f"line {number} of the log: {line['event'][:50]}"] = json.dumps(line, ensure_ascii=False)
        for path in tmp_path.rglob("*"):
            if path.is_file():
                said[path.name] = path.read_text(errors="replace")

    leaks = {where: text[max(text.find(CANARY) - 80, 0) :][:160] for where, text in said.items() if CANARY in text}
    assert leaks == {}
    # They were there to be found, in the answers and in the log.
    for given in (shown["args"], shown["progress"], shown["result"]):
        assert (given["password"], given["nested"][0]["api_key"], given["headers"]["Cookie"]) == ("***", "***", "***")
        assert given["url"] == "https://***@host/path?token=***&page=2"
    assert "password=***" in said["the tables"]
    events = [line["event"] for line in service.lines]
    assert sum(event.startswith("password=*** and client_secret: '***'") for event in events) >= 2 * len(ENDS)
    assert "caught" in events
    # Values with neither the name nor the form of a secret are shown.
    assert (shown["args"]["remark"], shown["lock_key"]) == ("shown as it is", "token=***")
    # The args of a job are stored unchanged: the job runs with them.
    kept = await raw.fetchval("SELECT count(*) FROM dl_jobs WHERE args->>'password' LIKE $1", f"{CANARY}%")
    assert kept == len(ENDS)


BAD_SETTINGS = {
    "addresses and half a list": {
        "dsn": f"postgresql://u:{CANARY}@h:port/name",
        "direct_dsn": f"mysql://u:{CANARY}@h/name",
        "tokens": f'[{{"name":"a","role":"read","token":"{TOKENS["read"]}"',
    },
    "words and a role that does not exist": {
        "dsn": f"host=h password={CANARY}",
        "tokens": json.dumps([{"name": "a", "role": "king", "token": TOKENS["read"]}]),
    },
    "a short token": {"tokens": json.dumps([{"name": "a", "role": "read", "token": CANARY}])},
    "a token of two": {
        "tokens": json.dumps([{"name": name, "role": "read", "token": TOKENS["read"]} for name in "ab"])
    },
}


@pytest.mark.slow
async def test_no_secret_of_a_bad_setting_is_shown_by_its_refusal(serve):
    told = {}

    async def start(name, settings):
        service = await serve(ready=None, **settings)
        told[name] = await service.exit_code(within_s=120), json.dumps(service.lines)

    async with trio.open_nursery() as nursery:
        for name, settings in BAD_SETTINGS.items():
            nursery.start_soon(start, name, settings)
    assert {name: code for name, (code, _) in told.items()} == dict.fromkeys(BAD_SETTINGS, 2)
    for name, (_, text) in told.items():
        assert CANARY not in text, name
        assert "DL_TOKENS" in text or "DSN" in text, text

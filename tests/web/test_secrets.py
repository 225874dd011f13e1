"""Names and keys are shown without their secrets at every address, and work by their real values (Q16)."""

from __future__ import annotations

import json
import re

import pytest
from canaries import CANARY
from prometheus_client.parser import text_string_to_metric_families
from statements import record_statements

from dataloader.jobs.model import JOB_FIELDS
from dataloader.jobs.page_cursor import BY_NAME
from dataloader.web.services import QueueLoad

pytestmark = [pytest.mark.slow, pytest.mark.requirement("Q16")]

TOKEN = "ghp_" + CANARY + "a1B2" * 8
SECRETS = {
    "queue": f"password={CANARY}-queue",
    "task": f"token={CANARY}-task",
    "lock_key": f"https://u:{CANARY}-lock@h/",
    "idempotency_key": TOKEN,
    "partition_key": f"api_key:{CANARY}-partition",
    "producer": f"<token>{CANARY}-producer</token>",
    "consumer_group": f'{{"session_id": "{CANARY}-group"}}',
}
SHOWN = {
    "queue": "password=***",
    "task": "token=***",
    "lock_key": "https://***@h/",
    "idempotency_key": "***",
    "partition_key": "api_key:***",
    "producer": "<token>***</token>",
    "consumer_group": '{"session_id": "***"}',
}
PLAIN = {"queue": "load.cbr", "task": "token.refresh", "lock_key": "cbr:2026-11", "producer": "reset-password"}


async def test_a_jobs_names_and_keys_are_masked_wherever_they_are_shown(open_web, database):
    assert {"args", *SECRETS} == {name for name, field in JOB_FIELDS.items() if field.may_hold_secrets}
    async with open_web() as web:
        client = web.client
        job_id = await web.trigger(**SECRETS)
        listed = {
            "the job": (await client.get(f"/api/v1/jobs/{job_id}")).json(),
            "the list": (await client.get("/api/v1/jobs")).json()["jobs"][0],
            "its new priority": (await client.patch(f"/api/v1/jobs/{job_id}", json={"priority": 1})).json(),
        }
        for where, job in listed.items():
            assert {name: job[name] for name in SHOWN} == SHOWN, where
        answers = [
            await client.get(f"/api/v1/jobs/{job_id}/events"),
            await client.get("/api/v1/queues"),
            await client.post(f"/api/v1/queues/{SECRETS['queue']}/pause"),
            await client.get("/status"),
            await client.get("/metrics"),
            await client.post("/api/v1/jobs/cancel", json={"lock_key": SECRETS["lock_key"], "queue": SECRETS["queue"]}),
            await client.get("/api/v1/audit"),
            await client.get(f"/api/v1/loads/{SECRETS['queue']}"),
            await client.get(f"/api/v1/jobs?after={TOKEN}"),
            await client.post("/api/v1/jobs/trigger", json={**SECRETS, TOKEN: 1, "priority": SECRETS["queue"]}),
            await client.post("/api/v1/jobs/trigger", json={**SECRETS, "args": {"another": 1}}),
        ]
    assert [answer.status_code for answer in answers] == [200] * 7 + [404, 422, 422, 409]
    for answer in answers:
        assert CANARY not in answer.text, answer.url
    assert answers[2].json() == {"queue": SHOWN["queue"], "paused": True}
    [bulk, pause, _] = answers[6].json()["audit"]
    assert bulk["detail"]["filter"] == {"lock_key": SHOWN["lock_key"], "queue": SHOWN["queue"]}
    assert pause["detail"]["queue"] == SHOWN["queue"]
    assert CANARY not in database.psql("SELECT string_agg(detail::text, '') FROM dl_audit")


async def test_errors_of_other_services_are_masked_in_their_groups_and_their_log(open_web, database):
    async with open_web() as web:
        await web.trigger(**SECRETS)
        database.psql("UPDATE dl_jobs SET status = 'running'")
        database.psql(f"UPDATE dl_jobs SET status = 'failed', error = 'row 1: password={CANARY}, {TOKEN} at {CANARY}1'")
        [group] = (await web.client.get("/api/v1/errors")).json()["groups"]
        assert (group["task"], group["error"]) == (SHOWN["task"], "row # password=***, # at #")
        for address in ("?exact=true", "/log", f"/{group['group']}/jobs"):
            answer = await web.client.get(f"/api/v1/errors{address}")
            assert answer.status_code == 200
            assert f"password={CANARY}" not in answer.text, address
            assert TOKEN not in answer.text, address
            assert "password=***" in answer.text, address


async def test_names_and_keys_work_by_their_real_values(open_web, database):
    async with open_web() as web:
        job_id = await web.trigger(**SECRETS)
        again = await web.client.post("/api/v1/jobs/trigger", json=SECRETS)
        assert (again.status_code, again.json()["job_id"]) == (200, job_id)
        for name in ("queue", "task", "lock_key"):
            found = (await web.client.get("/api/v1/jobs", params={name: SECRETS[name]})).json()["jobs"]
            assert [job["job_id"] for job in found] == [job_id], name
            found = (await web.client.get("/api/v1/jobs", params={name: SHOWN[name]})).json()["jobs"]
            assert found == [], name
        await web.client.post(f"/api/v1/queues/{SECRETS['queue']}/pause")
        assert database.psql("SELECT queue FROM dl_queues WHERE paused") == SECRETS["queue"]
        canceled = await web.client.post("/api/v1/jobs/cancel", json={"lock_key": SECRETS["lock_key"]})
        assert canceled.json() == {"changed": 1}
    kept = json.loads(database.psql("SELECT to_jsonb(j) FROM dl_jobs j"))
    assert {name: kept[name] for name in SECRETS} == SECRETS


async def test_values_that_are_no_secrets_stay_readable(open_web):
    async with open_web() as web:
        job_id = await web.trigger(**PLAIN)
        job = (await web.client.get(f"/api/v1/jobs/{job_id}")).json()
        assert {name: job[name] for name in PLAIN} == PLAIN
        assert f'queue="{PLAIN["queue"]}"' in (await web.client.get("/metrics")).text


async def test_pages_of_queues_go_on_behind_a_name_that_is_not_shown_without_a_list_of_all(open_web):
    async with open_web() as web:
        statements = await record_statements(web.services.database)
        names = ["a", *(f"password={CANARY}-{number} ü" for number in range(3)), "sha256:b", "z"]
        for name in names:
            await web.trigger(queue=name)
        seen, after = [], None
        while True:
            answer = await web.client.get("/api/v1/queues", params={"limit": 1} | ({"after": after} if after else {}))
            assert CANARY not in answer.text
            [queue] = answer.json()["queues"]
            seen.append(queue["queue"])
            after = answer.json()["next"]
            if after is None:
                break
            assert CANARY not in BY_NAME.key(after)
        assert seen == ["a", *["password=*** ü"] * 3, "sha256:b", "z"]
        gone = await web.client.get("/api/v1/queues", params={"after": BY_NAME.text("sha256:" + "0" * 64)})
        assert (gone.status_code, gone.json()["errors"][0]["path"]) == (422, "after")
        assert "refers to a row that no longer exists" in gone.json()["errors"][0]["message"]
    limits = [one.args[2] for one in statements if one.query.strip().endswith("ORDER BY queue LIMIT $3")]
    assert limits == [2] * 6


async def test_queues_that_look_the_same_are_one_series(open_web, database):
    async with open_web() as web:
        web.change(queues={f"password={CANARY}-{number}": QueueLoad(number, 0) for number in (1, 2)})
        assert (await web.client.get("/status")).json()["serving"] == {
            "password=***": {"concurrency": 1, "running": 0},
            "password=*** (2)": {"concurrency": 2, "running": 0},
        }
        for number in range(3):
            await web.trigger(queue=f"password={CANARY}-{number}")
            await web.client.post(f"/api/v1/queues/password={CANARY}-0/pause")
            web.telemetry.job_ended(f"password={CANARY}-{number}", "t", "succeeded", 0.5 * number)
            web.telemetry.claimed(f"password={CANARY}-{number}", 2, 0.01)
        status = (await web.client.get("/status")).text
        text = (await web.client.get("/metrics")).text
        again = (await web.client.get("/metrics")).text
    assert CANARY not in status + text + again
    for shown in (text, again):
        series = re.findall(r"^[^#\s]\S*(?:\{[^}]*\})?(?= )", shown, re.MULTILINE)
        assert len(series) == len({*series})
    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["dataloader_queue_jobs", "password=***", "ready"] == 3
    assert samples["dataloader_slots", "free", "password=***"] == 3
    assert samples["dataloader_queue_paused", "password=***"] == 1
    assert samples["dataloader_jobs_ended_total", "password=***", "succeeded", "t"] == 3
    assert samples["dataloader_jobs_claimed_total", "password=***"] == 6
    assert samples["dataloader_job_run_seconds_count", "password=***", "t"] == 3
    assert samples["dataloader_job_run_seconds_sum", "password=***", "t"] == 1.5

"""Task types over HTTP (S2): each has its own address and arguments, and is described with them."""

from __future__ import annotations

import attrs
import pytest

from dataloader import Tasks
from dataloader.store.queue.task_rows import aio_declare

pytestmark = pytest.mark.requirement("S2")
EMPLOYEE = "/api/v1/tasks/employee/trigger"


@attrs.frozen
class Employee:
    employee_id: int
    tags: list[str] = attrs.field(factory=list)


@attrs.frozen
class Release:
    version: str


tasks = Tasks()


@tasks.task("employee", args=Employee, queue="hr", priority=7, unique=("employee_id",))
async def employee(job):
    """Load what is known of an employee."""


@tasks.task("a/release", args=Release, queue="q", lock_key="release:{version}")
async def release(job): ...


@tasks.task("plain", queue="q")
async def plain(job): ...


@pytest.fixture
async def web(open_web):
    async with open_web(tasks=tasks) as web:
        await web.services.database.run(aio_declare, tasks.values(), "w")
        yield web


async def row_of(web, job_id):
    return (await web.client.get(f"/api/v1/jobs/{job_id}")).json()


async def test_the_documents_request_becomes_a_job_by_the_tasks_settings(web):
    body = {"object_type": "employee", "employee_id": 123, "priority": 100}
    answer = await web.client.post(EMPLOYEE, json=body)
    assert answer.status_code == 201
    job = answer.json()
    assert answer.headers["Location"] == f"/api/v1/jobs/{job['job_id']}"
    assert (job["did"], job["queue"]) == ("added", "hr")
    row = await row_of(web, job["job_id"])
    assert (row["args"], row["priority"], row["task"]) == ({"employee_id": 123}, 100, "employee")
    again = await web.client.post(EMPLOYEE, json={"employee_id": 123})
    assert (again.status_code, again.json()["did"], again.json()["job_id"]) == (200, "kept", job["job_id"])


async def test_a_header_and_a_body_bring_the_idempotency_key(web):
    body = {"a": 1, "available_at": "2030-01-01T00:00:00Z"}
    first = await web.client.post("/api/v1/tasks/plain/trigger", json=body, headers={"Idempotency-Key": "i"})
    again = await web.client.post("/api/v1/tasks/plain/trigger", json=body | {"idempotency_key": "i"})
    assert (first.status_code, again.status_code, again.json()["did"]) == (201, 200, "again")
    row = await row_of(web, first.json()["job_id"])
    assert (row["args"], row["available_at"]) == ({"a": 1}, "2030-01-01T00:00:00Z")
    other = await web.client.post("/api/v1/tasks/plain/trigger", json={"a": 2, "idempotency_key": "i"})
    assert other.status_code == 409


@pytest.mark.slow
async def test_an_argument_with_the_name_of_a_field_of_requests_is_the_arguments(web):
    answer = await web.client.post("/api/v1/tasks/a%2Frelease/trigger", json={"version": "1.0", "priority": 3})
    assert answer.status_code == 201
    row = await row_of(web, answer.json()["job_id"])
    assert (row["args"], row["priority"], row["lock_key"]) == ({"version": "1.0"}, 3, "release:1.0")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "employee_id"),
        ({"employee_id": "x"}, "employee_id"),
        ({"employee_id": 1, "name": "x"}, "name"),
        ({"employee_id": 1, "tags": ["a", 1]}, "tags[1]"),
        ({"employee_id": 1, "priority": -1}, "priority"),
        ({"employee_id": 1, "version": True}, "version"),
        ({"employee_id": 1, "version": 5}, "version"),
        ({"employee_id": 1, "object_type": "report"}, "object_type"),
        ([], "$"),
    ],
)
async def test_what_does_not_fit_is_refused_by_the_name_of_the_clients_own_field(web, body, field):
    answer = await web.client.post(EMPLOYEE, json=body)
    assert answer.status_code == 422
    assert [error["path"] for error in answer.json()["errors"]] == [field]


async def test_a_task_of_another_process_is_accepted_and_an_unknown_one_is_not_found(web):
    others = Tasks()
    others.task("other", args=Release, queue="q")(print)
    await web.services.database.run(aio_declare, others.values(), "w")
    answer = await web.client.post("/api/v1/tasks/other/trigger", json={"version": "2", "priority": 9})
    assert (await row_of(web, answer.json()["job_id"]))["args"] == {"version": "2"}
    answer = await web.client.post("/api/v1/tasks/none/trigger", json={})
    assert answer.status_code == 404
    assert "no process has declared a task 'none'" in answer.json()["detail"]
    assert (await web.client.post("/api/v1/tasks/a%00b/trigger", json={})).status_code == 422


@pytest.mark.slow
async def test_tasks_are_listed_and_described_with_their_arguments(web):
    listed = {task["task"]: task for task in (await web.client.get("/api/v1/tasks")).json()["tasks"]}
    assert listed.keys() == {"employee", "a/release", "plain"}
    known = listed["employee"]
    assert (known["queue"], known["description"]) == ("hr", "Load what is known of an employee.")
    assert known["uniqueness"] == {"key": ["employee_id"], "duplicates": "waiting"}
    assert known["args_schema"]["properties"]["employee_id"] == {"type": "integer"}
    assert listed["plain"]["args_schema"] is None
    described = (await web.client.get("/openapi.json")).json()
    operation = described["paths"][EMPLOYEE]["post"]
    assert operation["summary"] == "Load what is known of an employee."
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    assert schema["required"] == ["employee_id"]
    assert schema["properties"].keys() == {
        "employee_id", "tags", "priority", "available_at", "version", "idempotency_key", "object_type",
    }  # fmt: skip
    release = described["paths"]["/api/v1/tasks/a%2Frelease/trigger"]["post"]
    assert release["requestBody"]["content"]["application/json"]["schema"]["properties"]["version"]["type"] == "string"
    assert "/api/v1/tasks/{task}/trigger" in described["paths"]


@pytest.mark.requirement("Q16")
async def test_openapi_shows_no_secret_of_a_task(open_web):
    tasks = Tasks()

    @tasks.task("described")
    async def described(job):
        """Use password=sesame here."""

    tasks.task("postgres://ann:sesame@db/x")(print)
    async with open_web(tasks=tasks) as web:
        text = (await web.client.get("/openapi.json")).text
    assert ("sesame" in text, "Use password=***" in text) == (False, True)


@pytest.mark.requirement("S6")
async def test_duplicates_are_listed_and_canceled_over_http(web, database):
    database.psql(
        "INSERT INTO dl_jobs (job_id, queue, task, lock_key, args) SELECT gen_random_uuid(), 'q', 'foreign', i::text,"
        """ '{"password": "sesame"}' FROM generate_series(1, 3) AS i"""
    )
    for method, wanted in (("GET", {"params": {"task": "a\0b"}}), ("POST", {"json": {"task": "a\0b"}})):
        address = "/api/v1/duplicates" if method == "GET" else "/api/v1/duplicates/cancel"
        assert (await web.client.request(method, address, **wanted)).status_code == 422
    [group] = (await web.client.get("/api/v1/duplicates", params={"task": "foreign"})).json()["groups"]
    assert (group["jobs"], "sesame" in str(group)) == (3, False)
    assert (await web.client.post("/api/v1/duplicates/cancel", json={"task": "foreign"})).json() == {"changed": 2}
    assert (await web.client.get("/api/v1/duplicates")).json() == {"groups": []}
    assert database.psql("SELECT job_id FROM dl_jobs WHERE status = 'queued'") == group["best"]

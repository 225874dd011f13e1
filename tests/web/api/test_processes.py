"""Durable processes over HTTP: answers, waits, keys, rejected requests, and hidden values (P2). No step runs here."""

from __future__ import annotations

import json
from functools import partial
from uuid import UUID

import pytest
import trio
from canaries import CANARY
from conditions import patience_s, until

pytestmark = pytest.mark.requirement("P2")

AT = "/api/v1/processes"
RUN = "UPDATE dl_processes SET status = 'running', aux_state = '{}'; DELETE FROM dl_process_tasks; DELETE FROM dl_jobs"
ANSWER = "UPDATE dl_process_tasks SET status = 'finished', response = to_jsonb('yes'::text) WHERE status = 'waiting'"


@pytest.fixture
def open_web(open_web):
    """Return `open_web` with frequent reads, since the server of these tests receives no notifications."""
    return partial(open_web, reread_s=0.1)


async def test_a_request_is_accepted_and_its_task_has_the_answer(open_web, database):
    async with open_web() as web:
        started = await web.client.post(f"{AT}/pay", json={"process_id": "a/b", "args": 5, "metadata": {"n": 1}})
        assert started.status_code == 202
        task = started.json()["task_id"]
        ident = started.json()["ident"]
        said = {"task_id": task, "status": "waiting", "response": None, "error": None, "ident": ident}
        assert started.json() == said
        assert started.headers["Location"] == f"{AT}/tasks/{task}?ident={ident}"
        for ask, path in ((web.client.get, ""), (web.client.post, "/withdraw")):
            other = await ask(f"{AT}/tasks/{task}{path}", params={"ident": str(UUID(int=1))})
            assert (other.status_code, other.json()["type"]) == (404, "/problems/history-changed")
        database.psql(ANSWER)
        shown = (await web.client.get(started.headers["Location"])).json()
        assert (shown["status"], shown["response"], shown["args"], shown["process_id"]) == ("finished", "yes", 5, "a/b")
        listed = (await web.client.get(AT, params={"metadata": '{"n": 1}', "type": "pay"})).json()
        assert [one["process_id"] for one in listed["processes"]] == ["a/b"]
        assert (await web.client.get(f"{AT}/pay/a%2Fb")).json()["status"] == "init"
        database.psql(RUN)
        call = partial(web.client.post, f"{AT}/pay/a%2Fb/call")
        answer = []

        async def waits():
            answer.append(await call(params={"wait": 20}, json={"method": "m"}))

        with trio.fail_after(patience_s()):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(waits)

                async def asked():
                    return database.psql("SELECT count(*) FROM dl_process_tasks") == "1"

                await until(asked)
                database.psql(ANSWER)
        assert (answer[0].status_code, answer[0].json()["response"]) == (200, "yes")
        # The last part of an address may belong to an ID.
        await web.client.post(f"{AT}/pay", json={"process_id": "x/events"})
        assert (await web.client.get(f"{AT}/pay/x/events")).status_code == 404
        by_id = (await web.client.get(AT, params={"process_id": "x/events"})).json()["processes"]
        assert [one["process_id"] for one in by_id] == ["x/events"]


async def test_an_idempotency_key_in_the_header_counts_and_conflicts_name_the_process(open_web):
    async with open_web() as web:
        ask = partial(web.client.post, f"{AT}/pay", headers={"Idempotency-Key": '"k"'})
        first, again = [await ask(json={"process_id": "1"}) for _ in range(2)]
        assert (first.status_code, first.json()) == (again.status_code, again.json())
        other = await ask(json={"process_id": "2"})
        assert (other.status_code, other.json()["type"]) == (409, "/problems/idempotency-conflict")
        assert (other.json()["task_id"], other.json()["idempotency_key"]) == (str(first.json()["task_id"]), "k")
        assert (await ask(json={"process_id": "1", "idempotency_key": "l"})).status_code == 422
        there = await web.client.post(f"{AT}/pay", json={"process_id": "1"})
        assert (there.status_code, there.json()["type"]) == (409, "/problems/not-allowed-now")
        assert {name: there.json()[f"process_{name}"] for name in ("type", "id", "status")} == {
            "type": "pay", "id": "1", "status": "init",
        }  # fmt: skip
        early = await web.client.post(f"{AT}/pay/1/call", json={"method": "m"})
        assert early.json()["detail"] == "the process pay/1 is init; call needs a process with the status running."


async def test_an_invalid_value_is_named_by_its_field(open_web):
    async with open_web() as web:
        for path, wrong, field in (
            ("pay", {"process_id": ""}, "process_id"),
            ("pay", {"process_id": "1", "metadata": {"a": {}}}, "metadata.a"),
            ("pay", {"process_id": "1", "idempotency_key": "x" * 513}, "key"),
            ("pay/1/call", {"method": ""}, "method"),
            ("pay/1/call", {"method": "m", "expires_at": "1800-01-01T00:00Z"}, "expires_at"),
            ("pay/batch", {"processes": []}, "processes"),
            ("resume", {}, "which"),
            ("resume", {"error_group": "x"}, "error_group"),
            ("resume", {"type": "pay", "status": "running"}, "status"),
        ):
            answer = await web.client.post(f"{AT}/{path}", json=wrong)
            assert (path, answer.status_code) == (path, 422)
            assert (path, answer.json()["errors"][0]["path"]) == (path, field)
        for timer in ({}, {"after_s": 1, "at": "2030-01-01T00:00Z"}, {"kind": "remove"}):
            answer = await web.client.put(f"{AT}/pay/1", json={"timer": timer})
            assert (timer, answer.status_code) == (timer, 422)
        secret = {"password": "hunter2"}
        refused = [
            await web.client.get(AT, params={"metadata": "[1]"}),
            await web.client.get(AT, params={"metadata": json.dumps(secret)}),
            await web.client.post(f"{AT}/resume", json={"metadata": secret}),
        ]
        assert [(one.status_code, one.json()["errors"][0]["path"]) for one in refused] == [(422, "metadata")] * 3
        assert (await web.client.get(f"{AT}/tasks/{2**80}")).status_code == 404


async def test_too_many_waits_are_answered_immediately_and_a_drain_answers_all(open_web, database):
    async with open_web(max_waits=1) as web:
        await web.client.post(f"{AT}/pay", json={"process_id": "1"})
        database.psql(RUN)
        call = partial(web.client.post, f"{AT}/pay/1/call", json={"method": "m"}, params={"wait": 30})
        held = []

        async def waits():
            held.append(await call())

        with trio.fail_after(patience_s()):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(waits)

                async def full():
                    return web.services.waiting.is_full

                await until(full)
                beside = await call()
                assert (beside.status_code, beside.json()["status"]) == (202, "waiting")
                full = await web.client.get(f"{AT}/tasks/{beside.json()['task_id']}", params={"wait": 30})
                assert (full.status_code, full.json()["type"]) == (429, "/problems/too-many-waits")
                web.services.waiting.answer_all()
        assert (held[0].status_code, held[0].json()["status"]) == (202, "waiting")
        web.change(draining=True)
        refused = await call()
        assert (refused.status_code, refused.json()["type"]) == (503, "/problems/draining")
        assert (await web.client.get(f"{AT}/pay/1")).status_code == 200


@pytest.mark.parametrize("metadata", ["[[]]", "[1]", '"text"', "null", '["ab"]'])
async def test_metadata_that_are_no_object_hide_no_process(open_web, database, metadata):
    async with open_web() as web:
        await web.client.post(f"{AT}/pay", json={"process_id": "1"})
        database.psql(f"UPDATE dl_processes SET metadata = '{metadata}'")
        listed = await web.client.get(AT)
        assert [one["metadata"] for one in listed.json()["processes"]] == [{"value": json.loads(metadata)}]
        assert (await web.client.get(f"{AT}/pay/1")).status_code == 200


@pytest.mark.slow
@pytest.mark.requirement("Q16")
async def test_secrets_are_shown_nowhere(open_web, database):
    secret = f"password={CANARY}"
    async with open_web() as web:
        request = {"process_id": secret, "args": {"text": secret}, "context": secret, "metadata": {"a": secret}}
        started = await web.client.post(f"{AT}/pay", json=request | {"idempotency_key": secret})
        database.psql(
            f"UPDATE dl_processes SET status = 'error', detail = '{secret}', error_group = 1, last_event_id = 1,"
            f" timer_task = 99, timer_kind = 'timeout', timer_at = now(), timer_attempt = 0,"
            f" timer_context = '[\"{secret}\"]', aux_state = '[\"{secret}\"]';"
            f" INSERT INTO dl_process_events (key, event_id, task_id, payload)"
            f" SELECT key, 1, 1, '[\"{secret}\"]' FROM dl_processes;"
            f" UPDATE dl_process_tasks SET status = 'error', error = '{secret}', response = '[\"{secret}\"]'"
        )
        again = await web.client.post(f"{AT}/pay", json=request | {"idempotency_key": secret})
        assert again.status_code == 200
        one = f"{AT}/pay/{secret}"
        paths = (AT, one, f"{one}/events", f"{one}/tasks", f"{AT}/errors", started.headers["Location"])
        answers = [
            *(started, again),
            *[await web.client.get(path) for path in paths],
            await web.client.post(f"{one}/call", json={"method": "m"}),
            await web.client.post(f"{one}/remove"),
            await web.client.get("/api/v1/audit"),
        ]
        assert [answer.status_code for answer in answers] == [202, *[200] * 7, 409, 200, 200]
        for answer in answers:
            assert CANARY not in answer.text, answer.url
            assert json.loads(answer.text)

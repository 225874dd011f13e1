"""Slow reads of one caller delay neither the reads of other callers nor the queue."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest
import trio
from conditions import patience_s, until
from databases import raw_connection
from turns import waiting_for
from web_server import all_tokens, bearer, cookie_of

pytestmark = pytest.mark.requirement("Q2")

CONNECTIONS = 16
SLOW = "=key" * 16_000
"""A text that takes long to mask for its length."""


async def trigger(web, args):
    body = {"queue": "q", "task": "t", "lock_key": "k", "args": args}
    answer = await web.client.post("/api/v1/jobs/trigger", json=body, headers=bearer("operator"))
    return f"jobs/{answer.json()['job_id']}"


@pytest.mark.slow
async def test_reads_of_a_token_are_answered_while_slow_reads_of_another_one_wait(open_web):
    async with open_web(tokens=all_tokens()) as web:
        slow, small = await trigger(web, {"text": SLOW}), await trigger(web, {"a": 1})
        pages, statuses = {name: await cookie_of(web, name) for name in ("reader", "operator")}, []
        long_answers, masking = web.services.turns.long_answers, web.services.turns.masking.places

        async def read(path, headers):
            statuses.append((await web.client.get(path, headers=headers, timeout=patience_s())).status_code)

        async def waiting():
            return await waiting_for(long_answers), await waiting_for(masking)

        with trio.fail_after(patience_s()):
            # Two texts of the reader are being masked.
            async with trio.open_nursery() as nursery, masking.place_of("reader"), masking.place_of("reader"):
                for _ in range(CONNECTIONS):
                    nursery.start_soon(read, f"/api/v1/{slow}", bearer("reader"))
                nursery.start_soon(read, f"/ui/{slow}", pages["reader"])
                await until(waiting, lambda now: now == (CONNECTIONS - 1, 2))
                for path in (small, f"{small}/status", slow, "jobs?limit=5", "queues", "audit"):
                    assert (await web.client.get(f"/api/v1/{path}", headers=bearer("chief"))).status_code == 200
                for path in (small, f"{small}?part=job", "jobs", "jobs?args=a=1", "jobs/export"):
                    assert (await web.client.get(f"/ui/{path}", headers=pages["operator"])).status_code == 200
                assert (statuses, await waiting()) == ([], (CONNECTIONS - 1, 2))
        assert statuses == [200] * (CONNECTIONS + 1)


async def test_pages_wait_for_the_places_of_their_visitor_and_acts_and_files_do_not(open_web):
    async with open_web(tokens=all_tokens()) as web:
        reader, operator = await cookie_of(web, "reader"), await cookie_of(web, "operator")
        path, long_answers, statuses = await trigger(web, {"a": 1}), web.services.turns.long_answers, []

        async def read(path):
            statuses.append((await web.client.get(path, headers=reader, timeout=patience_s())).status_code)

        with trio.fail_after(patience_s()):
            async with trio.open_nursery() as nursery, AsyncExitStack() as taken:
                for _ in range(long_answers.most_of_one):
                    await taken.enter_async_context(long_answers.place_of("reader"))
                for page in (path, "jobs?status=failed", "errors?task=t", "queues"):
                    nursery.start_soon(read, f"/ui/{page}")
                await until(lambda: waiting_for(long_answers), lambda number: number == 4)
                # Other callers are served, and so are small answers.
                assert (await web.client.get(f"/ui/{path}", headers=operator)).status_code == 200
                assert (await web.client.get(f"/ui/{path}?part=job", headers=reader)).status_code == 200
                assert (await web.client.get("/ui/sign-in")).status_code == 200
                sent = await web.client.post(f"/ui/{path}/cancel", data={}, headers=operator | {"Origin": web.url})
                assert sent.status_code == 303
                assert statuses == []
        assert statuses == [200] * 4


@pytest.mark.slow
async def test_reads_that_wait_for_the_database_leave_a_connection_to_the_queue(open_web, database):
    blocked = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'dl_errors'::regclass"
    async with (
        open_web(tokens=all_tokens()) as web,
        raw_connection(database.dsn) as locks,
        trio.open_nursery() as nursery,
    ):
        places = web.services.database.places

        async def read(name):
            await web.client.get("/api/v1/errors/log", headers=bearer(name), timeout=patience_s())

        async def waiting():
            return await locks.fetchval(blocked) + places.waiting

        await locks.execute("BEGIN; LOCK TABLE dl_errors IN ACCESS EXCLUSIVE MODE")
        for name in ("reader", "chief"):
            nursery.start_soon(read, name)
        await until(waiting, lambda number: number == 2)
        assert (await web.client.get("/ready")).status_code == 200
        assert (await trigger(web, {"a": 1})).startswith("jobs/")
        assert (await waiting(), places.held) == (2, 1)
        await locks.execute("ROLLBACK")

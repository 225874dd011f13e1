"""Slow reads of one API token do not delay the reads of another one."""

from __future__ import annotations

import pytest
import trio
from conditions import patience_s, until
from turns import waiting_for
from web_server import TOKENS, all_tokens

pytestmark = pytest.mark.requirement("Q2")

CONNECTIONS = 16
SLOW = "=key" * 16_000
"""A text that takes long to mask for its length."""


def bearer(name):
    return {"Authorization": f"Bearer {TOKENS[name]}"}


async def trigger(web, args):
    body = {"queue": "q", "task": "t", "lock_key": "k", "args": args}
    answer = await web.client.post("/api/v1/jobs/trigger", json=body, headers=bearer("operator"))
    return f"jobs/{answer.json()['job_id']}"


async def cookie_of(web, name):
    signed = await web.client.post("/ui/sign-in", data={"token": TOKENS[name]}, headers={"Origin": web.url})
    web.client.cookies.clear()
    return {"Cookie": signed.headers["Set-Cookie"].partition(";")[0]}


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
                await until(waiting, lambda now: now == (CONNECTIONS - 2, 3))
                for path in (small, f"{small}/status", slow, "jobs?limit=5", "queues", "audit"):
                    assert (await web.client.get(f"/api/v1/{path}", headers=bearer("chief"))).status_code == 200
                for path in (small, f"{small}?part=job", "jobs", "jobs?args=a=1", "jobs/export"):
                    assert (await web.client.get(f"/ui/{path}", headers=pages["operator"])).status_code == 200
                assert (statuses, await waiting()) == ([], (CONNECTIONS - 2, 3))
        assert statuses == [200] * (CONNECTIONS + 1)

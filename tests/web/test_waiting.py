"""Waiting requests are shared by the API tokens: one caller's waits do not prevent others from waiting."""

from __future__ import annotations

import operator
from functools import partial

import pytest
import trio
from conditions import until
from web_server import TOKENS, all_tokens

pytestmark = pytest.mark.requirement("Q2")

MOST = 4


def bearer(name):
    return {"Authorization": f"Bearer {TOKENS[name]}"}


async def test_a_caller_with_fewer_waits_gets_the_place_of_the_one_that_has_most(open_web):
    async with open_web(tokens=all_tokens(), max_waits=MOST) as web, trio.open_nursery() as nursery:
        body = {"queue": "q", "task": "t", "lock_key": "k"}
        job = (await web.client.post("/api/v1/jobs/trigger", json=body, headers=bearer("operator"))).json()["job_id"]
        address, waiting, answered = f"/api/v1/jobs/{job}/status", web.services.waiting, []

        async def wait(name):
            answer = await web.client.get(address, params={"wait": 50}, headers=bearer(name), timeout=60)
            answered.append((name, answer.status_code))

        def places():
            return sorted(waiting._readers.values())

        async def seen():
            return places(), len(answered)

        for number in range(MOST):
            nursery.start_soon(wait, "reader")
            await until(seen, lambda now, most=number + 1: len(now[0]) == most)
        # The reader has all places: another request of it is refused, but not one of another caller.
        await wait("reader")
        assert answered.pop() == ("reader", 429)
        for number in range(1, 3):
            nursery.start_soon(wait, "operator")
            shared = ["operator"] * number + ["reader"] * (MOST - number)
            await until(seen, partial(operator.eq, (shared, number)))
        assert answered == [("reader", 200)] * 2
        # They have the same number: no place is given up any more.
        for name in ("reader", "operator"):
            await wait(name)
            assert answered.pop() == (name, 429)
        # A third caller has none.
        nursery.start_soon(wait, "chief")
        await until(seen, lambda now: now[0].count("chief") == 1)
        assert len(places()) == MOST
        waiting.answer_all()

"""The log of a source: one request at a time, pauses, and rate limits in any span, over all clients (E1, S4)."""

from __future__ import annotations

import json
import random
import time
from functools import partial

import pytest
import trio
from conditions import until, when_ended
from etl_tasks import item, items_load
from source_app import Answer

from dataloader.flows.etl import RateLimit
from dataloader.flows.etl.declare.pipeline_limits import LIMITS
from dataloader.flows.etl.fetch.rate_limiter import SlotForRequest
from dataloader.jobs.contract import Operator
from dataloader.store.queue.control import cancel

pytestmark = pytest.mark.requirement("E1", "S4")
OPERATOR = Operator("test", None)


def check_rate_limits(service, rate_limits):
    """Check that no span of a rate limit has more requests than it allows, at any position."""
    came_at = [seen.began_at for seen in service.requests]
    for requests, per_s in rate_limits:
        spans = [last - first for first, last in zip(came_at, came_at[requests:], strict=False)]
        assert spans
        assert min(spans) >= per_s, f"{requests + 1} requests in {min(spans):.3f} s"


def redirecting(items, draw, part=0.3):
    """Make the service redirect a part of all requests, sometimes twice, with delays."""
    items.service.put("/moved", items.answer)

    def answer(seen):
        time.sleep(draw.uniform(0, 0.04))
        if draw.random() < part:
            to = "/items" if draw.random() < 0.5 else "/moved"
            return Answer(status=302, headers={"Location": f"{to}?{seen.raw_query}"})
        return items.answer(seen)

    items.service.put("/items", answer)


@pytest.mark.full
async def test_two_processes_keep_pauses_and_rate_limits_on_a_slow_and_failing_network(items, serve, add, row_when):
    draw = random.Random(4)
    rate_limits = [(3, 0.5), (8, 1.6)]
    environment = {
        "ITEMS_URL": items.service.url,
        "ITEMS_PIPELINE": json.dumps({"rate_min": 0.05, "rate_max": 0.1, "attempts": 9, "max_failures": 100}),
        "ITEMS_RATE_LIMITS": json.dumps(rate_limits),
    }
    redirecting(items, draw)
    items.service.misbehave("0[37]&", times=4, status=503)
    items.service.way_s = lambda: draw.choice([0, 0, 0.01, 0.1, 0.2])
    for queue in "ab":
        await serve({queue: 1}, tasks="etl_tasks:tasks", environment=environment)
    jobs = [
        await add(load, {"to": "2026-01-16"}, queue=queue)
        for queue, load in zip("ab", ("items", "others"), strict=True)
    ]
    for job_id in jobs:
        await row_when(job_id, "succeeded", within_s=90)
    assert len(items.service.requests) > 34
    assert items.service.most_at_once() == 1
    assert min(items.service.pauses()) >= 0.05
    check_rate_limits(items.service, rate_limits)


@pytest.mark.slow
async def test_a_rate_limit_is_kept_between_a_slow_and_a_fast_request(items, counts_of):
    ways = iter([0.4, 0.0, 0.0, 0.0])
    items.service.way_s = lambda: next(ways)
    await counts_of(items_load(items.service.url, rate_limits=(RateLimit(1, 0.5),)), to="2026-01-05")
    check_rate_limits(items.service, [(1, 0.5)])


@pytest.mark.slow
async def test_each_hop_of_a_redirect_counts_as_a_request_with_a_pause(items, counts_of, raw):
    await raw.execute("ALTER TABLE item ADD source_endpoint text")
    items.records = [item(1)]
    items.service.put("/items", Answer(status=302, headers={"Location": "/second?x=1"}))
    items.service.put("/second", Answer(status=307, headers={"Location": "third?sig=2"}))
    items.service.put("/third", items.answer)
    paused = {"rate_min": 0.15, "rate_max": 0.15}
    counts = await counts_of(
        items_load(items.service.url, windows=None, pipeline=paused, rate_limits=(RateLimit(2, 0.8),))
    )
    assert [str(seen) for seen in items.service.requests] == ["/items", "/second?x=1", "/third?sig=2"]
    # Its signed parameters are not stored.
    assert await raw.fetchval("SELECT source_endpoint FROM item") == f"{items.service.url}/third"
    assert (counts["requests"], counts["inserted"]) == (3, 1)
    assert min(items.service.pauses()) >= 0.15
    check_rate_limits(items.service, [(2, 0.8)])


async def test_redirects_without_end_are_a_failure(items, outcome_of, soon):
    items.service.put("/items", Answer(status=302, headers={"Location": "/items"}))
    outcome = await outcome_of(items_load(items.service.url, windows=None))
    [failure] = outcome.result["failures"]
    assert failure["error"] == "/items: more than 5 redirects"
    assert len(items.service.requests) == 6


@pytest.mark.slow
async def test_a_request_that_was_cancelled_keeps_its_turn_until_its_answer_has_come(items, supervised, until_asked):
    items.service.misbehave(times=1, delay_s=1)
    async with supervised(
        *(items_load(items.service.url, name=name, windows=None) for name in ("first", "second"))
    ) as supervisor:
        first = await supervisor.jobs.enqueue("first", {}, queue="q")
        await until_asked(1)
        second = await supervisor.jobs.enqueue("second", {}, queue="q")
        await cancel(supervisor.database, first.job_id, OPERATOR)
        assert (await when_ended(supervisor, first.job_id)).status == "canceled"
        assert (await when_ended(supervisor, second.job_id)).status == "succeeded"
    assert len(items.service.requests) == 2
    assert items.service.most_at_once() == 1


@pytest.fixture
def until_asked(items):
    """Return a function that waits until the service has received `times` requests."""

    async def until_asked(times):
        async def number():
            return len(items.service.requests)

        await until(number, lambda number: number == times)

    return until_asked


async def test_a_suspended_process_has_only_the_rest_of_its_slot(autojump_clock):
    slot = SlotForRequest(linger_s=lambda: 0, ends_at=trio.current_time() + 75)
    await trio.sleep(15)
    assert slot.within(60) == 60
    await trio.sleep(59)
    assert slot.within(60) == pytest.approx(1)
    await trio.sleep(2)
    assert slot.within(60) == 0


async def test_a_cancelled_request_lingers_for_a_while_and_is_then_closed(autojump_clock):
    ended = []

    async def ask(seconds):
        try:
            await trio.sleep(seconds)
        except trio.Cancelled:
            ended.append("closed")
            raise
        ended.append("answered")

    for seconds in (1.5, 3600):
        began_at = trio.current_time()
        with trio.move_on_after(1) as scope:
            await SlotForRequest(linger_s=lambda: LIMITS.linger_s).send(partial(ask, seconds))
        assert scope.cancelled_caught
        assert trio.current_time() - began_at <= 1 + LIMITS.linger_s
    assert ended == ["answered", "closed"]


async def test_a_request_that_was_cancelled_before_it_began_is_not_sent(autojump_clock):
    sent = []

    async def ask():
        sent.append(True)

    with trio.CancelScope() as scope:
        scope.cancel()
        await SlotForRequest(linger_s=lambda: LIMITS.linger_s).send(ask)
    assert (scope.cancelled_caught, sent) == (True, [])


async def test_an_error_of_a_request_is_raised_to_its_sender(autojump_clock):
    async def ask():
        raise LookupError("x")

    with pytest.raises(LookupError, match="x"):
        await SlotForRequest(linger_s=lambda: 0).send(ask)

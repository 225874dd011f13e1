"""Gatherer: requests that arrive during a statement share the next one, and none waits longer than its deadline."""

from __future__ import annotations

import math

import pytest
import trio
import trio.testing

from dataloader.jobs.errors import StoreUnavailable
from dataloader.store.connection.gatherer import Gatherer


@pytest.mark.requirement("Q12")
async def test_no_request_joins_a_group_that_timed_out_before_its_turn():
    sent, answered = [], trio.Event()

    async def send(requests):
        sent.append([*requests])
        with trio.CancelScope(shield=True):  # like a statement that the server is still cancelling
            await answered.wait()
        return dict(enumerate(requests))

    gatherer = Gatherer(send, 0.2, "too late")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(gatherer.ask, "in progress")
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(StoreUnavailable, match="too late"):
            await gatherer.ask("before its turn")
        answered.set()
    assert await gatherer.ask("next") == "next"
    assert sent == [["in progress"], ["next"]]


@pytest.mark.parametrize("yields", [True, False])
async def test_tasks_woken_by_a_statement_run_before_its_callers_if_it_yields(yields):
    steps, woken = [], trio.Event()

    async def started():
        await woken.wait()
        steps.append("started")

    async def send(requests):
        await trio.lowlevel.checkpoint()
        woken.set()
        return dict(enumerate(requests))

    gatherer = Gatherer(send, 60, "too late", lambda: yields)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(started)
        await trio.testing.wait_all_tasks_blocked()
        await gatherer.ask("a")
        steps.append("answered")
    assert steps == (["started", "answered"] if yields else ["answered", "started"])


async def test_the_next_statement_begins_before_the_callers_of_one_that_yields_resume():
    steps = []

    async def send(requests):
        steps.append(f"send {requests[0]}")
        await trio.lowlevel.checkpoint()
        return dict(enumerate(requests))

    async def ask(request):
        await gatherer.ask(request)
        steps.append(f"answer {request}")

    gatherer = Gatherer(send, 60, "too late", lambda: True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, "a")
        await trio.lowlevel.checkpoint()
        nursery.start_soon(ask, "b")
    assert steps == ["send a", "send b", "answer a", "answer b"]


async def test_a_nursery_sends_groups_of_limited_size_and_canceled_callers_leave():
    sent, answered = [], trio.Event()

    async def send(requests):
        sent.append([*requests])
        await answered.wait()
        return dict(enumerate(requests))

    async def ask(request):
        answers.append(await gatherer.ask(request))

    answers = []
    async with trio.open_nursery() as nursery:
        gatherer = Gatherer(send, math.inf, "closed", nursery=nursery, max_group=2)
        async with trio.open_nursery() as leaving:
            leaving.start_soon(ask, "leaves")
            await trio.testing.wait_all_tasks_blocked()
            leaving.cancel_scope.cancel()
        async with trio.open_nursery() as staying:
            for request in "abc":
                staying.start_soon(ask, request)
                await trio.testing.wait_all_tasks_blocked()
            answered.set()
    assert sent == [["leaves"], ["a", "b"], ["c"]]
    assert sorted(answers) == ["a", "b", "c"]


async def test_callers_get_an_error_when_the_nursery_that_sends_is_canceled():
    errors = []

    async def send(requests):
        await trio.sleep_forever()

    async def ask():
        with pytest.raises(StoreUnavailable, match="closed") as error:
            await gatherer.ask("a")
        errors.append(error)

    async with trio.open_nursery() as callers, trio.open_nursery() as nursery:
        gatherer = Gatherer(send, math.inf, "closed", nursery=nursery)
        callers.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert len(errors) == 1


async def test_requests_made_as_answers_arrive_join_the_next_group():
    sent = []

    async def send(requests):
        sent.append(len(requests))
        await trio.testing.wait_all_tasks_blocked()
        return dict(enumerate(requests))

    async def ask_twice():
        await gatherer.ask("first")
        await gatherer.ask("second")

    async with trio.open_nursery() as nursery:
        gatherer = Gatherer(send, math.inf, "closed", nursery=nursery)
        for _ in range(5):
            nursery.start_soon(ask_twice)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(gatherer.ask, "during the first statement")
    assert sent == [5, 6]

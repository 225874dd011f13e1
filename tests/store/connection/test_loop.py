"""The driver's loop within Trio: few turns for each operation, independent of other work of the process."""

from __future__ import annotations

import asyncio
import selectors
import socket
import threading
from collections import deque
from contextlib import suppress
from itertools import pairwise

import pytest
import trio
from conditions import patience_s

from dataloader.jobs.errors import StoreUnavailable
from dataloader.store.connection.loop import ROUNDS_A_TURN

OPERATIONS = 20


class Turns(trio.abc.Instrument):
    """Counts the turns of Trio's scheduler."""

    def __init__(self):
        self.count = 0

    def before_io_wait(self, timeout):  # noqa: ARG002 - by its name
        self.count += 1


async def ask(connection):
    return await connection.fetchval("SELECT 1")


async def test_an_operation_takes_few_turns_of_the_scheduler(store):
    await store.run(ask)
    turns = Turns()
    trio.lowlevel.add_instrument(turns)
    for _ in range(OPERATIONS):
        await store.run(ask)
    trio.lowlevel.remove_instrument(turns)
    # The second is the turn of the answer, the third that of the waiting task. One turn per callback would make it
    # eight.
    assert turns.count / OPERATIONS <= 3


async def test_the_system_is_asked_once_which_sockets_an_answer_has_made_ready(store, monkeypatch):
    await store.run(ask)
    asked, select = [], selectors.DefaultSelector.select
    monkeypatch.setattr(selectors.DefaultSelector, "select", lambda *args: asked.append(args) or select(*args))
    for _ in range(OPERATIONS):
        await store.run(ask)
    # An answer may arrive in two parts. One call for each round of callbacks would make it three for each operation.
    assert OPERATIONS <= len(asked) <= 2 * OPERATIONS


async def test_timers_of_answered_statements_do_not_gather(store):
    for _ in range(500):
        await store.run(ask)
    assert len(store.crossing._loop._scheduled) <= 200


async def test_callbacks_that_schedule_more_callbacks_block_no_others(store):
    calls = 0

    async def endless(_connection):
        loop, over = asyncio.get_running_loop(), asyncio.Event()

        def again():
            nonlocal calls
            calls += 1
            if calls < 9 * ROUNDS_A_TURN:
                loop.call_soon(again)
            else:
                over.set()

        again()
        await over.wait()

    seen = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.run, endless)
        while calls < 9 * ROUNDS_A_TURN:
            seen.append(calls)
            await trio.lowlevel.checkpoint()
    assert max(after - before for before, after in pairwise(seen)) <= 2 * ROUNDS_A_TURN


async def test_a_timer_that_is_set_after_an_answer_is_kept(store):
    async def ask_and_sleep(connection):
        await connection.fetchval("SELECT 1")
        await asyncio.sleep(0.01)
        await connection.fetchval("SELECT 1")
        await asyncio.wait_for(asyncio.sleep(30), 0.02)

    with trio.fail_after(patience_s()), pytest.raises(StoreUnavailable):
        await store.run(ask_and_sleep)


async def test_a_socket_that_gets_ready_during_a_turn_is_served_in_a_later_one(store):
    near, far = socket.socketpair()
    with near, far:
        near.setblocking(False)

        async def read(_connection):
            reading = asyncio.ensure_future(asyncio.get_running_loop().sock_recv(near, 1))
            await asyncio.sleep(0)  # it waits for the socket
            far.send(b"x")
            return await reading

        with trio.fail_after(patience_s()):
            assert await store.run(read) == b"x"


async def test_an_operation_that_ends_in_its_first_step_has_its_result_and_its_error(store):
    async def end(_connection):
        return 7

    async def fail(_connection):
        raise ZeroDivisionError

    assert await store.run(end) == 7
    with pytest.raises(ZeroDivisionError):
        await store.run(fail)


async def test_an_answer_that_comes_in_spite_of_a_cancellation_is_the_result(store):
    waits = trio.Event()

    async def insist(_connection):
        waits.set()
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        return "done"

    results = []

    async def run():
        results.append(await store.run(insist))

    with trio.fail_after(patience_s()):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await waits.wait()
            nursery.cancel_scope.cancel()
    assert results == ["done"]


async def test_the_end_of_a_thread_wakes_the_loop(store):
    async def in_thread(_connection):
        return await asyncio.get_running_loop().run_in_executor(None, threading.get_ident)

    with trio.fail_after(patience_s()):
        assert await store.run(in_thread) != threading.get_ident()


async def test_an_error_in_a_callback_is_reported_and_ends_nothing(store, caplog):
    async def fail_later(_connection):
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)
        await asyncio.sleep(0)

    await store.run(fail_later)
    assert await store.run(ask) == 1
    assert "division by zero" in caplog.text


async def test_an_operation_after_the_loop_has_ended_is_refused(store):
    await store.cut()
    with pytest.raises(StoreUnavailable):
        await store.run(ask)


def test_the_private_parts_of_asyncio_that_we_use_exist():
    """loop.py uses private parts of the standard library, which a new version of Python may move."""
    loop = asyncio.SelectorEventLoop()
    try:
        assert isinstance(loop._ready, deque)
        assert loop._scheduled == []
        timer = loop.call_later(60, print)
        assert loop._scheduled == [timer], "a heap: the next timer is its first"
        # One round, which polls the selector without waiting when the loop is stopping.
        called = []
        loop.call_soon(called.append, "one")
        loop._stopping = True
        loop._run_once()
        assert (called, len(loop._ready)) == (["one"], 0)
    finally:
        loop.close()
    assert asyncio._get_running_loop() is None
    asyncio._set_running_loop(loop)
    try:
        assert asyncio.get_running_loop() is loop
    finally:
        asyncio._set_running_loop(None)

"""The watchdog detects a blocked loop, and causes no turns of an idle one."""

from __future__ import annotations

import asyncio
import threading
import time
from functools import partial

import pytest
import trio
import trio.testing
from conditions import until
from logged import capture_logs

from dataloader import AioJob, Tasks
from dataloader.jobs.telemetry import Telemetry
from dataloader.supervisor.watchdog import STALL_S, watch_loop
from dataloader.testing import run_task


class Clock:
    """The watchdog's clock, which the tests set; its thread reads it in each round."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self._looks = threading.Semaphore(0)

    def __call__(self) -> float:
        if threading.current_thread().name == "loop watchdog":
            self._looks.release()
        return self.now

    def let_it_look(self) -> None:
        """Block until the thread has read the current time: its second read has begun after this."""
        while self._looks.acquire(blocking=False):
            pass
        for _ in range(3):
            assert self._looks.acquire(timeout=60)


@pytest.fixture
def clock():
    return Clock()


class Turns(trio.abc.Instrument):
    """Counts the turns of the loop, and reports when the first one has ended in a wait."""

    def __init__(self) -> None:
        self.count = 0
        self.loop_waits = threading.Event()

    def before_io_wait(self, timeout: float) -> None:
        self.count += 1
        if timeout > 0:
            self.loop_waits.set()


def stalls(telemetry: Telemetry) -> tuple[int, float]:
    """Return the number of stalls, and their seconds."""
    [found] = [measure for measure in telemetry.measures if measure.name == "dataloader_loop_stall_seconds"]
    return sum(found.distributions[()].counts), found.distributions[()].total


def unheard(_for_s: float) -> None:
    """Ignore the call."""


async def test_a_turn_that_takes_long_is_reported_while_it_lasts_and_counted(clock):
    telemetry, told = Telemetry(), []
    with capture_logs() as logs:
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(watch_loop, telemetry, told.append, tick_s=0.02, clock=clock))
            await trio.lowlevel.checkpoint()
            clock.now += 0.99 * STALL_S
            clock.let_it_look()
            await trio.lowlevel.checkpoint()
            assert (told, stalls(telemetry)) == ([], (0, 0))
            clock.now += 2 * STALL_S
            clock.let_it_look()
            clock.let_it_look()
            assert stalls(telemetry) == (0, 0), "it lasts"
            assert len(told) >= 2
            await trio.lowlevel.checkpoint()
            assert stalls(telemetry) == (1, 2 * STALL_S)

            async def is_logged():
                return logs

            [report] = await until(is_logged)
            nursery.cancel_scope.cancel()
    assert len(logs) == 1
    assert report["event"] == "the event loop is blocked"
    assert "clock.let_it_look()" in report["stack"]
    # Repeatedly, with the duration so far, as seen by the thread itself.
    assert told == sorted(told)
    assert 0 <= told[0] < told[-1] <= 2 * STALL_S


async def test_an_asyncio_handler_that_blocks_the_loop_is_seen_as_any_other():
    tasks, reported = Tasks(), threading.Event()

    @tasks.task("block", asyncio=True)
    async def block(job: AioJob) -> bool:
        await asyncio.sleep(0.01)  # in a separate turn
        for _ in range(1_000):
            if reported.is_set():
                break
            time.sleep(0.01)  # noqa: ASYNC251 - the watchdog must detect it
        return reported.is_set()

    def hear(_for_s: float) -> None:
        # A busy machine may have others.
        if any("in block\n" in line.get("stack", "") for line in logs):
            reported.set()

    with capture_logs() as logs:
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(watch_loop, Telemetry(), hear, tick_s=0.01, stall_s=0.1))
            assert (await run_task(tasks, "block")).result is True
            nursery.cancel_scope.cancel()


async def test_a_loop_with_nothing_to_do_is_not_woken_and_no_stall(clock):
    telemetry, turns, passed = Telemetry(), Turns(), trio.Event()

    def let_time_pass(token):
        assert turns.loop_waits.wait(60)
        clock.now += 10 * STALL_S
        clock.let_it_look()
        token.run_sync_soon(passed.set)

    with capture_logs() as logs:
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(watch_loop, telemetry, unheard, tick_s=0.02, clock=clock))
            await trio.testing.wait_all_tasks_blocked()
            trio.lowlevel.add_instrument(turns)
            threading.Thread(target=let_time_pass, args=[trio.lowlevel.current_trio_token()]).start()
            await passed.wait()
            trio.lowlevel.remove_instrument(turns)
            nursery.cancel_scope.cancel()
    # Into the wait, and out of it by the thread's message, which has a turn before ours.
    assert (turns.count, stalls(telemetry), logs) == (2, (0, 0), [])

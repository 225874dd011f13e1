"""The watchdog sees a loop that is blocked, and costs one that has nothing to do no turns."""

from __future__ import annotations

import asyncio
import threading
import time

import trio
from conditions import until
from logged import capture_logs

from dataloader import AioJob, Tasks
from dataloader.jobs.telemetry import Telemetry
from dataloader.supervisor import watchdog
from dataloader.supervisor.watchdog import STALL_S, watch_loop
from dataloader.testing import run_task


class Turns(trio.abc.Instrument):
    """Counts the turns of the loop."""

    def __init__(self) -> None:
        self.count = 0

    def before_io_wait(self, timeout: float) -> None:  # noqa: ARG002 - as Trio calls it
        self.count += 1


def stalls(telemetry: Telemetry) -> tuple[int, float]:
    """How many there were, and their seconds."""
    [found] = [measure for measure in telemetry.measures if measure.name == "dataloader_loop_stall_seconds"]
    return sum(found.distributions[()].counts), found.distributions[()].total


def unheard(_for_s: float) -> None:
    """Nobody listens."""


async def test_a_turn_that_takes_long_is_reported_while_it_lasts_and_counted():
    telemetry, told = Telemetry(), []
    with capture_logs() as logs:
        async with trio.open_nursery() as nursery:
            await nursery.start(watch_loop, telemetry, told.append)
            for seconds in (STALL_S / 2, 2 * STALL_S):
                await trio.sleep(0.01)
                time.sleep(seconds)  # noqa: ASYNC251 - this is what is watched for

            async def one_is_counted():
                return stalls(telemetry)[0] == 1

            await until(one_is_counted)
            nursery.cancel_scope.cancel()
    assert 2 * STALL_S <= stalls(telemetry)[1] < 10 * STALL_S
    [report] = logs
    assert report["event"] == "the event loop is blocked"
    assert "time.sleep(seconds)" in report["stack"]
    # Again and again, with how long it is by now.
    assert told == sorted(told)
    assert len(told) >= 2
    assert told[-1] > STALL_S


async def test_an_asyncio_handler_that_blocks_the_loop_is_seen_as_any_other(monkeypatch):
    monkeypatch.setattr(watchdog, "TICK_S", 0.01)
    monkeypatch.setattr(watchdog, "STALL_S", 0.1)
    tasks, reported = Tasks(), threading.Event()

    @tasks.task("block", asyncio=True)
    async def block(job: AioJob) -> bool:
        await asyncio.sleep(0.01)  # for a turn of its own
        for _ in range(1_000):
            if reported.is_set():
                break
            time.sleep(0.01)  # noqa: ASYNC251 - this is what is watched for
        return reported.is_set()

    def hear(_for_s: float) -> None:
        # Of a busy machine there may be others.
        if any("in block\n" in line.get("stack", "") for line in logs):
            reported.set()

    with capture_logs() as logs:
        async with trio.open_nursery() as nursery:
            await nursery.start(watch_loop, Telemetry(), hear)
            assert (await run_task(tasks, "block")).result is True
            nursery.cancel_scope.cancel()


async def test_a_loop_with_nothing_to_do_is_not_woken_and_no_stall():
    telemetry, turns = Telemetry(), Turns()
    with capture_logs() as logs:
        async with trio.open_nursery() as nursery:
            await nursery.start(watch_loop, telemetry, unheard)
            trio.lowlevel.add_instrument(turns)
            await trio.sleep(2 * STALL_S)
            trio.lowlevel.remove_instrument(turns)
            nursery.cancel_scope.cancel()
    assert (turns.count, stalls(telemetry), logs) == (1, (0, 0), [])

"""Actors work when they are woken, at times that they set, and again after a failure of the database."""

from __future__ import annotations

import pytest
import trio
from logged import capture_logs

from dataloader.actors.outage import Outage
from dataloader.actors.wake import Wake
from dataloader.actors.woken import PAUSE_S, work_when_woken
from dataloader.jobs.errors import StoreUnavailable


class Work:
    """Work of an actor: `results` are what its calls return or raise, the last one for all further calls."""

    def __init__(self, *results: float | Exception | None) -> None:
        self.results = list(results)
        self.wake = Wake()
        self.calls: list[float] = []
        self.began = trio.current_time()

    async def do(self) -> float | None:
        self.calls.append(round(trio.current_time() - self.began, 3))
        result = self.results.pop(0) if len(self.results) > 1 else self.results[0]
        if isinstance(result, Exception):
            raise result
        return result

    async def run(self, for_s: float) -> None:
        with capture_logs(), trio.move_on_after(for_s):
            await work_when_woken("test", self.wake, self.do, Outage())


async def test_an_actor_works_only_when_woken(autojump_clock):
    work = Work(None)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(work.run, 100)
        await trio.sleep(10)
        work.wake.set()
        work.wake.set()
    assert work.calls == [10]


async def test_an_actor_works_again_after_the_time_that_it_returned(autojump_clock):
    work = Work(5.0, 7.0, None)
    work.wake.set()
    await work.run(100)
    assert work.calls == [0, 5, 12]


async def test_a_wake_up_ends_the_wait_for_the_returned_time(autojump_clock):
    work = Work(50.0)
    work.wake.set()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(work.run, 49)
        await trio.sleep(3)
        work.wake.set()
    assert work.calls == [0, 3]


async def test_a_wake_up_does_not_shorten_the_pause_after_a_failure(autojump_clock):
    work = Work(StoreUnavailable("gone"), None)
    work.wake.set()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(work.run, 100)
        await trio.sleep(PAUSE_S / 2)
        work.wake.set()
    assert work.calls == [0, pytest.approx(PAUSE_S)], "the wake-up and the next try are one call"

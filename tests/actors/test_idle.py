"""An idle process is rarely woken."""

from __future__ import annotations

import pytest
import trio
from conditions import until

from dataloader import Tasks

pytestmark = pytest.mark.slow

WATCHED_S = 2
MOST = 6
"""Turns of the event loop for a ping and its answer."""


class Turns(trio.abc.Instrument):
    """Counts the turns of the event loop."""

    def __init__(self) -> None:
        self.count = 0

    def before_io_wait(self, timeout: float) -> None:  # noqa: ARG002 - as Trio calls it
        self.count += 1


async def test_an_idle_process_is_woken_only_by_its_listeners_ping(open_worker, settled):
    tasks, turns = Tasks(), Turns()

    @tasks.task("none")
    async def none(job):
        """Return nothing; no job runs this."""

    async def count():
        turns.count = 0
        trio.lowlevel.add_instrument(turns)
        await trio.sleep(WATCHED_S)
        trio.lowlevel.remove_instrument(turns)
        return turns.count

    async with open_worker(tasks, with_web=True) as supervisor:
        await settled(supervisor)
        # On a busy machine the start takes longer.
        await until(count, lambda count: count <= MOST, within_s=30)

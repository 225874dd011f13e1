"""The releaser frees keys when it is woken, and continues until the database has confirmed it (Q7)."""

from __future__ import annotations

import pytest
import trio
from logged import capture_logs

from dataloader.actors.outage import Outage
from dataloader.actors.releaser import RETRY_S, Releaser
from dataloader.jobs.errors import StoreUnavailable

pytestmark = pytest.mark.requirement("Q7")


class Locks:
    """Lock session that fails for the first `failures` attempts; `tries` has the times of all."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.tries: list[float] = []

    async def release(self) -> None:
        self.tries.append(trio.current_time())
        if len(self.tries) <= self.failures:
            raise StoreUnavailable("gone")


async def test_it_tries_again_until_the_keys_are_free_and_rests_then_until_it_is_woken(autojump_clock):
    locks, began = Locks(failures=3), trio.current_time()
    releaser = Releaser(locks, Outage())
    with capture_logs():
        async with trio.open_nursery() as nursery:
            await nursery.start(releaser.run)
            await trio.sleep(10)
            assert locks.tries == []
            releaser.wake.set()
            await trio.sleep(10)
            releaser.wake.set()
            releaser.wake.set()
            await trio.sleep(10)
            nursery.cancel_scope.cancel()
    assert [at - began for at in locks.tries] == [pytest.approx(10 + n * RETRY_S) for n in range(4)] + [20]

"""Lets one request at a time through to a source, over all processes, with the pauses between them (E1, S4).

Whose turn it is stands in the database (store/etl_sources.py); here is the waiting, and what a run says meanwhile. The
pause counts from the end of the response, and begins when the response has been handed on.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Final

import attrs
import trio

from dataloader.flows.etl.report import Report
from dataloader.store.database import Database
from dataloader.store.etl_sources import Budget, aio_give, aio_take

LEASE_MARGIN_S: Final = 15.0
"""How much longer than its own deadline a request may hold its source: for the database."""
LOOK_S: Final = (0.1, 1.0)
"""How soon to look again, and how late, when another run's request is under way: nobody knows when it ends."""


@attrs.define
class Slot:
    """A turn. `hint_s`: for how long the source wants to be left alone, by its own words."""

    hint_s: float = 0.0


@attrs.frozen(kw_only=True)
class Turnstile:
    """The turns of one run, whose token is `holder`. Times in seconds."""

    database: Database
    holder: int
    report: Report
    rate_min: float
    rate_max: float
    lease_s: float
    budgets: tuple[Budget, ...] = ()
    draw: random.Random = attrs.field(factory=random.Random)

    @asynccontextmanager
    async def turn(self, source: str | None) -> AsyncIterator[Slot]:
        """Wait for the turn at `source`, and have it for the length of a block; None need not be waited for."""
        slot = Slot()
        if source is None:
            yield slot
            return
        await self._wait(source)
        try:
            yield slot
        finally:
            pause_s = self.draw.uniform(self.rate_min, self.rate_max)
            waits_for = "pause" if slot.hint_s <= pause_s else "retry-after"
            # Shielded, with the store's deadline: else nobody could ask until the lease has ended.
            await self.database.write(  # noqa: ASYNC102
                aio_give, source, self.holder, max(pause_s, slot.hint_s), waits_for
            )

    async def _wait(self, source: str) -> None:
        look_s = LOOK_S[0]
        try:
            while True:
                turn = await self.database.write(aio_take, source, self.holder, self.lease_s, self.budgets)
                if turn.waits_for is None:
                    return
                wait_s = turn.wait_s
                if turn.waits_for == "request":
                    wait_s, look_s = min(wait_s, look_s * self.draw.uniform(0.8, 1.2)), min(look_s * 2, LOOK_S[1])
                self.report.waiting = {
                    "for": turn.waits_for,
                    "source": source,
                    "until": (datetime.now(UTC) + timedelta(seconds=turn.wait_s)).isoformat(timespec="seconds"),
                }
                await trio.sleep(wait_s)
        finally:
            self.report.waiting = None

"""Limiters that a test fills, to see which requests wait for a place while all others continue."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import trio

from dataloader.store.connection.fair_places import FairPlaces


@asynccontextmanager
async def all_taken(turns: trio.CapacityLimiter | FairPlaces) -> AsyncIterator[None]:
    """Take all places of a limiter for the duration of a block; each place of a fair one by another caller."""
    if isinstance(turns, FairPlaces):
        async with AsyncExitStack() as taken:
            for number in range(turns.most):
                await taken.enter_async_context(turns.place_of(f"caller {number}"))
            yield
        return
    takers = [object() for _ in range(int(turns.total_tokens))]
    for taker in takers:
        await turns.acquire_on_behalf_of(taker)
    try:
        yield
    finally:
        for taker in takers:
            turns.release_on_behalf_of(taker)


async def waiting_for(turns: trio.CapacityLimiter | FairPlaces) -> int:
    """Return the number of waiters for a place of a limiter."""
    return turns.waiting if isinstance(turns, FairPlaces) else turns.statistics().tasks_waiting

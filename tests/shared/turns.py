"""Limiters that a test fills, so that it sees what needs a place: it waits, and everything else goes on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio


@asynccontextmanager
async def all_taken(turns: trio.CapacityLimiter) -> AsyncIterator[None]:
    """Take all places of a limiter for the length of a block."""
    takers = [object() for _ in range(int(turns.total_tokens))]
    for taker in takers:
        await turns.acquire_on_behalf_of(taker)
    try:
        yield
    finally:
        for taker in takers:
            turns.release_on_behalf_of(taker)


async def waiting_for(turns: trio.CapacityLimiter) -> int:
    """Return how many wait for a place of a limiter."""
    return turns.statistics().tasks_waiting

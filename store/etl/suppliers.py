"""Suppliers and their request slots: one request at a time, with pauses and rate limits, over all processes.

A supplier is an external system with rate limits and work periods. It is a row of `dl_sources`, by the name of the
sources that send requests to it. A run takes its slot for a bounded time, and returns it with the pause that the next
run must keep. If its process dies, the slot ends with that time. All times are the database's.

A request arrives at some time between its slot's beginning and end. So it counts towards a rate limit from the slot's
beginning until one span after its end: then no span at the supplier has more requests, however long they travel.
Rejected: to record the time when a slot is taken, or just before the request is sent, plus a margin for the unknown
travel time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import attrs

from dataloader.jobs.limits import RateLimit


@attrs.frozen
class SlotAnswer:
    """Answer to a run that wants the slot. It has the slot if `waits_for` is None, else it must wait `wait_s` seconds.

    `waits_for` is `request` (another run's is under way), `pause`, `retry-after` (the source's own words), `budget`,
    `period`, `paused` or `error` (the supplier's limits cannot be evaluated).
    """

    wait_s: float
    waits_for: str | None


_TAKE: Final = "SELECT wait_s, waits_for FROM dl_source_take($1, $2, $3, $4, $5)"
_GIVE: Final = "SELECT dl_source_give($1, $2, $3, $4)"


async def aio_take_slot(
    connection: Any, source: str, holder: int, lease_s: float, rate_limits: Sequence[RateLimit] = ()
) -> SlotAnswer:
    """Take the slot of `source` for the run with the token `holder`, for `lease_s` seconds; its holder keeps it."""
    row = await connection.fetchrow(
        _TAKE,
        source,
        holder,
        lease_s,
        [rate_limit.requests for rate_limit in rate_limits],
        [float(rate_limit.kept_s) for rate_limit in rate_limits],
    )
    return SlotAnswer(row["wait_s"], row["waits_for"])


async def aio_return_slot(connection: Any, source: str, holder: int, pause_s: float, waits_for: str = "pause") -> None:
    """Return the slot of `source` after its request; it is free in `pause_s` seconds, because of `waits_for`."""
    await connection.execute(_GIVE, source, holder, pause_s, waits_for)

"""Corrects schedules whose next time was computed while the database's clock was ahead. They would wait for it."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Any, Final

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.logger import get_logger
from dataloader.store.connection.bridge import Database
from dataloader.store.queue.leases import PLAUSIBLE_S
from dataloader.store.schedules.rows import read_spec

log = get_logger(__name__)

IN_A_TURN: Final = 200
"""Schedules that are processed before other tasks of the event loop run."""
_AHEAD: Final = f"""
SELECT name, spec::text AS spec, stored_at, next_at, clock_timestamp() AS now FROM dl_schedules
WHERE NOT paused AND retired_at IS NULL AND next_at < 'infinity'
  AND next_at > clock_timestamp() + interval '{PLAUSIBLE_S} s'
"""
_CUT_BACK: Final = """
UPDATE dl_schedules s SET next_at = u.next_at, stored_at = least(s.stored_at, u.now)
FROM unnest($1::text[], $2::timestamptz[], $3::timestamptz[], $4::timestamptz[]) AS u (name, former, next_at, now)
WHERE s.name = u.name AND s.next_at = u.former
RETURNING s.name
"""


async def cut_back(database: Database) -> int:
    """Recompute the next time of schedules that are due later than they should be; return their number.

    No planned time gets a second job. Planned times that were left out because of the clock get a job after all.
    """
    return await database.write(_aio_cut_back)


async def _aio_cut_back(connection: Any) -> int:
    names: list[str] = []
    former: list[datetime] = []
    next_ats: list[datetime | None] = []
    nows: list[datetime] = []
    for number, (name, spec, stored_at, next_at, now) in enumerate(await connection.fetch(_AHEAD), 1):
        try:
            schedule = read_spec(name, spec)
            found = schedule.next_after(schedule.times(min(stored_at, now)), now)
        except (BadRequest, ArithmeticError, ValueError):
            continue  # the tick reports the error
        if found is not None and found < next_at:
            names.append(name)
            former.append(next_at)
            next_ats.append(found)
            nows.append(now)
        if number % IN_A_TURN == 0:
            await asyncio.sleep(0)
    if not names:
        return 0
    cut = await connection.fetch(_CUT_BACK, names, former, next_ats, nows)
    if cut:
        log.warning(
            "next times of schedules were too late and were corrected: the database's clock had been ahead",
            schedules=len(cut),
            names=[row["name"] for row in cut[:5]],
        )
    return len(cut)

"""Errors of lanes: why the database refuses a claim that looks at a lane, for readers of its task and jobs (S1, S4).

A process that has closed a lane writes the error again at each try, and clears it when a claim works. So the error of a
process that has died is no longer current a few tries later.
"""

from __future__ import annotations

from typing import Any, Final

CURRENT_S: Final = 180
"""For how long an error counts after the last try: longer than the pauses between tries (actors/lane_looks.py)."""
MAX_TEXT: Final = 500

# A lane that a claim or an operator has locked is passed over: claims do not wait for it.
_FAILED: Final = """
UPDATE dl_lanes SET error = $2, failed_at = now() WHERE lane = ANY (ARRAY(
  SELECT l.lane FROM dl_lanes l WHERE l.lane = $1 FOR NO KEY UPDATE SKIP LOCKED))
"""
_WORKS: Final = """
UPDATE dl_lanes SET error = NULL, failed_at = NULL WHERE lane = ANY (ARRAY(
  SELECT l.lane FROM dl_lanes l WHERE l.lane = $1 AND l.error IS NOT NULL FOR NO KEY UPDATE SKIP LOCKED))
"""


async def aio_lane_failed(connection: Any, lane: str, error: str) -> None:
    """Note why claims can not look at a lane (asyncio-flavoured)."""
    await connection.execute(_FAILED, lane, error[:MAX_TEXT])


async def aio_lane_works(connection: Any, lane: str) -> None:
    """Note that claims can look at a lane again (asyncio-flavoured)."""
    await connection.execute(_WORKS, lane)

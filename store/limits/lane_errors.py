"""Errors of limit queues (lanes): the reason why the database refuses claims from a lane, for its task and jobs.

A process that has closed a lane writes the error again at each try, and clears it when a claim succeeds. So the error
of a dead process is outdated a few tries later.
"""

from __future__ import annotations

from typing import Any, Final

CURRENT_S: Final = 180
"""Seconds for which an error counts after the last try: longer than the pauses between tries (actors/lane_looks.py)."""
MAX_TEXT: Final = 500

# A lane that a claim or an operator has locked is skipped: claims do not wait for it.
_FAILED: Final = """
UPDATE dl_lanes SET error = $2, failed_at = now() WHERE lane = ANY (ARRAY(
  SELECT l.lane FROM dl_lanes l WHERE l.lane = $1 FOR NO KEY UPDATE SKIP LOCKED))
"""
_WORKS: Final = """
UPDATE dl_lanes SET error = NULL, failed_at = NULL WHERE lane = ANY (ARRAY(
  SELECT l.lane FROM dl_lanes l WHERE l.lane = $1 AND l.error IS NOT NULL FOR NO KEY UPDATE SKIP LOCKED))
"""


async def aio_lane_failed(connection: Any, lane: str, error: str) -> None:
    """Record why claims cannot check a lane (asyncio-flavored)."""
    await connection.execute(_FAILED, lane, error[:MAX_TEXT])


async def aio_lane_works(connection: Any, lane: str) -> None:
    """Record that claims can check a lane again (asyncio-flavored)."""
    await connection.execute(_WORKS, lane)

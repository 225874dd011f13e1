"""Job IDs: UUID version 7 (RFC 9562), so that IDs sort by creation time and new rows share index pages.

They are created here and not by the database, so that a client that lost the reply can ask for its job by ID.
`uuid.uuid7` exists only from Python 3.14 on.
"""

from __future__ import annotations

import os
import time
from uuid import UUID

_VERSION_AND_VARIANT = (7 << 76) | (0b10 << 62)


class _Clock:
    """Last timestamp, in nanoseconds ÷ 1.024, so that the IDs of one process never go backwards."""

    last = 0


def uuid7() -> UUID:
    """Return a new ID: 48 bits of Unix milliseconds, 12 bits of the fraction below, 62 random bits.

    IDs of one process are strictly ordered, also when its clock steps back (method 3 of RFC 9562, section 6.2).
    """
    nanoseconds = time.time_ns()
    milliseconds, rest = divmod(nanoseconds, 1_000_000)
    ticks = (milliseconds << 12) | (rest * 4096 // 1_000_000)
    if ticks <= _Clock.last:
        ticks = _Clock.last + 1
    _Clock.last = ticks
    random_bits = int.from_bytes(os.urandom(8), "big") & ((1 << 62) - 1)
    return UUID(int=((ticks >> 12) << 80) | ((ticks & 0xFFF) << 64) | _VERSION_AND_VARIANT | random_bits)

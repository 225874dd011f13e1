"""Decides whether user code that met an outage runs again: steps of processes, handlers of sinks, and resources.

The error alone does not name the unavailable database. While the queue's database serves, the outage may be that of
another one. So the repetitions are counted, and after a few of them the error is the code's own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import attrs

from dataloader.jobs.error_groups import is_denied
from dataloader.jobs.growing_pauses import Pauses

OUTAGES: Final = 5
"""Maximum number of consecutive repeats after outages while the queue's own database answers."""


async def always_serves() -> bool:
    """Return True: `Outages.serves` where the queue's database is not asked, so that every outage counts."""
    return True


@attrs.define(eq=False)
class Outages:
    """Consecutive outages of one piece of user code.

    `serves` returns whether the queue's database accepts writes now. `most` limits the outages while it does.
    """

    serves: Callable[[], Awaitable[bool]]
    pauses: Pauses
    most: float = OUTAGES
    _while_served: int = attrs.field(default=0, init=False)

    async def may_repeat(self, error: Exception) -> bool:
        """Return True if the code should run again after `pauses.next()` seconds, following the outage `error`.

        A refused address or password is an outage only while the queue's database refuses connections, too.
        """
        if not await self.serves():
            return True
        if is_denied(error) or self._while_served >= self.most:
            return False
        self._while_served += 1
        return True

    def reset(self) -> None:
        """Start over, for other code or after a run without an outage."""
        self._while_served = 0
        self.pauses.reset()

"""Messages between the service and a Dask worker about one body, with times by the clocks of their machines.

Dask pickles our functions and bytes, nothing of a user. Forwarded messages are numbered: one whose answer was lost is
sent again, and applied once.
"""

from __future__ import annotations

import math
import time
from typing import Annotated, Any, Final

import attrs
import msgspec

GIVE: Final = "dataloader_give"
TAKE: Final = "dataloader_take"
"""Names of the requests that a worker answers."""
WAIT_S: Final = 10.0
"""Seconds for which a worker waits for a message before it answers that there is none."""
MAX_SAID: Final = 2**20
"""Bytes that may wait to be taken from a worker; then the body waits."""
MAX_AT: Final = 1e10
"""Upper bound for clock readings in seconds."""
DRIFT: Final = 0.001
"""Share by which a machine's clock may run faster than another's: twice what NTP allows."""


Said = tuple[Any, ...]
"""Message and its values. Of the service: `line BYTES`, `arm HARD LAST`, `until HARD LAST`, `term`, `end`, `keep`.

Of the worker: `line BYTES`, `died TEXT`, `out STREAM TEXT`, `ended TEXT AT_DEADLINE`, `over`.
"""


class Order(msgspec.Struct):
    """Order for a Dask task: the body to start, for the run called `key`, and the `topic` for its announcements.

    `idle_s` and `max_jobs` bound how long its child is kept for other jobs; `max_lines` bounds its printed lines. With
    `calls` the body answers calls.
    """

    version: str
    key: str
    topic: str
    module: str
    name: str
    around: list[tuple[str, str]]
    asyncio: bool
    memory_mb: int | None
    max_jobs: int
    idle_s: float
    max_lines: int
    calls: bool = False


class Announced(msgspec.Struct):
    """Announcement of a worker: a `relay` of the run `key` is `placed`, `ready`, or has `failed`.

    `at` is by the worker's clock; `process` names its process.
    """

    key: str
    relay: str
    worker: str
    process: str
    at: Annotated[float, msgspec.Meta(ge=0, le=MAX_AT)]
    state: str = "placed"
    text: str = ""


class Answered(msgspec.Struct):
    """Answer of a worker: what its relay has `said`, from the message number `first` on, if the request was for that.

    `at` and `process` are as in `Announced`. `gone`: there is no such relay.
    """

    at: Annotated[float, msgspec.Meta(ge=0, le=MAX_AT)]
    process: str
    gone: bool
    first: int = 0
    said: list[Said] = []


def boot_s() -> float:
    """Return the time by this machine's clock that also counts while it sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@attrs.define(eq=False)
class FarClock:
    """Estimate of another machine's clock, never later than that clock.

    Each of its stamps was made before it arrived: the clock now shows at least the stamp plus the time since.
    """

    _ahead: float = -math.inf
    _at: float = 0.0

    def stamped(self, stamp: float) -> None:
        """Process a stamp that has arrived. The fastest one counts, less the possible drift since."""
        now = boot_s()
        self._ahead = max(stamp - now, self._ahead - DRIFT * (now - self._at))
        self._at = now

    def there(self, at: float) -> float:
        """Convert a time of this machine to that clock, or to a somewhat earlier time."""
        return at + self._ahead - DRIFT * max(at - boot_s(), 0)

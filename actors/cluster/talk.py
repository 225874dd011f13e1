"""What the service and a Dask worker say to each other about one body, by the clocks of their machines.

Dask pickles functions of ours and bytes, nothing of a user's. What is passed on is numbered, so that a message whose
answer was lost is sent again and heeded once.
"""

from __future__ import annotations

import math
import time
from typing import Annotated, Any, Final

import attrs
import msgspec

GIVE: Final = "dataloader_give"
TAKE: Final = "dataloader_take"
"""The names of what a worker answers."""
WAIT_S: Final = 10.0
"""How long a worker waits for something to say before it answers that there is nothing."""
MAX_SAID: Final = 2**20
"""Bytes that wait to be taken from a worker; then the body waits."""
MAX_AT: Final = 1e10
"""A bound for what clocks show."""
DRIFT: Final = 0.001
"""How much faster a machine's clock may run than another's: twice what NTP allows."""


Said = tuple[Any, ...]
"""A message, by its kind: of the service `line BYTES`, `arm HARD LAST`, `until HARD LAST`, `term`, `end`, `keep`; of
the worker `line BYTES`, `out STREAM TEXT`, `ended TEXT AT_DEADLINE`, `over`."""


class Order(msgspec.Struct):
    """What a Dask task is given: the body to start, for the run called `key`, and the `topic` to announce it in.

    `idle_s` and `max_jobs` say how long its child is kept for the next one; `max_lines` bounds the lines it prints.
    With `calls` the body answers calls.
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
    """What a worker announces: one `relay` of the run `key` is `ready`, has only been placed there, or has `failed`.

    `at` is the worker's clock; `process` names its process.
    """

    key: str
    relay: str
    worker: str
    process: str
    at: Annotated[float, msgspec.Meta(ge=0, le=MAX_AT)]
    state: str = "placed"
    text: str = ""


class Answered(msgspec.Struct):
    """What a worker answers: what its relay has `said`, from the message number `first` on, if that was asked for.

    `at` and `process` are as in `Announced`; `gone`: there is no such relay.
    """

    at: Annotated[float, msgspec.Meta(ge=0, le=MAX_AT)]
    process: str
    gone: bool
    first: int = 0
    said: list[Said] = []


def boot_s() -> float:
    """The time on this machine's clock that also counts while it sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@attrs.define(eq=False)
class FarClock:
    """Another machine's clock, as seen from here: never later than it is.

    Each of its stamps was made before it arrived: what it shows now is at least the stamp and what has passed since.
    """

    _ahead: float = -math.inf
    _at: float = 0.0

    def stamped(self, stamp: float) -> None:
        """A stamp has arrived; the one that was fastest counts, until clocks may have drifted."""
        now = boot_s()
        self._ahead = max(stamp - now, self._ahead - DRIFT * (now - self._at))
        self._at = now

    def there(self, at: float) -> float:
        """A time of this machine's by that clock, or somewhat earlier."""
        return at + self._ahead - DRIFT * max(at - boot_s(), 0)

"""What signals do: the first one the first thing, the next one the next."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Callable


async def obey(signals: AsyncIterator[int], *steps: Callable[[str], None]) -> None:
    """Call one of `steps` with the name of each signal that comes, in their order, and the last one from then on.

    `signals` are those of `trio.open_signal_receiver`; it ends by being cancelled.
    """
    number = 0
    async for came in signals:
        steps[min(number, len(steps) - 1)](signal.Signals(came).name)
        number += 1

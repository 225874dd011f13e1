"""Signals as steps: the first signal triggers the first step, the next one the next."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Callable


async def obey(signals: AsyncIterator[int], *steps: Callable[[str], None]) -> None:
    """Call the next of `steps` with the name of each signal that arrives. After the last step, repeat the last one.

    `signals` comes from `trio.open_signal_receiver`. Runs until cancelled.
    """
    number = 0
    async for came in signals:
        steps[min(number, len(steps) - 1)](signal.Signals(came).name)
        number += 1

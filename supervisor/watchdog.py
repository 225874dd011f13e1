"""Detects a handler that blocks the event loop, and logs where it hangs.

This is a thread, because no code on the loop can run while it is blocked. The thread only reads when the current turn
began and, after a long time, the main thread's stack. It logs each stall once. The loop itself notes when a turn begins
and ends, and counts the long ones: a task for that would cause most of the work of an idle process.
"""

from __future__ import annotations

import math
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

import trio

from dataloader.jobs.logger import get_logger
from dataloader.jobs.telemetry import Telemetry

log = get_logger(__name__)

TICK_S: Final = 0.25
STALL_S: Final = 0.5
"""Seconds after which a turn of the loop is a stall."""


class _Turns(trio.abc.Instrument):
    """Records when the current turn of the loop began; `inf` while the loop waits."""

    def __init__(self, telemetry: Telemetry, stall_s: float, clock: Callable[[], float]) -> None:
        self.began = math.inf
        self._telemetry = telemetry
        self._stall_s = stall_s
        self._clock = clock

    def after_io_wait(self, timeout: float) -> None:  # noqa: ARG002 - Trio's signature
        self.began = self._clock()

    def before_io_wait(self, timeout: float) -> None:  # noqa: ARG002 - Trio's signature
        took_s, self.began = self._clock() - self.began, math.inf
        if took_s > self._stall_s:
            self._telemetry.loop_stalled(took_s)


async def watch_loop(
    telemetry: Telemetry,
    blocked: Callable[[float], None],
    *,
    tick_s: float = TICK_S,
    stall_s: float = STALL_S,
    clock: Callable[[], float] = time.monotonic,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Watch this loop until cancelled.

    A thread checks every `tick_s` seconds, by `clock`, whether the current turn takes longer than `stall_s` seconds. It
    then calls `blocked` with the seconds that the stall has lasted so far.
    """
    watched = threading.get_ident()
    turns = _Turns(telemetry, stall_s, clock)
    ended = threading.Event()

    def watch() -> None:
        reported = last = math.inf
        seen_s = 0.0
        while not ended.wait(tick_s):
            began = turns.began
            for_s = clock() - began
            # Only time that this thread has observed counts: while the whole process was suspended, no handler could
            # run.
            seen_s, last = seen_s + tick_s if began == last else 0.0, began
            if for_s > stall_s and began != reported:
                reported = began
                frame = sys._current_frames().get(watched)  # noqa: SLF001 - the documented way to see another thread
                stack = "".join(traceback.format_stack(frame, limit=12)) if frame is not None else ""
                # In a separate thread: writing to a log that is not read may be what blocks the loop.
                tell = partial(log.error, "the event loop is blocked", for_s=round(for_s, 2), stack=stack)
                with suppress(RuntimeError):  # the machine has no thread left
                    threading.Thread(target=tell, daemon=True).start()
            if for_s > stall_s:
                blocked(min(for_s, seen_s))

    thread = threading.Thread(target=watch, name="loop watchdog", daemon=True)
    thread.start()
    trio.lowlevel.add_instrument(turns)
    task_status.started()
    try:
        await trio.sleep_forever()
    finally:
        trio.lowlevel.remove_instrument(turns)
        ended.set()

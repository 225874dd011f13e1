"""Sees a handler that blocks the event loop, and says where it hangs.

A thread, because nothing on the loop can run while it is blocked. It only reads a time stamp and, when that is old, the
main thread's stack; it logs once a stall and counts its length.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from typing import Final

import structlog
import trio

from dataloader.jobs.telemetry import Telemetry

log = structlog.get_logger(__name__)

TICK_S: Final = 0.25
STALL_S: Final = 0.5
"""A loop that has not turned for this long is stalled."""


async def watch_loop(telemetry: Telemetry, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    """Watch this loop until cancelled."""
    watched = threading.get_ident()
    turned_at = time.monotonic()
    ended = threading.Event()

    def watch() -> None:
        reported = False
        while not ended.wait(TICK_S):
            behind_s = time.monotonic() - turned_at - TICK_S
            if behind_s < STALL_S:
                reported = False
            elif not reported:
                reported = True
                frame = sys._current_frames().get(watched)  # noqa: SLF001 - the documented way to see another thread
                stack = "".join(traceback.format_stack(frame, limit=12)) if frame is not None else ""
                log.error("the event loop is blocked", for_s=round(behind_s, 2), stack=stack)

    thread = threading.Thread(target=watch, name="loop watchdog", daemon=True)
    thread.start()
    task_status.started()
    try:
        while True:
            await trio.sleep(TICK_S)
            now = time.monotonic()
            if now - turned_at - TICK_S > STALL_S:
                telemetry.loop_stalled(now - turned_at - TICK_S)
            turned_at = now
    finally:
        ended.set()

"""Ends the process when a drain's total deadline has passed, whatever delays it, even if the event loop hangs.

This is the only file that replaces a part of Trio: it installs its own wake-up socket (`signal.set_wakeup_fd`) and
forwards the bytes to Trio's. So it notices a signal even while the main thread runs native code.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Final, NoReturn

import attrs

from dataloader.jobs.logger import get_logger
from dataloader.supervisor.supervisor import Supervisor

log = get_logger(__name__)

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that drain; SIGHUP comes from a terminal that is closed."""
LEAVE_AT: Final = 3
"""Number of the signal, counted from the first, that ends the process immediately."""
TOTAL_BOUND_S: Final = 10.0
"""Seconds after the drain's timeout at which the process ends, whatever still runs."""
LOOK_S: Final = 0.25
LAST_WORD_S: Final = 0.5
HEARD_S: Final = 1.0
"""Seconds in which a loop that is not blocked has handled a signal."""


@attrs.define(eq=False)
class TotalDeadline:
    """Ends the process at the total deadline, from a separate thread, since the loop may hang.

    A drain begins with a signal, or when a part has given up. Python runs signal handlers in the main thread, and only
    after a call into native code has returned. But it writes each signal to the wake-up socket immediately. The thread
    reads this socket and forwards the bytes to Trio's socket, `trios`.
    """

    bound_s: float
    wakeups: socket.socket
    trios: int
    began: float = math.inf
    signals: int = 0
    _supervisor: Supervisor | None = None
    _ended: bool = False

    async def watch(self, supervisor: Supervisor) -> None:
        """Start the countdown when a drain begins, for any reason."""
        self._supervisor = supervisor
        await supervisor.wait_draining()
        self.began = min(self.began, time.monotonic())

    def end(self) -> None:
        """Note that the supervisor has ended. A drain's deadline still applies to the rest of the process."""
        self._ended = True

    def run(self) -> None:
        """Wait for the deadline or the third signal. Runs in a thread."""
        with self.wakeups:
            third_at = math.inf
            while not self._ended or self.began < math.inf:
                self._listen()
                now = time.monotonic()
                if self.signals >= LEAVE_AT:
                    third_at = min(third_at, now)
                if now - third_at > HEARD_S:
                    leave(1, "third signal: exiting immediately, although the event loop is blocked")
                if now - self.began > self.bound_s:
                    # After a clean report only a slow client or an open connection can delay the end: code 0.
                    supervisor = self._supervisor
                    report = None if supervisor is None or supervisor.failure is not None else supervisor.report
                    code = 0 if report is not None and report.is_clean else 1
                    leave(code, "the total deadline of the drain has passed: exiting immediately", after_s=self.bound_s)

    def _listen(self) -> None:
        with suppress(TimeoutError):
            numbers = self.wakeups.recv(64)
            came = sum(number in SIGNALS for number in numbers)
            self.signals += came
            if came:
                self.began = min(self.began, time.monotonic())
            if not numbers:
                time.sleep(LOOK_S)  # the other end is closed: `recv` no longer waits
            if self.trios >= 0 and not self._ended:
                with suppress(OSError):  # if it is full, Trio wakes anyway
                    os.write(self.trios, numbers)


@lru_cache
def _let_no_child_tell() -> None:
    """Stop forked children from writing their signals to our wake-up socket."""
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


@contextmanager
def open_total_deadline(drain_timeout_s: float) -> Iterator[TotalDeadline]:
    """Apply the deadline for the duration of a block, within Trio's run."""
    _let_no_child_tell()
    wakeups, told = socket.socketpair()
    wakeups.settimeout(LOOK_S)
    told.settimeout(0)
    # The bound includes the time for the last log line and until the next check of the clock.
    bound_s = drain_timeout_s + TOTAL_BOUND_S - LAST_WORD_S - LOOK_S
    deadline = TotalDeadline(bound_s, wakeups, signal.set_wakeup_fd(told.fileno()))
    threading.Thread(target=deadline.run, name="total deadline", daemon=True).start()
    try:
        yield deadline
    finally:
        signal.set_wakeup_fd(deadline.trios)
        deadline.end()
        told.close()


def leave(code: int, why: str = "", **fields: object) -> NoReturn:
    """Log `why` and end the process with `code`, after `LAST_WORD_S` even if the log line could not be written."""
    at_the_latest = threading.Timer(LAST_WORD_S, os._exit, (code,))
    at_the_latest.daemon = True
    try:
        at_the_latest.start()
    except RuntimeError:  # the machine has no thread left
        os._exit(code)
    if why:
        log.critical(why, **fields)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

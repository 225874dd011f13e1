"""Ends the process when a drain's total deadline has passed, whatever holds it up, even if the loop itself hangs.

The one file that replaces something of Trio's: it installs a wake-up socket of its own (`signal.set_wakeup_fd`) and
forwards what it reads to Trio's, so that it learns of a signal even while the main thread runs native code.
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
"""SIGHUP comes from a terminal that is closed."""
LEAVE_AT: Final = 3
"""The number of the signal, counted from the first, that ends the process at once."""
TOTAL_BOUND_S: Final = 10.0
"""The seconds after the drain's timeout at which the process ends, whatever still runs."""
LOOK_S: Final = 0.25
LAST_WORD_S: Final = 0.5
HEARD_S: Final = 1.0
"""The seconds in which a loop that is not blocked has handled a signal."""


@attrs.define(eq=False)
class TotalDeadline:
    """Ends the process at the total deadline, from a thread of its own, since the loop may hang.

    A drain begins with a signal, or when a part has given up. Python runs signal handlers in the main thread, and only
    after a call into native code has returned; but it writes each signal to the wake-up socket at once. That is read
    here and forwarded to Trio's socket, `trios`.
    """

    bound_s: float
    wakeups: socket.socket
    trios: int
    began: float = math.inf
    signals: int = 0
    _supervisor: Supervisor | None = None
    _ended: bool = False

    async def watch(self, supervisor: Supervisor) -> None:
        """Begin to count when a drain begins, for whatever reason."""
        self._supervisor = supervisor
        await supervisor.wait_draining()
        self.began = min(self.began, time.monotonic())

    def end(self) -> None:
        """The supervisor has ended; the deadline of a drain still holds for the rest of the process."""
        self._ended = True

    def run(self) -> None:
        """Wait for the deadline or the third signal; runs in a thread."""
        with self.wakeups:
            third_at = math.inf
            while not self._ended or self.began < math.inf:
                self._listen()
                now = time.monotonic()
                if self.signals >= LEAVE_AT:
                    third_at = min(third_at, now)
                if now - third_at > HEARD_S:
                    leave(1, "third signal: leaving at once, though the loop is blocked")
                if now - self.began > self.bound_s:
                    # After a clean report only a slow client or a connection that doesn't close can hold us up: code 0.
                    supervisor = self._supervisor
                    report = None if supervisor is None or supervisor.failure is not None else supervisor.report
                    code = 0 if report is not None and report.is_clean else 1
                    leave(code, "the total deadline of the drain has passed: leaving at once", after_s=self.bound_s)

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
    """Let a forked child not write its signals to our wake-up socket."""
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


@contextmanager
def open_total_deadline(drain_timeout_s: float) -> Iterator[TotalDeadline]:
    """The deadline for the length of a block, within Trio's run."""
    _let_no_child_tell()
    wakeups, told = socket.socketpair()
    wakeups.settimeout(LOOK_S)
    told.settimeout(0)
    # The bound includes the time for the last log line and until the next look at the clock.
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
    """Log `why` and end the process with `code`; after `LAST_WORD_S` even if the log line could not be written."""
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

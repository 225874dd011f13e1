"""Ends the process when a drain's total deadline has passed, whatever holds it up: the loop itself may be what hangs.

The one file that goes behind Trio's back: it takes the place of Trio's wake-up socket (`signal.set_wakeup_fd`), and
passes on to it what comes, so that a signal is heard of while the main thread is within native code.
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
"""The last comes from a terminal that is closed."""
LEAVE_AT: Final = 3
"""This signal ends the process at once."""
TOTAL_BOUND_S: Final = 10.0
"""After the drain's timeout: when the process ends, whatever still runs."""
LOOK_S: Final = 0.25
LAST_WORD_S: Final = 0.5
HEARD_S: Final = 1.0
"""So long after it came a loop that turns has heard of a signal."""


@attrs.define(eq=False)
class TotalDeadline:
    """Leaves at the total deadline, from a thread: the loop itself may be what hangs.

    A drain begins with a signal, or when a part has given up. Python's handlers of signals run in the main thread, not
    before a call into native code has returned; that a signal came it tells a socket at once, which is read here and
    passed on to Trio's.
    """

    bound_s: float
    wakeups: socket.socket
    trios: int
    began: float = math.inf
    signals: int = 0
    _supervisor: Supervisor | None = None
    _ended: bool = False

    async def watch(self, supervisor: Supervisor) -> None:
        """Whatever begins the drain, the end comes."""
        self._supervisor = supervisor
        await supervisor.wait_draining()
        self.began = min(self.began, time.monotonic())

    def end(self) -> None:
        """The supervisor is gone; a drain's bound stays for what else may hold up the process."""
        self._ended = True

    def run(self) -> None:
        """In a thread."""
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
                    # A client that takes no data or a connection that does not close holds us up, and no row.
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
                time.sleep(LOOK_S)  # the other end is closed: nothing is told any more
            if self.trios >= 0 and not self._ended:
                with suppress(OSError):  # it is full, so Trio wakes anyway
                    os.write(self.trios, numbers)


@lru_cache
def _let_no_child_tell() -> None:
    """A forked child has our wake-up socket, too, and its signals are not ours. Python does so itself from 3.12 on."""
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


@contextmanager
def open_total_deadline(drain_timeout_s: float) -> Iterator[TotalDeadline]:
    """The deadline for the length of a block, within Trio's run."""
    _let_no_child_tell()
    wakeups, told = socket.socketpair()
    wakeups.settimeout(LOOK_S)
    told.settimeout(0)
    # The last word is within the bound, too, and so is the time until the next look at the clock.
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
    """End the process, with a last word if it can be said: a log that nobody reads may be what holds us up."""
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

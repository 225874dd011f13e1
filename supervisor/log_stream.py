"""The stream that log lines go to: whole lines, one after the other, and a bounded wait where nobody reads them.

A full pipe stops whoever writes to it. That would be the event loop, with all leases and a drain. So a line waits for
room, `WAIT_S` at the most; from then on lines are dropped without any wait, until there is room again, and then the log
says how many. Only other writers to the same pipe, such as a handler's `print`, can still be stopped by it.
"""

from __future__ import annotations

import os
import select
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TextIO

WAIT_S: Final = 0.25
"""What a line that finds no room may cost its writer; the next ones cost nothing."""


class LogStream:
    """Writes lines to a stream, and gives up on a line rather than raise, or wait for long.

    Args:
        stream: where to.
        notice: the line that says how many lines were dropped.
    """

    _lock = threading.RLock()

    def __init__(self, stream: TextIO, notice: Callable[[int], str]) -> None:
        self._stream = stream
        self._notice = notice
        self._may_block = _may_block(stream)
        self._rest = b""
        """Of a line whose beginning is written: it comes first."""
        self._dropped = 0

    def write(self, line: str) -> None:
        """Write a line, from any thread."""
        try:
            if self._may_block:
                with self._lock:
                    self._write(_encoded(line), self._stream.fileno())
            else:
                self._stream.write(f"{line}\n")
                self._stream.flush()
        except (OSError, ValueError):
            return  # the pipe or the terminal is gone, or the stream is closed; there is nowhere left to say it

    def _write(self, line: bytes, descriptor: int) -> None:
        is_stalled = self._rest or self._dropped
        deadline = time.monotonic() + (0 if is_stalled else WAIT_S)
        self._rest = self._put(self._rest, descriptor, deadline)
        if self._dropped and not self._rest:
            notice = _encoded(self._notice(self._dropped))
            left = self._put(notice, descriptor, deadline)
            if left != notice:
                self._rest, self._dropped = left, 0
        if self._rest or self._dropped:
            self._dropped += 1
            return
        left = self._put(line, descriptor, deadline)
        if left == line:
            self._dropped = 1
        else:
            self._rest = left

    def _put(self, text: bytes, descriptor: int, deadline: float) -> bytes:
        """Write what there is room for; the rest comes back."""
        room = select.poll()
        room.register(descriptor, select.POLLOUT)
        while text and room.poll(max(deadline - time.monotonic(), 0) * 1_000):
            # A pipe that has room for anything has room for so much.
            with suppress(BlockingIOError):  # somebody else was faster, in a pipe that was made not to wait
                text = text[os.write(descriptor, text[: select.PIPE_BUF]) :]
        return text


def _renew_lock() -> None:
    LogStream._lock = threading.RLock()  # noqa: SLF001 - our own


os.register_at_fork(after_in_child=_renew_lock)  # a thread that had it is not in the child


def _encoded(line: str) -> bytes:
    return f"{line}\n".encode(errors="backslashreplace")


def _may_block(stream: TextIO) -> bool:
    """Whether it is a pipe, a socket or a terminal: no file, and not what is only in memory."""
    try:
        return not stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError, AttributeError):
        return False

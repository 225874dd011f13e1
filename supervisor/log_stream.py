"""Stream for log lines: whole lines, one after the other, with a bounded wait if the reader has stopped.

A full pipe blocks its writer. That would be the event loop, and with it all heartbeats and a drain. So a line waits for
room for at most `WAIT_S` seconds. Then lines are dropped without any wait until there is room again, and the log says
how many. The pipe can still block other writers, such as a handler's `print`.
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
"""Seconds for which the first line without room waits; the next lines do not wait."""


class LogStream:
    """Writes lines to a stream. It drops a line rather than raise an error or wait for long.

    Args:
        stream: destination of the lines.
        notice: returns the line that says how many lines were dropped.
    """

    _lock = threading.RLock()

    def __init__(self, stream: TextIO, notice: Callable[[int], str]) -> None:
        self._stream = stream
        self._notice = notice
        self._may_block = _may_block(stream)
        self._rest = b""
        """Rest of a line whose beginning is already written; it is written first."""
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
            return  # the pipe or the terminal is gone, or the stream is closed: nothing can report the error

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
        """Write as many bytes as there is room for, and return the rest."""
        room = select.poll()
        room.register(descriptor, select.POLLOUT)
        while text and room.poll(max(deadline - time.monotonic(), 0) * 1_000):
            # A pipe that polls as writable has room for at least PIPE_BUF bytes.
            with suppress(BlockingIOError):  # another writer has filled a non-blocking pipe meanwhile
                text = text[os.write(descriptor, text[: select.PIPE_BUF]) :]
        return text


def _renew_lock() -> None:
    LogStream._lock = threading.RLock()  # noqa: SLF001 - our own


os.register_at_fork(after_in_child=_renew_lock)  # the thread that held the lock does not exist in the child


def _encoded(line: str) -> bytes:
    return f"{line}\n".encode(errors="backslashreplace")


def _may_block(stream: TextIO) -> bool:
    """Return True for a pipe, a socket or a terminal, and False for a file or an object in memory."""
    try:
        return not stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError, AttributeError):
        return False

"""The stream that log lines go to: whole lines, one after the other, and a bounded wait if nobody reads them.

A full pipe blocks its writer. That would be the event loop, and with it all heartbeats and a drain. So a line waits for
room for at most `WAIT_S`; then lines are dropped without any wait until there is room again, and the log says how many.
The pipe can still block its other writers, such as a handler's `print`.
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
"""How long the first line that finds no room waits, in seconds; the next ones don't wait."""


class LogStream:
    """Writes lines to a stream, and gives up on a line rather than raise, or wait for long.

    Args:
        stream: where the lines go.
        notice: the line that says how many lines were dropped.
    """

    _lock = threading.RLock()

    def __init__(self, stream: TextIO, notice: Callable[[int], str]) -> None:
        self._stream = stream
        self._notice = notice
        self._may_block = _may_block(stream)
        self._rest = b""
        """The rest of a line whose beginning is written already; it is written first."""
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
        """Write as much as there is room for; return the rest."""
        room = select.poll()
        room.register(descriptor, select.POLLOUT)
        while text and room.poll(max(deadline - time.monotonic(), 0) * 1_000):
            # A pipe that polls as writable has room for PIPE_BUF bytes.
            with suppress(BlockingIOError):  # another writer has filled a non-blocking pipe meanwhile
                text = text[os.write(descriptor, text[: select.PIPE_BUF]) :]
        return text


def _renew_lock() -> None:
    LogStream._lock = threading.RLock()  # noqa: SLF001 - our own


os.register_at_fork(after_in_child=_renew_lock)  # the thread that held it does not exist in the child


def _encoded(line: str) -> bytes:
    return f"{line}\n".encode(errors="backslashreplace")


def _may_block(stream: TextIO) -> bool:
    """Whether it is a pipe, a socket or a terminal, rather than a file or an object in memory."""
    try:
        return not stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError, AttributeError):
        return False

"""Counts how often any process opens a file, by inotify."""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path
from typing import Self

_OPENED, _CLOSED = 0x20, 0x08 | 0x10
_EVENT = struct.Struct("iIII")


class OpenWatch:
    """Watch of one file for the duration of a block."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._times = 0

    def __enter__(self) -> Self:
        libc = ctypes.CDLL(None, use_errno=True)
        self._events = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        # Together with the closings, two openings are never merged into one event.
        assert libc.inotify_add_watch(self._events, os.fsencode(self._path), _OPENED | _CLOSED) > 0
        return self

    def __exit__(self, *_error: object) -> None:
        os.close(self._events)

    def times(self) -> int:
        """Return how often it was opened since the block began."""
        try:
            found = os.read(self._events, 1 << 16)
        except BlockingIOError:
            return self._times
        self._times += sum(bool(mask & _OPENED) for _, mask, _, _ in _EVENT.iter_unpack(found))
        return self._times

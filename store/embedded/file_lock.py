"""Locks between processes of one machine, on open files: the kernel frees them however their holder ends."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Final

AGAIN_S: Final = 0.02


def open_lock(path: Path) -> int:
    """Open a lock file, and create it if it is missing; return its descriptor."""
    return os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def lock_alone(handle: int, timeout_s: float) -> None:
    """Lock an open file or directory against all other processes, blocking.

    Raises:
        TimeoutError: another process had it locked for `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError from None
            time.sleep(AGAIN_S)

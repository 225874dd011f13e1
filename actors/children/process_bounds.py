"""The bounds of a body's process: its memory, and what a function leaves behind in it."""

from __future__ import annotations

import os
import resource
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal

EXPENDABLE: Final = 500
"""What is added to `oom_score_adj`: when memory runs out, a body ends before the service does."""

Left = Literal["processes", "threads"]


def leaves(known: set[threading.Thread]) -> Left | None:
    """What the function has left behind that goes on; threads that are `known` were there before it."""
    return (_leaves_processes() and "processes") or (_leaves_threads(known) and "threads") or None


def _leaves_processes() -> bool:
    """Whether processes go on; those that have ended are taken away.

    All that the function has started are our children: this process is a subreaper.
    """
    try:
        while True:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                return True
    except ChildProcessError:
        return False


def _leaves_threads(known: set[threading.Thread]) -> bool:
    """Whether threads that the function has started go on: what they print would pass for the next job's."""
    return any(thread.is_alive() for thread in threading.enumerate() if thread not in known)


def limit(memory_mb: int | None) -> None:
    """Bound the memory that this process can write to and shares with none, and each that it starts."""
    if memory_mb is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_mb * 2**20,) * 2)
    with suppress(OSError), Path("/proc/self/oom_score_adj").open("r+b", buffering=0) as file:
        file.write(f"{min(int(file.read()) + EXPENDABLE, 1_000)}".encode())

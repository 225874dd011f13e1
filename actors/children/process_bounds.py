"""Limits of a handler's process: its memory, and processes or threads that a function leaves behind."""

from __future__ import annotations

import os
import resource
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal

EXPENDABLE: Final = 500
"""Amount added to `oom_score_adj`, so that a body ends before the service when memory runs out."""

Left = Literal["processes", "threads"]


def leaves(known: set[threading.Thread]) -> Left | None:
    """Return the kind of leftovers of the function that still run, if any; `known` threads existed before it."""
    return (_leaves_processes() and "processes") or (_leaves_threads(known) and "threads") or None


def _leaves_processes() -> bool:
    """Return whether child processes still run, and reap the ended ones.

    All processes that the function has started are our children: this process is a subreaper.
    """
    try:
        while True:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                return True
    except ChildProcessError:
        return False


def _leaves_threads(known: set[threading.Thread]) -> bool:
    """Return whether threads of the function still run; their output would appear as the next job's."""
    return any(thread.is_alive() for thread in threading.enumerate() if thread not in known)


def limit(memory_mb: int | None) -> None:
    """Limit the private writable memory of this process and of each that it starts to `memory_mb`, if given.

    It also raises `oom_score_adj`: see `EXPENDABLE`.
    """
    if memory_mb is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_mb * 2**20,) * 2)
    with suppress(OSError), Path("/proc/self/oom_score_adj").open("r+b", buffering=0) as file:
        file.write(f"{min(int(file.read()) + EXPENDABLE, 1_000)}".encode())

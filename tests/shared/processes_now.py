"""State of a process in the kernel."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def stat_of(pid):
    """Return the fields of its `stat` from the state on. Raises `OSError` if it does not exist."""
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()


def children_of(pid):
    """Return the command lines of the processes that it has started."""
    started = []
    for tasks in Path(f"/proc/{pid}/task").iterdir():
        for child in (tasks / "children").read_text().split():
            with suppress(OSError):
                started.append(Path(f"/proc/{child}/cmdline").read_text().split("\0"))
    return started


def is_alive(pid):
    """Return True if it runs; a zombie does not."""
    try:
        return stat_of(pid)[0] not in {b"Z", b"X"}
    except OSError:
        return False

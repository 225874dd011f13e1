"""What the kernel says of a process now."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def stat_of(pid):
    """The fields of its `stat` from the state on. Raises `OSError` for one that has gone."""
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()


def children_of(pid):
    """The command lines of the processes that it has started."""
    started = []
    for tasks in Path(f"/proc/{pid}/task").iterdir():
        for child in (tasks / "children").read_text().split():
            with suppress(OSError):
                started.append(Path(f"/proc/{child}/cmdline").read_text().split("\0"))
    return started


def is_alive(pid):
    """Whether it runs; one that has ended and is not yet reaped does not."""
    try:
        return stat_of(pid)[0] not in {b"Z", b"X"}
    except OSError:
        return False

"""Finds and kills the processes of a child whose guard does not do it.

While the guard lives, though it be stopped, all that the body has started descends from it, whatever sessions and
environments those have: body and guard are subreapers. Of a dead guard's, those are found that have the mark in their
environment, or the body's session. A process that has neither is not found: it is process 1's child then, and nothing
tells whose it was.
"""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

MARK: Final = "DATALOADER_CHILD"
"""The variable that all processes of a child inherit."""


def kill_descendants(guard: int) -> int:
    """Kill every process that descends from this guard; return how many there were. Blocks: for a thread."""
    children = defaultdict(list)
    for pid in _processes():
        with suppress(OSError):
            children[_stat(pid)[1]].append(pid)
    family = [guard]
    for one in family:
        family += children[one]
    return sum(_kill(pid, lambda pid: _lives(pid) and _stat(pid)[1] in family) for pid in family[1:])


def kill_left_behind(mark: str, body: int) -> int:
    """Kill every process of the child with this mark and body; return how many there were. Blocks: for a thread."""
    return sum(_kill(pid, lambda pid: _is_of(pid, mark, body)) for pid in _processes())


def _kill(pid: int, is_one: Callable[[int], bool]) -> bool:
    """Kill a process, if it is one; whether it was."""
    with suppress(OSError):
        if is_one(pid):
            process = os.pidfd_open(pid)
            try:
                # Again, for this process: its number may have been another's before.
                if is_one(pid):
                    with suppress(PermissionError):  # another user's, as `sudo` makes it: its end is waited for
                        signal.pidfd_send_signal(process, signal.SIGKILL)
                    return True
            finally:
                os.close(process)
    return False


def _processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _stat(pid: int) -> tuple[bytes, int, int]:
    """The state, the parent and the session of a process. Raises `OSError` if it is gone."""
    state, parent, _, session = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[:4]
    return state, int(parent), int(session)


def _lives(pid: int) -> bool:
    return _stat(pid)[0] not in {b"Z", b"X"}


def _is_of(pid: int, mark: str, body: int) -> bool:
    if not _lives(pid):
        return False
    mine = body > 0 and _stat(pid)[2] == body
    return mine or f"{MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")

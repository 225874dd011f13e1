"""Cleanup after a dead guard: kills the child's processes, found by a mark in their environment or by session.

A living guard does this better, so this is only for a dead one. A process that has overwritten its environment and
created its own session is not found.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Final

MARK: Final = "DATALOADER_CHILD"
"""Environment variable that all processes of a child inherit."""


def kill_left_behind(mark: str, body: int) -> int:
    """Kill every process that has this mark or is in the session of `body`; return their number. Blocks."""
    killed = 0
    for pid in [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]:
        if _is_of(pid, mark, body):
            with suppress(OSError):
                process = os.pidfd_open(pid)
                try:
                    # Check again with the pidfd open: before, the number may have been another process's.
                    if _is_of(pid, mark, body):
                        killed += 1  # another user's too, as with `sudo`: the caller waits for its end
                        signal.pidfd_send_signal(process, signal.SIGKILL)
                finally:
                    os.close(process)
    return killed


def _is_of(pid: int, mark: str, body: int) -> bool:
    folder = Path(f"/proc/{pid}")
    try:
        state, _, _, session = folder.joinpath("stat").read_bytes().rpartition(b")")[2].split()[:4]
        if state in {b"Z", b"X"}:
            return False
        mine = body > 0 and int(session) == body
        return mine or f"{MARK}={mark}".encode() in folder.joinpath("environ").read_bytes().split(b"\0")
    except OSError:
        return False

"""Finds and kills the processes of a child whose guard is dead: by the mark in their environment, or by their session.

Only then: a guard that lives does it better. A process that has overwritten its environment and made a session of its
own is not found.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Final

MARK: Final = "DATALOADER_CHILD"
"""The variable that all processes of a child inherit."""


def kill_left_behind(mark: str, body: int) -> int:
    """Kill every process of the child with this mark and body; return how many there were. Blocks: for a thread."""
    killed = 0
    for pid in [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]:
        if _is_of(pid, mark, body):
            with suppress(OSError):
                process = os.pidfd_open(pid)
                try:
                    # Again, for this process: its number may have been another's before.
                    if _is_of(pid, mark, body):
                        killed += 1  # also another user's, as `sudo` makes it: its end is waited for
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

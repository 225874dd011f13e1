"""The server's CPU time, which other work on the machine disturbs less than the clock."""

from __future__ import annotations

import contextlib

import psutil  # type: ignore[import-untyped]


def cpu_s(pid: int) -> float:
    """Seconds that a process and all its children have used, those that have ended, too."""
    process = psutil.Process(pid)
    total = sum(process.cpu_times()[:4])
    for child in process.children():
        with contextlib.suppress(psutil.NoSuchProcess):
            total += sum(child.cpu_times()[:2])
    return float(total)

"""CPU time of the server, which other work on the machine disturbs less than wall-clock time."""

from __future__ import annotations

import contextlib

import psutil  # type: ignore[import-untyped]


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process and all its children, including ended ones."""
    process = psutil.Process(pid)
    total = sum(process.cpu_times()[:4])
    for child in process.children():
        with contextlib.suppress(psutil.NoSuchProcess):
            total += sum(child.cpu_times()[:2])
    return float(total)

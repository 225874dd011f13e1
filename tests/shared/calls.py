"""Calls of a module's functions, counted by Python's profiler, as a measure of work on any machine."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType


@contextmanager
def counted_calls(module: ModuleType) -> Iterator[Counter[str]]:
    """Count the calls of each function of a module in this thread. Each value of a generator counts as a call."""
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _arg: object) -> None:
        if event == "call" and frame.f_code.co_filename == module.__file__:
            calls[frame.f_code.co_name] += 1

    former = sys.getprofile()
    sys.setprofile(count)
    try:
        yield calls
    finally:
        sys.setprofile(former)

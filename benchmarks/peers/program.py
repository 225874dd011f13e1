"""An adaptor's worker or feeder as a child process: its event lines by kind, its CPU and memory, its end."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import psutil  # type: ignore[import-untyped]

Event = dict[str, Any]


class Program:
    """Running adaptor in a separate process group. Leaving the block kills it, as a crash would."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], stderr: Path) -> None:
        with stderr.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        self._inspected = psutil.Process(self._process.pid)
        self._events: defaultdict[str, queue.SimpleQueue[Event]] = defaultdict(queue.SimpleQueue)
        self._stderr = stderr
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(b"{"):
                event = json.loads(line)
                self._events[event["ev"]].put(event)

    def get(self, kind: str, timeout_s: float) -> Event | None:
        """Return the next event of a kind, or None after `timeout_s`."""
        try:
            return self._events[kind].get(timeout=max(timeout_s, 0.001))
        except queue.Empty:
            return None

    def wait(self, kind: str, timeout_s: float = 60) -> Event:
        """Return the next event of a kind. Raises `RuntimeError` if there is none in time."""
        event = self.get(kind, timeout_s)
        if event is None:
            status = self._process.poll()
            raise RuntimeError(f"no event {kind!r} in {timeout_s:g} s (exit status {status}); see {self._stderr}")
        return event

    def gathered(self, kind: str) -> list[Event]:
        """Return the received events of a kind that were not taken."""
        events = []
        with contextlib.suppress(queue.Empty):
            while True:
                events.append(self._events[kind].get_nowait())
        return events

    def write(self, text: str) -> None:
        """Write a line to its stdin."""
        assert self._process.stdin is not None
        self._process.stdin.write(text.encode())
        self._process.stdin.flush()

    def cpu_s(self) -> float:
        """Return the CPU seconds used so far."""
        times = self._inspected.cpu_times()
        return float(times.user + times.system)

    def rss_mib(self) -> float:
        """Return the resident memory in MiB."""
        return float(self._inspected.memory_info().rss / 2**20)

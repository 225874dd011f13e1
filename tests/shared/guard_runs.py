"""Runs of pytest for the guards' tests, each in a fork of one process that has imported pytest and the product.

The imports take longer than most of these tests. The process imports, forks and waits. No test runs in it, and it has
one thread. test_broken_builds.py starts it, and requests a run with a line of JSON.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BOUND_S = 400
PR_SET_CHILD_SUBREAPER = 36


class GuardRuns:
    """Client of the forking process."""

    def __init__(self) -> None:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COVERAGE"))}
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            cwd=ROOT,
            env=inherited,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, output: Path) -> int:
        """Run pytest with these arguments, and return its exit code. Its output goes to a file."""
        print(json.dumps([arguments, str(output)]), file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        self._process.stdin.close()
        self._process.wait(timeout=20)
        self._process.stdout.close()


def serve() -> None:
    """Fork for each line of the input, and answer with the exit code."""
    # It imports all plugins and tests/conftest.py, as each run does before it takes its guard out.
    with contextlib.redirect_stdout(io.StringIO()):
        pytest.main(["--help"])
    assert os.listdir("/proc/self/task") == [str(os.getpid())]  # noqa: PTH208 - a fork copies only the current thread
    # Without its guard a test may leave daemons behind, which become children of this process.
    assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    for line in sys.stdin:
        arguments, output = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _redirect(output)
            sys.exit(pytest.main(arguments))
        code = _exit_code(pid)
        _end_children()
        sys.stdout.write(f"{code}\n")
        sys.stdout.flush()


def _redirect(output: str) -> None:
    with open(os.devnull) as nothing, open(output, "w") as file:  # noqa: PTH123
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def _exit_code(run: int) -> int:
    signal.signal(signal.SIGALRM, lambda *_: os.kill(run, signal.SIGKILL))
    signal.alarm(BOUND_S)
    try:
        while (ended := os.wait())[0] != run:
            pass
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    return os.waitstatus_to_exitcode(ended[1])


def _end_children() -> None:
    """Kill the processes that a run has left behind, then the children of each."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while left := children.read_text().split():
        for pid in map(int, left):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


if __name__ == "__main__":
    serve()

"""A service that is process 1, as in a container: it passes signals on, and no ended process remains."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from conditions import until

NAMESPACE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("unshare") is None
        or subprocess.run([*NAMESPACE, "true"], check=False, capture_output=True).returncode,
        reason="a namespace of processes needs root",
    ),
]


def children_of(parent):
    """Return the children of a process, including ended ones without a wait."""
    found = set()
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            if int((entry / "stat").read_bytes().rpartition(b")")[2].split()[1]) == parent:
                found.add(int(entry.name))
    return found


async def test_orphans_of_a_service_that_is_process_1_do_not_stay_as_zombies(serve, add, counts, raw):
    service = await serve({"q": 2}, tasks="child_tasks:tasks", launcher=NAMESPACE)
    [first] = children_of(service.process.pid)
    seen = set()

    async def orphan():
        seen.update(children_of(first))
        return len(seen) > 1

    for _ in range(3):
        await add("orphans")
    await add("noop")
    await until(orphan)
    await until(counts, lambda now: now == {"succeeded": 4})

    async def only_the_service_is_left():
        return len(children_of(first)) == 1

    await until(only_the_service_is_left)
    os.kill(first, signal.SIGTERM)
    assert await service.exit_code(within_s=30) == 0
    assert await raw.fetchval("SELECT count(*) FROM dl_jobs WHERE claimed_by IS NOT NULL AND status = 'running'") == 0


async def test_a_service_below_process_1_that_is_killed_ends_it_with_the_signals_exit_code(serve):
    service = await serve(launcher=NAMESPACE)
    [first] = children_of(service.process.pid)
    [below] = children_of(first)
    os.kill(below, signal.SIGKILL)
    assert await service.exit_code(within_s=20) == 128 + signal.SIGKILL

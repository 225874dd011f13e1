"""One and two processes of the operating system that run the same backlog, of jobs and of calls.

    DSN=… python -m benchmarks.processes.replicas

runs one of them: it reports that it is ready, begins when a line comes, and ends when its stdin does.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any, Final

import psycopg
import trio

from benchmarks.processes.drains import settings
from benchmarks.processes.measured_types import tasks
from dataloader import configure_logging, open_supervisor

TIMEOUT_S: Final = 180
END_S: Final = 30


def rate_of(connection: psycopg.Connection[Any], dsn: str, number: int, ended: str) -> float:
    """Return jobs or steps per second of `number` processes; `ended` is the query for their count and seconds."""
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.processes.replicas"],
            env=os.environ | {"DSN": dsn},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for _ in range(number)
    ]
    try:
        for child in children:
            assert child.stdout is not None
            child.stdout.readline()
        for child in children:
            assert child.stdin is not None
            child.stdin.write(b"go\n")
            child.stdin.flush()
        until = time.monotonic() + TIMEOUT_S
        while _is_anything_left(connection):
            if time.monotonic() > until:
                raise RuntimeError(f"{number} processes have not run all in {TIMEOUT_S} s")
            time.sleep(0.05)
    finally:
        for child in children:
            assert child.stdin is not None
            child.stdin.close()
        for child in children:
            try:
                child.wait(END_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
    done, seconds = connection.execute(ended.encode()).fetchone() or (0, 1.0)
    return float(done / seconds)


def _is_anything_left(connection: psycopg.Connection[Any]) -> bool:
    row = connection.execute(
        "SELECT EXISTS (SELECT FROM dl_jobs WHERE status = 'running' OR status = 'queued' AND waits_for IS NULL)"
    ).fetchone()
    return row is None or bool(row[0])


async def _run() -> None:
    print("there", flush=True)
    await trio.to_thread.run_sync(sys.stdin.readline)
    async with open_supervisor(settings(os.environ["DSN"]), tasks, with_web=False):
        await trio.to_thread.run_sync(sys.stdin.read)


if __name__ == "__main__":
    configure_logging(level="warning")
    trio.run(_run)

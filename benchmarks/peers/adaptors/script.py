"""Common part of the adaptors: their command line, their event lines, and the body of every job.

An adaptor is a program for one tool with the commands setup, load, enqueue-one, enqueue-bulk, feed and worker. It
prints one JSON object per line on stdout. Times are CLOCK_MONOTONIC in nanoseconds, so that those of two processes can
be subtracted. The address of the database is in BENCH_DSN. This module must not depend on a tool.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator

DSN = os.environ.get("BENCH_DSN", "")
QUEUE = "bench"
now = time.monotonic_ns


def emit(**event: object) -> None:
    """Print one event, in one write, so that lines of threads are not mixed."""
    os.write(1, (json.dumps(event) + "\n").encode())


def arguments() -> argparse.Namespace:
    """Parse the command line of every adaptor."""
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["setup", "load", "enqueue-one", "enqueue-bulk", "feed", "worker"])
    parser.add_argument("--mode", default="default")
    parser.add_argument("--count", type=int, default=0, help="jobs to enqueue")
    parser.add_argument("--first", type=int, default=0, help="number of the first job")
    parser.add_argument("--delay", type=float, default=0, help="seconds until the jobs are due")
    parser.add_argument("--urgent", action="store_true", help="more urgent than an ordinary job")
    parser.add_argument("--key", default="", help="mutual-exclusion key; {n} in it is a job's number")
    parser.add_argument("--job", default="noop", choices=["noop", "report", "sleep"])
    parser.add_argument("--sleep", type=float, default=0)
    parser.add_argument("--concurrency", type=int, default=200)
    parser.add_argument("--target", type=int, default=0, help="say so after so many different jobs")
    parser.add_argument("--target-from", type=int, default=0, help="count only jobs numbered from here")
    parser.add_argument("--mark", type=int, default=0, help="say so after each so many different jobs")
    parser.add_argument("--url", default="", help="the worker's, if it serves HTTP")
    parser.add_argument("--no-queues", action="store_true", help="a worker that serves HTTP only")
    return parser.parse_args()


class Body:
    """Body of a job: counts runs by job number, reports, sleeps. Jobs below `--target-from` are the hot ones."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.sleep_s: float = options.sleep
        self._options = options
        self._seen: set[int] = set()
        self._hits = 0
        self._twice = 0
        self._hot_ended_at = 0
        self._hot_gaps: list[float] = []

    def begin(self, number: int) -> None:
        """Run the first line of the handler."""
        at = now()
        if not self._seen:
            emit(ev="first", t=at)
        if self._options.job != "noop":
            emit(ev="s", n=number, t=at)
        if number in self._seen:
            self._twice += 1
            return
        self._seen.add(number)
        if number < self._options.target_from:
            if self._hot_ended_at:
                self._hot_gaps.append((at - self._hot_ended_at) / 1e6)
            return
        self._hits += 1
        if self._options.mark and self._hits % self._options.mark == 0:
            emit(ev="mark", t=at, hits=self._hits)
        if self._hits == self._options.target:
            gap = statistics.median(self._hot_gaps) if self._hot_gaps else None
            emit(ev="ran", t=at, twice=self._twice, hot_gap_ms=gap)

    def end(self, number: int) -> None:
        """Run the last line of the handler."""
        if number < self._options.target_from:
            self._hot_ended_at = now()


def chunks(first: int, count: int, size: int = 1000) -> Iterator[range]:
    """Yield the numbers of `count` jobs, in calls of `size`."""
    for start in range(first, first + count, size):
        yield range(start, min(start + size, first + count))

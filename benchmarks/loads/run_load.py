"""A load as a contender, in its own process: runs it, and prints its seconds and megabytes."""

from __future__ import annotations

import os
import sys
import time

import trio

from benchmarks.loads.names import told
from dataloader import Tasks, configure_logging
from dataloader.__main__ import SWITCH_S
from dataloader.testing import run_task


def run_load(tasks: Tasks, name: str) -> None:
    """Run a load on the database of `DSN`."""
    configure_logging(level="warning")
    # As the command `dataloader` does.
    sys.setswitchinterval(SWITCH_S)
    began = time.perf_counter()
    outcome = trio.run(lambda: run_task(tasks, name, dsn=os.environ["DSN"]))
    took = time.perf_counter() - began
    if outcome.status != "succeeded":
        raise SystemExit(f"the load ended as {outcome.status}: {outcome.error}")
    print(told(took))

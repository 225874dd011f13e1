"""Rows of a generator by a load. Prints its seconds and megabytes.

DSN=… ROWS=… python -m benchmarks.loads.rows_load
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import trio

from benchmarks.loads.names import told
from benchmarks.loads.rows import orders
from dataloader import Tasks, configure_logging
from dataloader.__main__ import SWITCH_S
from dataloader.flows.etl import RowsRun, Table
from dataloader.testing import run_task

tasks = Tasks()


@tasks.load("orders", table=Table("customer_order", key="id"))
def load_orders(run: RowsRun) -> Iterator[dict[str, Any]]:
    """Load the rows."""
    del run
    return orders(int(os.environ["ROWS"]))


def main() -> None:
    configure_logging(level="warning")
    # As the command `dataloader` does.
    sys.setswitchinterval(SWITCH_S)
    began = time.perf_counter()
    outcome = trio.run(lambda: run_task(tasks, "orders", dsn=os.environ["DSN"]))
    took = time.perf_counter() - began
    if outcome.status != "succeeded":
        raise SystemExit(f"the load ended as {outcome.status}: {outcome.error}")
    print(told(took))


if __name__ == "__main__":
    main()

"""Rows of a generator by a load. Prints its seconds and megabytes.

DSN=… ROWS=… python -m benchmarks.loads.rows_load
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from benchmarks.loads.rows import orders
from benchmarks.loads.run_load import run_load
from dataloader import Tasks
from dataloader.flows.etl import RowsRun, Table

tasks = Tasks()


@tasks.load("orders", table=Table("customer_order", key="id"))
def load_orders(run: RowsRun) -> Iterator[dict[str, Any]]:
    """Load the rows."""
    del run
    return orders(int(os.environ["ROWS"]))


if __name__ == "__main__":
    run_load(tasks, "orders")

"""Rows of a generator by dlt, merged by key, with defaults otherwise. Prints its seconds and megabytes.

DSN=… ROWS=… WORK=… python -m benchmarks.loads.rows_dlt
"""

from __future__ import annotations

import os

import dlt

from benchmarks.loads.rows import orders
from benchmarks.loads.run_dlt import run_dlt

if __name__ == "__main__":
    run_dlt(
        "rows",
        lambda: dlt.resource(
            orders(int(os.environ["ROWS"])), name="customer_order", write_disposition="merge", primary_key="id"
        ),
    )

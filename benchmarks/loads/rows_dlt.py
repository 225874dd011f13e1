"""Rows of a generator by dlt, merged by key, with defaults otherwise. Prints its seconds and megabytes.

DSN=… ROWS=… WORK=… python -m benchmarks.loads.rows_dlt
"""

from __future__ import annotations

import os
import shutil
import time

import dlt

from benchmarks.loads.names import told
from benchmarks.loads.rows import orders


def main() -> None:
    shutil.rmtree(os.environ["WORK"], ignore_errors=True)
    began = time.perf_counter()
    pipeline = dlt.pipeline(
        "rows",
        pipelines_dir=os.environ["WORK"],
        # It requires a host name; the one behind it, a folder of sockets, is used.
        destination=dlt.destinations.postgres(os.environ["DSN"].replace("@/", "@localhost/")),
        dataset_name="by_dlt",
    )
    rows = dlt.resource(
        orders(int(os.environ["ROWS"])), name="customer_order", write_disposition="merge", primary_key="id"
    )
    pipeline.run(rows).raise_on_failed_jobs()
    print(told(time.perf_counter() - began))


if __name__ == "__main__":
    os.environ["RUNTIME__DLTHUB_TELEMETRY"] = "false"
    main()

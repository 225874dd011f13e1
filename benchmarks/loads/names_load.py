"""Names by a load. Prints its seconds and megabytes.

DSN=… ARCHIVE=… python -m benchmarks.loads.names_load
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import trio

from benchmarks.loads.names import told
from dataloader import Tasks, configure_logging
from dataloader.__main__ import SWITCH_S
from dataloader.flows.etl import Csv, Files, Load, Table, add_loads
from dataloader.testing import run_task


def with_year(row: dict[str, Any]) -> dict[str, Any]:
    return {"year": row["source_file"][-8:-4], "name": row["name"], "sex": row["sex"], "count": row["count"]}


def main() -> None:
    configure_logging(level="warning")
    # As the command `dataloader` does.
    sys.setswitchinterval(SWITCH_S)
    tasks = Tasks()
    load = Load(
        "names",
        Files(os.environ["ARCHIVE"], members="*.txt", format=Csv(columns=("name", "sex", "count"))),
        Table("name", key=("year", "name", "sex")),
        transform=with_year,
        pipeline={"rate_min": 0, "rate_max": 0},
    )
    add_loads(tasks, load)
    began = time.perf_counter()
    outcome = trio.run(lambda: run_task(tasks, "names", dsn=os.environ["DSN"]))
    took = time.perf_counter() - began
    if outcome.status != "succeeded":
        raise SystemExit(f"the load ended as {outcome.status}: {outcome.error}")
    print(told(took))


if __name__ == "__main__":
    main()

"""Names by a load. Prints its seconds and megabytes.

DSN=… ARCHIVE=… python -m benchmarks.loads.names_load
"""

from __future__ import annotations

import os
from typing import Any

from benchmarks.loads.run_load import run_load
from dataloader import Tasks
from dataloader.flows.etl import Csv, Files, Load, Table, add_loads


def with_year(row: dict[str, Any]) -> dict[str, Any]:
    return {"year": row["source_file"][-8:-4], "name": row["name"], "sex": row["sex"], "count": row["count"]}


def main() -> None:
    tasks = Tasks()
    load = Load(
        "names",
        Files(os.environ["ARCHIVE"], members="*.txt", format=Csv(columns=("name", "sex", "count"))),
        Table("name", key=("year", "name", "sex")),
        transform=with_year,
        pipeline={"rate_min": 0, "rate_max": 0},
    )
    add_loads(tasks, load)
    run_load(tasks, "names")


if __name__ == "__main__":
    main()

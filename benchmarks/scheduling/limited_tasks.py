"""Three tasks and a load that share a supplier; each run notes when its first line was reached.

The clock is the machine's. A line is one write, so that a killed process leaves only whole ones.
"""

from __future__ import annotations

import os
import random
import time
from datetime import date
from pathlib import Path
from typing import Any

import trio

from dataloader import Job, RateLimit, RetryPolicy, Supplier, Tasks
from dataloader.flows.etl import Http, Json, Load, Table, Window, Windows, add_loads

QUEUE = "limited"
PARTNER = Supplier("partner", rate_limits=(RateLimit(20, per_s=1), RateLimit(50, per_s=5)))
COSTS = {"one": 1, "other": 1, "dear": 3}
RETRY = RetryPolicy(base_s=0.1)
FIRST_DAY = date(1900, 1, 1)

tasks = Tasks()


def open_notes() -> int:
    path = Path(os.environ["SCHEDULING_FOLDER"], f"began-{os.getpid()}")
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


async def work(job: Job) -> None:
    """Wait briefly, as a request does."""
    os.write(NOTES, b"%.6f %s\n" % (time.monotonic(), job.task.encode()))
    await trio.sleep(random.uniform(0.01, 0.1))


def day_of(window: Window) -> dict[str, Any]:
    return {"day": f"{window.start:%Y-%m-%d}"}


if "SCHEDULING_FOLDER" in os.environ:
    NOTES = open_notes()
    for name, cost in COSTS.items():
        tasks.task(name, queue=QUEUE, supplier=PARTNER, cost=cost, retry=RETRY)(work)
    add_loads(
        tasks,
        Load(
            "fetch",
            Http(os.environ["SOURCE_URL"], name=PARTNER.name, endpoint="/items", params=day_of, format=Json("items")),
            Table("fetched", key="day"),
            windows=Windows(start=FIRST_DAY, segment="day"),
            pipeline={"rate_min": 0, "rate_max": 0, "request_timeout": 2},
        ),
    )

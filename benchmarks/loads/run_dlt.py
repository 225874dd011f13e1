"""dlt as a contender, in its own process: runs a pipeline, and prints its seconds and megabytes."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from typing import Any

import dlt

from benchmarks.loads.names import told


def run_dlt(name: str, resource: Callable[[], Any]) -> None:
    """Load what `resource` returns into the database of `DSN`, with the state of the pipeline in `WORK`."""
    os.environ["RUNTIME__DLTHUB_TELEMETRY"] = "false"
    shutil.rmtree(os.environ["WORK"], ignore_errors=True)
    began = time.perf_counter()
    pipeline = dlt.pipeline(
        name,
        pipelines_dir=os.environ["WORK"],
        # It requires a host name; the one behind it, a folder of sockets, is used.
        destination=dlt.destinations.postgres(os.environ["DSN"].replace("@/", "@localhost/")),
        dataset_name="by_dlt",
    )
    pipeline.run(resource()).raise_on_failed_jobs()
    print(told(time.perf_counter() - began))

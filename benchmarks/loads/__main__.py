"""What a pipeline costs on top of the work itself: a load against a plain script that does the same, in turns.

    python -m benchmarks.loads [--days 100] [--rows 1000] [--delay 0.05] [--runs 3]

A source without pauses answers after `delay` seconds with `rows` records for each of the days; both commit a day at a
time, on one durable server. The figure is the load's wall time as a multiple of the script's, the median of the runs.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date, timedelta
from pathlib import Path

import psycopg
import structlog
import trio

from dataloader import Tasks, embedded_postgres
from dataloader.flows.etl import Http, Json, Load, Target, Windows, add_loads
from dataloader.store.database import DatabaseOptions, open_database
from dataloader.store.migrations import migrate
from dataloader.testing import run_task

TABLES = """
DROP TABLE IF EXISTS item, plain_item;
CREATE TABLE item (day date, item text, amount numeric, note text, PRIMARY KEY (day, item));
CREATE TABLE plain_item (LIKE item INCLUDING ALL);
"""
BEGIN = date(2026, 1, 1)


def by_pipeline(url: str, dsn: str, days: int) -> float:
    tasks = Tasks()
    load = Load(
        name="items",
        source=Http(
            url, endpoint="/items", params=lambda window: {"day": f"{window.start:%Y-%m-%d}"}, format=Json("items")
        ),
        windows=Windows(start=BEGIN, segment="day"),
        target=Target(table="item", key=("day", "item")),
        pipeline={"rate_min": 0, "rate_max": 0, "batch_size": 1_000},
    )
    add_loads(tasks, load)
    asked = {"from": str(BEGIN), "to": str(BEGIN + timedelta(days=days))}
    began = time.perf_counter()
    outcome = trio.run(lambda: run_task(tasks, "items", asked, dsn=dsn))
    took = time.perf_counter() - began
    if outcome.status != "succeeded":
        raise SystemExit(f"the load ended as {outcome.status}: {outcome.error}")
    return took


def by_script(url: str, dsn: str, days: int) -> float:
    command = [sys.executable, "-m", "benchmarks.loads.plain", url, dsn, str(days)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout)


async def _migrate(dsn: str) -> None:
    async with open_database(DatabaseOptions(dsn=dsn)) as database:
        await migrate(database)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--days", type=int, default=100)
    parser.add_argument("--rows", type=int, default=1_000)
    parser.add_argument("--delay", type=float, default=0.05, metavar="SECONDS")
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    serve = [sys.executable, "-m", "benchmarks.loads.source", str(options.rows), str(options.delay)]
    ratios = []
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as directory,
        embedded_postgres(Path(directory)) as server,
        subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as source,
    ):
        try:
            assert source.stdout is not None
            url = source.stdout.readline().strip()
            trio.run(_migrate, server.dsn)
            for run in range(1, options.runs + 1):
                with psycopg.connect(server.dsn, autocommit=True) as connection:
                    connection.execute(TABLES)
                script_s, pipeline_s = (
                    by_script(url, server.dsn, options.days),
                    by_pipeline(url, server.dsn, options.days),
                )
                ratios.append(pipeline_s / script_s)
                print(f"run {run}: script {script_s:.2f} s, pipeline {pipeline_s:.2f} s: {ratios[-1]:.3f}", flush=True)
        finally:
            source.kill()
    rows = options.days * options.rows
    print(
        f"{rows:,} rows in {options.days} days: the pipeline takes {statistics.median(ratios):.3f} of the script's time"
    )


if __name__ == "__main__":
    main()

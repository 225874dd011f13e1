"""Cost of a pipeline in addition to the work itself: a load against a plain script that does the same, alternating.

A source without pauses answers after `DELAY_S` with `ROWS` records for each of the days; both commit one day at a time.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from datetime import date, timedelta
from pathlib import Path

import psycopg
import trio

from dataloader import Tasks
from dataloader.flows.etl import Http, Json, Load, Table, Windows, add_loads
from dataloader.store.embedded.postgres import EmbeddedPostgres
from dataloader.testing import run_task

TABLES = """
DROP TABLE IF EXISTS item, plain_item;
CREATE TABLE item (day date, item text, amount numeric, note text, PRIMARY KEY (day, item));
CREATE TABLE plain_item (LIKE item INCLUDING ALL);
"""
BEGIN = date(2026, 1, 1)
ROWS, DELAY_S = 1_000, 0.05


def by_pipeline(url: str, dsn: str, days: int) -> float:
    tasks = Tasks()
    load = Load(
        "items",
        Http(url, endpoint="/items", params=lambda window: {"day": f"{window.start:%Y-%m-%d}"}, format=Json("items")),
        Table("item", key=("day", "item")),
        windows=Windows(start=BEGIN, segment="day"),
        pipeline={"rate_min": 0, "rate_max": 0},
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
    command = [sys.executable, "-m", "benchmarks.loads.overhead_script", url, dsn, str(days)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout)


def measure(server: EmbeddedPostgres, _directory: Path, options: argparse.Namespace) -> None:
    """Print the load's duration as a share of the script's."""
    days = 10 if options.quick else 100
    serve = [sys.executable, "-m", "benchmarks.loads.overhead_source", str(ROWS), str(DELAY_S)]
    ratios = []
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as source:
        try:
            assert source.stdout is not None
            url = source.stdout.readline().strip()
            for run in range(1, options.runs + 1):
                with psycopg.connect(server.dsn, autocommit=True) as connection:
                    connection.execute(TABLES)
                script_s, pipeline_s = by_script(url, server.dsn, days), by_pipeline(url, server.dsn, days)
                ratios.append(pipeline_s / script_s)
                print(f"run {run}: script {script_s:.2f} s, pipeline {pipeline_s:.2f} s: {ratios[-1]:.3f}", flush=True)
        finally:
            source.kill()
    took = statistics.median(ratios)
    print(f"overhead: {days * ROWS:,} rows in {days} days: the pipeline takes {took:.3f} of the script's time")

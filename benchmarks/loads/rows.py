"""Rows of a generator into a table with a key: by a load, and by dlt if it is installed.

Both get the same generator of dictionaries with six columns. The load begins with an empty table, then runs again with
the same rows, which are unchanged then. dlt merges by the key once with its defaults. Each contender is a separate
process, which prints the duration of its work, without its imports, and its peak memory.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg

from benchmarks.loads.names import timed
from dataloader.store.embedded.postgres import EmbeddedPostgres

ROWS = 1_000_000
TABLES = """
DROP TABLE IF EXISTS customer_order;
CREATE TABLE customer_order (
  id bigint PRIMARY KEY, customer text, amount float, quantity int, is_paid boolean, created_at timestamptz);
DROP SCHEMA IF EXISTS by_dlt CASCADE;
DROP SCHEMA IF EXISTS by_dlt_staging CASCADE;
"""
LOAD, AGAIN, DLT = "load", "load again, the same rows", "dlt"
WRITTEN = {LOAD: "customer_order", AGAIN: "customer_order", DLT: "by_dlt.customer_order"}
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


def orders(number: int) -> Iterator[dict[str, Any]]:
    """Yield rows with six columns."""
    for n in range(number):
        yield {
            "id": n,
            "customer": f"customer {n % 9_973}",
            "amount": n / 7,
            "quantity": n % 13,
            "is_paid": n % 3 == 0,
            "created_at": BEGIN + timedelta(seconds=n),
        }


def measure(server: EmbeddedPostgres, directory: Path, options: argparse.Namespace) -> None:
    """Print rows per second and memory of each, and our ratio to dlt."""
    rows = ROWS // 10 if options.quick else ROWS
    environment = {**os.environ, "DSN": server.dsn, "ROWS": str(rows), "WORK": str(directory / "dlt-rows")}
    load = [sys.executable, "-m", "benchmarks.loads.rows_load"]
    commands = {LOAD: load, AGAIN: load}
    if importlib.util.find_spec("dlt") is not None:
        commands[DLT] = [sys.executable, "-m", "benchmarks.loads.rows_dlt"]
    figures: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for run in range(1, options.runs + 1):
        with psycopg.connect(server.dsn, autocommit=True) as connection:
            connection.execute(TABLES)
        for name, command in commands.items():
            took_s, peak_mb = timed(command, environment)
            with psycopg.connect(server.dsn) as connection:
                query = f"SELECT count(*), sum(id)::bigint FROM {WRITTEN[name]}"
                written = connection.execute(query).fetchone()
            if written != (rows, rows * (rows - 1) // 2):
                raise SystemExit(f"{name} has written {written}, not the IDs from 0 to {rows - 1}")
            figures[name].append((rows / took_s, peak_mb))
            print(f"run {run}: {name}: {took_s:.2f} s, {rows / took_s:,.0f} rows/s, {peak_mb:.0f} MB", flush=True)
    medians = {name: tuple(map(statistics.median, zip(*pairs, strict=True))) for name, pairs in figures.items()}
    for name, (rate, peak) in medians.items():
        print(f"rows, {name}: {rate:,.0f} rows/s, {peak:.0f} MB")
    if DLT in medians:
        (rate, peak), (dlt_rate, dlt_peak) = medians[LOAD], medians[DLT]
        print(f"rows, a load: {rate / dlt_rate:.2f} of dlt's rows/s in {peak / dlt_peak:.2f} of its memory")
    else:
        print("rows: dlt is not installed, so it was not measured")

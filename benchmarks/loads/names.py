"""26 files of names, merged into a table by key: by a load, by dlt, and by psql with one COPY and one statement.

Each contender is a separate process, which prints the duration of its work, without its imports, and its peak memory.
psql gets one plain file with the years in it, which is created before, and is timed from outside.
"""

from __future__ import annotations

import argparse
import csv
import io
import math
import os
import random
import statistics
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import psycopg

from dataloader.store.embedded.postgres import EmbeddedPostgres

COLUMNS = "year int, name text, sex text, count int"
TABLES = f"""
DROP TABLE IF EXISTS name, plain_name;
CREATE TABLE name ({COLUMNS}, PRIMARY KEY (year, name, sex));
CREATE TABLE plain_name ({COLUMNS}, PRIMARY KEY (year, name, sex));
DROP SCHEMA IF EXISTS by_dlt CASCADE;
DROP SCHEMA IF EXISTS by_dlt_staging CASCADE;
"""
BY_PSQL = """
CREATE TEMP TABLE incoming (LIKE plain_name);
\\copy incoming FROM '{file}' CSV
INSERT INTO plain_name AS t SELECT * FROM incoming
ON CONFLICT (year, name, sex) DO UPDATE SET count = excluded.count WHERE t.count IS DISTINCT FROM excluded.count;
"""
LOAD, DLT, PSQL = "load", "dlt", "psql"
CONTENDERS = {
    LOAD: [sys.executable, "-m", "benchmarks.loads.names_load"],
    DLT: [sys.executable, "-m", "benchmarks.loads.names_dlt"],
}
WRITTEN = {LOAD: "name", DLT: "by_dlt.name", PSQL: "plain_name"}
YEARS = range(1998, 2024)


def measure(server: EmbeddedPostgres, directory: Path, options: argparse.Namespace) -> None:
    """Print rows per second and memory of each, and our ratios to the others."""
    archive = options.file or directory / "names.tar.xz"
    if options.file is None:
        make(archive, 3_233 if options.quick else 32_330)
    plain = directory / "names.csv"
    rows, total = unpack(archive, plain)
    environment = {"DSN": server.dsn, "ARCHIVE": str(archive), "WORK": str(directory / "dlt")}
    script = directory / "merge.sql"
    script.write_text(BY_PSQL.format(file=plain))
    psql, secrets = server.psql("--no-psqlrc", "--quiet", "--set", "ON_ERROR_STOP=1", "--file", str(script))
    commands = {**CONTENDERS, PSQL: psql}
    figures: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for run in range(1, options.runs + 1):
        for name, command in commands.items():
            with psycopg.connect(server.dsn, autocommit=True) as connection:
                connection.execute(TABLES)
            took_s, peak_mb = timed(command, {**os.environ, **environment, **secrets})
            with psycopg.connect(server.dsn) as connection:
                query = f"SELECT count(*), sum(count) FROM {WRITTEN[name]}"
                written = connection.execute(query).fetchone()
            if written != (rows, total):
                raise SystemExit(f"{name} has written {written}, not {rows} rows with {total} in all")
            figures[name].append((rows / took_s, peak_mb))
            print(f"run {run}: {name}: {took_s:.2f} s, {rows / took_s:,.0f} rows/s, {peak_mb:.0f} MB", flush=True)
    medians = {name: tuple(map(statistics.median, zip(*pairs, strict=True))) for name, pairs in figures.items()}
    rate, peak = medians[LOAD]
    print(
        f"names, a load: {rate / medians[DLT][0]:.2f} of dlt's rows/s"
        f" in {peak / medians[DLT][1]:.2f} of its memory; {rate / medians[PSQL][0]:.2f} of psql's rows/s"
    )


def timed(command: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """Return seconds and megabytes from a command's output, or the measured seconds without memory if it has none."""
    began = time.perf_counter()
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=900)
    took_s = time.perf_counter() - began
    match done.stdout.split():
        case [*_, seconds, megabytes]:
            return float(seconds), float(megabytes)
        case _:
            return took_s, math.nan


def told(took_s: float) -> str:
    """Return a contender's output: its seconds, and its peak memory since its start (not its parent's)."""
    [peak] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return f"{took_s} {int(peak.split()[1]) / 1024}"


def unpack(archive: Path, plain: Path) -> tuple[int, int]:
    """Write all files of the archive into one, with the year of each.

    Return the number of rows and the sum of counts.
    """
    rows = total = 0
    with tarfile.open(archive) as files, plain.open("w", newline="") as out:
        writer = csv.writer(out, lineterminator="\n")
        for member in files:
            file = files.extractfile(member)
            if file is None:
                continue
            for name, sex, count in csv.reader(io.TextIOWrapper(file, "utf-8", newline="")):
                writer.writerow((member.name[-8:-4], name, sex, count))
                rows += 1
                total += int(count)
    return rows, total


def make(archive: Path, rows: int) -> None:
    """Create an archive with `rows` names per year, of two to five syllables, once per year and sex, mostly rare."""
    draw = random.Random(1880)
    syllables = [first + vowel for first in "bcdfghjklmnprstvwz" for vowel in "aeiou"]
    with tarfile.open(archive, "w:xz") as files:
        for year in YEARS:
            known: set[tuple[str, str]] = set()
            while len(known) < rows:
                name = "".join(draw.choices(syllables, k=draw.randint(2, 5))).capitalize()
                known.add((name, draw.choice("FFFMM")))
            lines = "".join(f"{name},{sex},{5 + int(draw.paretovariate(0.9))}\n" for name, sex in sorted(known))
            info = tarfile.TarInfo(f"yob{year}.txt")
            info.size = len(lines)
            files.addfile(info, io.BytesIO(lines.encode()))

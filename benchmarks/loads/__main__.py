"""Durations of loads, compared with other ways to do the same work, in one run on one durable PostgreSQL.

    python -m benchmarks.loads [overhead] [names] [heavy] [rows] [--runs 3] [--file ARCHIVE] [--quick]

`overhead`: the cost of a pipeline in addition to the work itself: a load from a source without pauses against a plain
script that does the same. `names`: 26 files of an archive, 840,591 rows, merged by key, against dlt and against psql.
Without `--file` the archive is generated, in the form of the U.S. Social Security Administration's first names.
`rows`: 1,000,000 dictionaries of a generator into a table with a key, by a load and, if it is installed, by dlt.

Each figure is the median of the runs; contenders alternate within each.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import trio

from benchmarks.loads import heavy, names, overhead, rows
from dataloader import configure_logging, embedded_postgres
from dataloader.store.connection.bridge import open_database
from dataloader.store.connection.options import DatabaseOptions
from dataloader.store.migrations import migrate

MEASUREMENTS = {"overhead": overhead.measure, "names": names.measure, "heavy": heavy.measure, "rows": rows.measure}


async def _migrate(dsn: str) -> None:
    async with open_database(DatabaseOptions(dsn=dsn)) as database:
        await migrate(database)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurements", nargs="*", metavar="MEASUREMENT", help=f"of {', '.join(MEASUREMENTS)}; all")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--file", type=Path, help="an archive of yobYYYY.txt files")
    parser.add_argument("--quick", action="store_true", help="a tenth of the work, for a look at the benchmark itself")
    options = parser.parse_args()
    for name in options.measurements:
        if name not in MEASUREMENTS:
            parser.error(f"{name!r} is not allowed; {', '.join(MEASUREMENTS)}")
    configure_logging(level="warning")
    with tempfile.TemporaryDirectory(prefix="bench-") as directory, embedded_postgres(Path(directory, "pg")) as server:
        trio.run(_migrate, server.dsn)
        for name in options.measurements or MEASUREMENTS:
            MEASUREMENTS[name](server, Path(directory), options)


if __name__ == "__main__":
    main()

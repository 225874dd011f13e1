"""Durable processes: their cost compared with the queue's own jobs and with DBOS, in one table.

    python -m benchmarks.processes [rates] [dbos] [asleep] [million] [events] [callers] [replicas] [--json] [--quick]

`rates`: steps and calls compared with no-op jobs. `dbos`: the same compared with DBOS, which is installed into a
separate virtual environment, and round trips. `asleep`: beside 100,000 timers, and when they are due. `million`: calls
and searches in 1,000,000 processes, and their size. `events`: a process of 100,000 events. `callers`: 64 of one
process. `replicas`: a second process of the operating system.

All run on one embedded PostgreSQL with full durability. Each figure is a ratio of alternating measurements. A missed
bar is only reported: figures of a busy machine prove nothing. The exit status is 1 if a measurement failed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import attrs

from benchmarks.peers.progress import say
from benchmarks.processes.bars import FULL, MEASUREMENTS, QUICK, measure
from benchmarks.scheduling.reached import Reached, table
from dataloader import configure_logging, embedded_postgres


def main() -> None:
    options = _options()
    configure_logging(level="warning")
    sizes = QUICK if options.quick else FULL
    if options.rounds:
        sizes = attrs.evolve(sizes, rounds=options.rounds)
    with tempfile.TemporaryDirectory(prefix="processes-") as directory, embedded_postgres(Path(directory)) as server:
        lines, failed = measure(server, options.measurements or MEASUREMENTS, sizes)
    print(_json(lines) if options.json else table(lines))
    if failed:
        say(f"failed: {', '.join(failed)}")
    sys.exit(bool(failed))


def _json(lines: Sequence[Reached]) -> str:
    """Return the lines as JSON; a missing bar is null."""
    rows = [attrs.asdict(line) | {"is_good": line.is_good} for line in lines]
    return json.dumps(
        [{name: None if value in {math.inf, -math.inf} else value for name, value in row.items()} for row in rows],
        indent=2,
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.processes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("measurements", nargs="*", metavar="MEASUREMENT", help=f"of {', '.join(MEASUREMENTS)}; all")
    parser.add_argument("--rounds", type=int, help="turns of each measurement (default: 3; with --quick 1)")
    parser.add_argument("--json", action="store_true", help="what the table shows, for machines")
    parser.add_argument("--quick", action="store_true", help="less of everything: for a look")
    options = parser.parse_args()
    for name in options.measurements:
        if name not in MEASUREMENTS:
            parser.error(f"{name!r} is not allowed; {', '.join(MEASUREMENTS)}")
    return options


if __name__ == "__main__":
    main()

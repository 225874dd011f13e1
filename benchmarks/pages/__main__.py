"""Budgets of the admin pages: size and duration, with ten million ended jobs, and beside a drain; one table.

    python -m benchmarks.pages [weight] [history] [open] [--ended 10000000] [--out FOLDER] [--quick]

`weight`: bytes, statements, and the first paint in Chromium, cold and warm. `history`: the p95 of each page with
`--ended` jobs in the table. `open`: a drain with fifty open pages, as plain HTTP clients, and without, alternating.

Each runs on an embedded PostgreSQL with full durability. The exit status is 1 if a page cannot be shown. A missed
budget is only reported: figures of a busy machine prove nothing.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks.pages import history, open_pages, weight
from benchmarks.peers.progress import say
from benchmarks.scheduling.reached import Reached, table
from dataloader import configure_logging, embedded_postgres

MEASUREMENTS = ("weight", "history", "open")


def main() -> None:
    options = _options()
    configure_logging(level="warning")
    options.out.mkdir(parents=True, exist_ok=True)
    say(f"logs go to {options.out}")
    lines: list[Reached] = []
    with tempfile.TemporaryDirectory(prefix="pages-") as directory, embedded_postgres(Path(directory)) as server:
        for name in options.measurements or MEASUREMENTS:
            say(name)
            if name == "weight":
                lines += weight.measure(server, options.out)
            elif name == "history":
                lines += history.measure(server, options.out, options.ended)
            else:
                lines += open_pages.measure(server, options.out, quick=options.quick)
    print(table(lines))
    sys.exit(any(line.promise and not line.is_good for line in lines))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pages",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("measurements", nargs="*", metavar="MEASUREMENT", help=f"of {', '.join(MEASUREMENTS)}; all")
    parser.add_argument("--ended", type=int, help="jobs that have ended (default: 10,000,000; with --quick 200,000)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="of logs; a temporary one by default")
    parser.add_argument("--quick", action="store_true", help="less work: for a look")
    options = parser.parse_args()
    for name in options.measurements:
        if name not in MEASUREMENTS:
            parser.error(f"{name!r} is not allowed; {', '.join(MEASUREMENTS)}")
    options.ended = options.ended or (200_000 if options.quick else 10_000_000)
    options.out = options.out or Path(tempfile.mkdtemp(prefix="bench-pages-"))
    return options


if __name__ == "__main__":
    main()

"""Schedules and limits: their guarantees while processes are killed, and their cost, in one table.

    python -m benchmarks.scheduling [rate_limits] [planned] [ratios] [--seconds 180] [--seed N] [--out FOLDER] [--quick]

`rate_limits`: four processes of `dataloader serve` and one supplier that three tasks and a load share; with kills for
`--seconds`, and without for a third of that. `planned`: 1,000 schedules, two processes that are killed, half of the
schedules paused for an hour. `ratios`: the cost for work that does not use them, and their own cost.

Each runs on an embedded PostgreSQL with full durability. The exit status is 1 if a guarantee is broken. A missed bar is
only reported: figures of a busy machine prove nothing.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks.peers.progress import say
from benchmarks.scheduling import limited_kills, planned_kills, ratios
from benchmarks.scheduling.reached import Reached, table
from dataloader import configure_logging, embedded_postgres

MEASUREMENTS = ("rate_limits", "planned", "ratios")


def main() -> None:
    options = _options()
    configure_logging(level="warning")
    options.out.mkdir(parents=True, exist_ok=True)
    say(f"notes and logs go to {options.out}")
    lines: list[Reached] = []
    with tempfile.TemporaryDirectory(prefix="scheduling-") as directory, embedded_postgres(Path(directory)) as server:
        for name in options.measurements or MEASUREMENTS:
            say(name)
            if name == "rate_limits":
                lines += limited_kills.measure(server, options.out, options.seconds, options.seed)
                lines += limited_kills.measure(server, options.out, options.seconds / 3, None)
            elif name == "planned":
                lines += planned_kills.measure(server, options.out, options.seconds / 2, options.seed)
            else:
                lines += ratios.measure(server, options.out, quick=options.quick)
    print(table(lines))
    sys.exit(any(line.promise and not line.is_good for line in lines))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scheduling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("measurements", nargs="*", metavar="MEASUREMENT", help=f"of {', '.join(MEASUREMENTS)}; all")
    parser.add_argument("--seconds", type=float, help="of kills (default: 180; with --quick 30)")
    parser.add_argument("--seed", type=int, default=0, help="of who is killed, and when")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="of notes and logs; a temporary one by default")
    parser.add_argument("--quick", action="store_true", help="a sixth of the time, and less work: for a look")
    options = parser.parse_args()
    for name in options.measurements:
        if name not in MEASUREMENTS:
            parser.error(f"{name!r} is not allowed; {', '.join(MEASUREMENTS)}")
    options.seconds = options.seconds or (30.0 if options.quick else 180.0)
    options.out = options.out or Path(tempfile.mkdtemp(prefix="bench-scheduling-"))
    return options


if __name__ == "__main__":
    main()

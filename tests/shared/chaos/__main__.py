"""`just chaos [seconds] [--seed N]`: all features together under faults, then the checker.

Three services and a foreign one process jobs with keys and limits, schedules, graphs of 200 jobs, loads from a flaky
server, and calls of durable processes, while they are killed, ended and suspended, and their database is restarted and
crashed. Then all records are checked against docs/guarantees.md (histories.py). The exit code is 1 if a guarantee was
broken. `--seed` repeats the order of the faults, `--without` takes a guard out (broken.py).
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import broken

from chaos.course import Course, report, run_course


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(prog="just chaos", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("seconds", type=float, nargs="?", default=120)
    parser.add_argument("--seed", type=int, help="of the faults and of what clients ask (default: random)")
    parser.add_argument("--without", choices=broken.GUARDS, metavar="GUARD", help="a guard to take out")
    options = parser.parse_args()
    if options.without:
        broken.take_out(options.without)
    # Its processes end with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    seed = random.randrange(1_000_000) if options.seed is None else options.seed
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    course = Course(options.seconds, seed, folder, say)
    say(f"seed {seed}, {options.seconds:g} s, in {folder}")
    run_course(course)
    say(report(course))
    if course.broken:
        sys.exit(1)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()

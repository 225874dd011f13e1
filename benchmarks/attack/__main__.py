"""Attack a service over HTTP in ways that have stopped other servers, and check that it continues to answer.

    python -m benchmarks.attack [--only NAME …] [--seconds 10]

Each attack has its own `dataloader serve`, with 1,024 files and an embedded PostgreSQL in a temporary folder, on
loopback. Meanwhile another process requests /health fifty times a second, without waiting for earlier answers; in some
attacks also an address that has to stay reachable. The table has a line for each attack. The exit status is 1 if one of
them has missed a bound. All attacks together take about three minutes.
"""

from __future__ import annotations

import argparse
import resource
import signal
import sys
import tempfile
from pathlib import Path

import trio

from benchmarks.attack.attacks import ATTACKS, FILES, Attack, Target
from benchmarks.attack.service import open_service
from benchmarks.attack.verdict import HEADER, Row, line, missed


def main() -> None:
    options = _options()
    # An ended attack stops its service and removes its directory.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < FILES:
        sys.exit(f"the attacks need {FILES:,} open files; the hard limit (ulimit -Hn) is {hard:,}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(HEADER, flush=True)
    good = True
    with tempfile.TemporaryDirectory(prefix="attack-") as directory:
        for name in options.only or ATTACKS:
            row = measure(name, ATTACKS[name], Path(directory), options.seconds)
            print(line(row), flush=True)
            print(*row.errors, sep="\n", end="\n" if row.errors else "", file=sys.stderr, flush=True)
            good = good and not missed(row)
    sys.exit(0 if good else 1)


def measure(name: str, attack: Attack, directory: Path, seconds: float) -> Row:
    """Return the effects of an attack on its own service."""
    with open_service(directory) as service:
        target = Target(service.host, service.port)
        kept = trio.run(attack.prepare, target) if attack.prepare else None
        service.settle()
        with service.probed(attack.also_asked(kept) if attack.also_asked else None) as probed:
            trio.run(_for_a_while, attack, target, kept, seconds)
        return Row(
            name=name,
            rss_mib=service.peak_mib(),
            health_ms=tuple(probed.took_ms),
            lost=probed.lost,
            errors=tuple(service.errors()),
        )


async def _for_a_while(attack: Attack, target: Target, kept: object, seconds: float) -> None:
    with trio.move_on_after(seconds):
        await attack.run(target, kept)
        # Its open connections continue.
        await trio.sleep_forever()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="just attack", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=ATTACKS, metavar="NAME", help=f"of {', '.join(ATTACKS)}")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long each attack goes on [10]")
    return parser.parse_args()


if __name__ == "__main__":
    main()

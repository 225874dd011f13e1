"""Measure dataloader and its peers on one server, and print one table.

    python -m benchmarks.peers [--workloads w1,w3] [--peers dataloader,pgqueuer] [--runs 3] [--out FILE] [--svg FILE]
    python -m benchmarks.peers --quick
    python -m benchmarks.peers --summary FILE [--svg FILE] [--json]

Needs the dependency group `bench`. Run it from the repository's root, on an otherwise idle machine. The exit status is
1 if a measurement failed; a missed bar is not a failure.
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
import tempfile
import time
from pathlib import Path

import attrs

from benchmarks.peers import results
from benchmarks.peers.arena import Arena
from benchmarks.peers.contenders import ALL, OURS, chosen
from benchmarks.peers.plan import Step, planned
from benchmarks.peers.plot import svg
from benchmarks.peers.progress import say, tracked
from benchmarks.peers.results import Result
from benchmarks.peers.workload import FULL, QUICK, Sizes
from benchmarks.peers.workloads import WORKLOADS
from dataloader import embedded_postgres

QUICK_PEERS = f"{OURS},pgqueuer"
QUICK_WORKLOADS = "w1,w7,w2,w3,w6,w10,w12"
QUICK_LIMIT_S = 100
"""Later measurements are skipped, so that a slow machine also finishes in two minutes."""


def main() -> None:
    began = time.monotonic()
    options = _options()
    if options.summary is None:
        options.summary = options.out or Path(tempfile.mkdtemp(prefix="bench-")) / "results.jsonl"
        say(f"results go to {options.summary}, what the tools log to files beside it")
        _measure(options, began)
        took = f" It took {time.monotonic() - began:.0f} s."
    else:
        took = ""
    found = results.read(options.summary)
    if options.json:
        print(results.as_json(found, WORKLOADS))
    else:
        print(f"{results.table(found, WORKLOADS)}\n\n{results.closing(found, WORKLOADS)}{took}")
    if options.svg is not None:
        options.svg.write_text(svg(found, WORKLOADS), encoding="utf-8")
    sys.exit(any(result.error for result in found))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workloads", help="names with commas; all by default")
    parser.add_argument("--peers", help="tools, or one of their modes such as 'pgqueuer tuned', with commas")
    parser.add_argument("--runs", type=int, help="of each; medians need 3 (default: 3, quick: 1)")
    parser.add_argument("--quick", action="store_true", help="two minutes: small, few, against pgqueuer; no proof")
    sizes = parser.add_argument_group(
        "sizes", "instead of the plan's, for a machine or an hour that has no room for it"
    )
    for field in attrs.fields(Sizes):
        kind = float if isinstance(field.default, float) else int
        sizes.add_argument(f"--{field.name.replace('_', '-')}", type=kind, metavar="N")
    parser.add_argument("--dir", type=Path, help="where the server keeps its data; a temporary directory by default")
    parser.add_argument("--out", type=Path, help="keep the results in this file; what it has already is not run again")
    parser.add_argument("--summary", type=Path, metavar="FILE", help="measure nothing; print the table of this file")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also draw the bars and W1's rates")
    parser.add_argument("--json", action="store_true", help="print what the table shows as JSON")
    return parser.parse_args()


def _measure(options: argparse.Namespace, began: float) -> None:
    names = (options.workloads or (QUICK_WORKLOADS if options.quick else ",".join(WORKLOADS))).split(",")
    unknown = set(names) - WORKLOADS.keys()
    if unknown:
        raise SystemExit(f"no such workload: {', '.join(sorted(unknown))}; there are {', '.join(WORKLOADS)}")
    given = {field.name: getattr(options, field.name) for field in attrs.fields(Sizes)}
    sizes = attrs.evolve(
        QUICK if options.quick else FULL, **{name: value for name, value in given.items() if value is not None}
    )
    options.summary.touch()
    kept = results.read(options.summary)
    if any(result.sizes != attrs.asdict(sizes) for result in kept):
        raise SystemExit(f"{options.summary} has results of other sizes: name another file, or give the same options")
    steps = planned(
        [WORKLOADS[name] for name in names],
        chosen((options.peers or (QUICK_PEERS if options.quick else ",".join(ALL))).split(",")),
        options.runs or (1 if options.quick else 3),
        kept=kept,
        for_bars=options.quick and options.peers is None,
    )
    if options.dir is not None:
        options.dir.mkdir(parents=True, exist_ok=True)
    until = began + QUICK_LIMIT_S if options.quick and options.workloads is None else math.inf
    # An ended benchmark stops its server and removes its directory.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with (
        tempfile.TemporaryDirectory(prefix="bench-", dir=options.dir) as directory,
        embedded_postgres(Path(directory)) as server,
    ):
        arena, workload = Arena(server, options.summary.parent), None
        for step in tracked(steps):
            if time.monotonic() > until:
                say(f"{step} is left out: the time is up")
                continue
            if step.workload is not workload and not options.quick:
                arena.forget_templates()
            workload = step.workload
            _result(arena, step, sizes).append_to(options.summary)


def _result(arena: Arena, step: Step, sizes: Sizes) -> Result:
    figures, error = {}, ""
    try:
        figures = dict(step.workload.measure(arena, step.contender, sizes))
    except Exception as raised:  # noqa: BLE001 - the others must still be measured; the table reports it
        error = f"{type(raised).__name__}: {raised}"[:300]
    shown = ", ".join(f"{figure} {value:.4g}" for figure, value in figures.items())
    say(f"{step}: {error or shown}")
    return Result(step.workload.name, step.contender.name, step.run, figures, error, attrs.asdict(sizes))


if __name__ == "__main__":
    main()

"""Measure dataloader and its peers on one server, and print one table.

    python -m benchmarks.peers [--workloads w1,w3] [--peers dataloader,pgqueuer] [--runs 3] [--quick] [--out FILE]
    python -m benchmarks.peers --summary FILE [--svg FILE]

Needs the dependency group `bench`. Run it from the repository's root, on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import attrs

from benchmarks.peers import results
from benchmarks.peers.arena import Arena
from benchmarks.peers.contenders import ALL, OURS, Contender, chosen
from benchmarks.peers.plot import svg
from benchmarks.peers.results import Result
from benchmarks.peers.workload import FULL, QUICK, Sizes, Workload
from benchmarks.peers.workloads import WORKLOADS
from dataloader import embedded_postgres

QUICK_PEERS = f"{OURS},pgqueuer"
QUICK_WORKLOADS = "w1,w2,w3,w6,w7"


def main() -> None:
    options = _options()
    if options.summary is None:
        options.summary = options.out or Path(tempfile.mkdtemp(prefix="bench-")) / "results.jsonl"
        _measure(options)
    found = results.read(options.summary)
    print(results.table(found))
    if options.svg is not None:
        options.svg.write_text(svg(found))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workloads", help="names with commas; all by default")
    parser.add_argument("--peers", help="tools, or one of their modes such as 'pgqueuer tuned', with commas")
    parser.add_argument("--runs", type=int, help="of each; medians need 3 (default: 3, quick: 1)")
    parser.add_argument("--quick", action="store_true", help="small, few and against pgqueuer alone: a look, no proof")
    sizes = parser.add_argument_group(
        "sizes", "instead of the plan's, for a machine or an hour that has no room for it"
    )
    for field in attrs.fields(Sizes):
        kind = float if isinstance(field.default, float) else int
        sizes.add_argument(f"--{field.name.replace('_', '-')}", type=kind, metavar="N")
    parser.add_argument("--dir", type=Path, help="where the server keeps its data; a temporary directory by default")
    parser.add_argument("--out", type=Path, help="a file that the results are appended to, a JSON line each")
    parser.add_argument("--summary", type=Path, metavar="FILE", help="measure nothing; print the table of this file")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also draw W1")
    return parser.parse_args()


def _measure(options: argparse.Namespace) -> None:
    contenders = chosen((options.peers or (QUICK_PEERS if options.quick else ",".join(ALL))).split(","))
    names = (options.workloads or (QUICK_WORKLOADS if options.quick else ",".join(WORKLOADS))).split(",")
    unknown = set(names) - WORKLOADS.keys()
    if unknown:
        raise SystemExit(f"no such workload: {', '.join(sorted(unknown))}; there are {', '.join(WORKLOADS)}")
    given = {field.name: getattr(options, field.name) for field in attrs.fields(Sizes)}
    sizes = attrs.evolve(
        QUICK if options.quick else FULL, **{name: value for name, value in given.items() if value is not None}
    )
    runs = options.runs or (1 if options.quick else 3)
    # So that a benchmark that is ended stops its server and takes its directory along.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(prefix="bench-", dir=options.dir) as directory:
        logs = options.summary.parent
        with embedded_postgres(Path(directory)) as server:
            arena = Arena(server, logs)
            for name in names:
                for result in _results(arena, WORKLOADS[name], contenders, sizes, runs):
                    result.append_to(options.summary)
                arena.forget_templates()


def _results(
    arena: Arena, workload: Workload, contenders: list[Contender], sizes: Sizes, runs: int
) -> Iterable[Result]:
    """Measure in turn, so that what else the machine does falls on all of them."""
    for run in range(1, runs + 1):
        for contender in contenders:
            if (workload.solo and contender.peer != OURS) or (contender.mode != "default" and not workload.of_modes):
                continue
            try:
                result = Result(workload.name, contender.name, run, dict(workload.measure(arena, contender, sizes)))
            except Exception as error:  # noqa: BLE001 - the others are still to be measured; the table tells of it
                result = Result(workload.name, contender.name, run, {}, f"{type(error).__name__}: {error}"[:300])
            shown = ", ".join(f"{figure} {value:.4g}" for figure, value in result.figures.items())
            print(f"# {workload.name} {contender.name} run {run}: {result.error or shown}", flush=True)
            yield result


if __name__ == "__main__":
    main()

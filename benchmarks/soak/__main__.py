"""Run services for hours at a fixed rate, kill and restart some at times, and check that nothing grows or is lost.

    python -m benchmarks.soak [--hours 1] [--minutes N] [--rate 200] [--out FOLDER] [--seed N]

Three `dataloader serve` on an embedded PostgreSQL with durability. Needs the dependency group `bench`. Run it from the
repository's root. The folder gets report.md, soak.svg, samples.jsonl and the services' logs; a run of less than an hour
says little, one of less than two minutes has too few samples. The exit status is 1 when the verdict is bad.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import TextIO

from benchmarks.peers.progress import say
from benchmarks.soak.feed import Feed
from benchmarks.soak.fleet import Fleet
from benchmarks.soak.plot import svg
from benchmarks.soak.report import page
from benchmarks.soak.sampling import EVERY_S, Sampler
from benchmarks.soak.verdict import Sample, SoakOutcome, judged
from dataloader import embedded_postgres

BLOWS_S = (20.0, 60.0)
"""Shortest and longest time between two kills or stops."""
SETTLE_S = 120


def main() -> None:
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    say(f"everything goes to {options.out}")
    # An ended soak stops its server and removes its directory.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    chance = random.Random(options.seed)
    with (
        tempfile.TemporaryDirectory(prefix="soak-") as directory,
        tempfile.TemporaryDirectory(prefix="soak-keys-") as keys,
        embedded_postgres(Path(directory)) as server,
        (options.out / "samples.jsonl").open("w", encoding="utf-8") as kept,
    ):
        fleet = Fleet(server.dsn, options.out, Path(keys), chance)
        with fleet:
            sampler = Sampler(server.dsn, fleet)
            fleet.wait()
            samples, accepted = _soak(fleet, sampler, options, chance, kept)
        # After the end of the fleet nothing changes anymore.
        sampler.clear(0)
        overlaps = Path(keys, "overlaps")
        outcome = SoakOutcome(
            seconds=options.seconds,
            per_s=options.rate,
            accepted=accepted,
            ended=dict(sampler.ended),
            left=sampler.open_jobs(),
            overlaps=len(overlaps.read_text().splitlines()) if overlaps.exists() else 0,
            unexpected_exits=fleet.unexpected,
        )
    judgements = judged(samples, outcome)
    report = page(judgements, outcome, fleet.blows, options.seed)
    (options.out / "report.md").write_text(report, encoding="utf-8")
    picture = svg(samples, fleet.blows, f"{options.rate} jobs a second")
    (options.out / "soak.svg").write_text(picture, encoding="utf-8")
    print(report)
    sys.exit(not all(judgement.is_good for judgement in judgements))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--minutes", type=float, help="instead of --hours")
    parser.add_argument("--rate", type=int, default=200, help="jobs a second (default: 200)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="a temporary one by default")
    parser.add_argument("--seed", type=int, default=0, help="of what is done to which service, and when")
    options = parser.parse_args()
    options.seconds = (options.hours * 60 if options.minutes is None else options.minutes) * 60
    options.out = options.out or Path(tempfile.mkdtemp(prefix="soak-"))
    return options


def _soak(
    fleet: Fleet, sampler: Sampler, options: argparse.Namespace, chance: random.Random, kept: TextIO
) -> tuple[list[Sample], int]:
    """Feed, kill, restart and sample until the time is up and all jobs have ended. Return samples and accepted jobs."""
    samples: list[Sample] = []
    feed = Feed(fleet, options.rate)
    feed.start()
    began = time.monotonic()
    strike_at, sample_at = chance.uniform(*BLOWS_S), float(EVERY_S)
    while (at_s := time.monotonic() - began) < options.seconds:
        time.sleep(0.2)
        fleet.tend()
        if not feed.is_alive():
            raise SystemExit("nothing is fed any more: see what was written before")
        if at_s >= strike_at:
            fleet.strike(at_s)
            strike_at = at_s + chance.uniform(*BLOWS_S)
        if at_s >= sample_at:
            samples.append(sampler.sample(at_s, feed.accepted))
            kept.write(json.dumps(samples[-1]) + "\n")
            kept.flush()
            shown = {name: samples[-1].get(name, float("nan")) for name in ("p50_ms", "p99_ms", "rss_mib")}
            figures = ", ".join(f"{name} {value:.1f}" for name, value in shown.items())
            say(f"{at_s:.0f} of {options.seconds:.0f} s: {feed.accepted:,} accepted, {figures}")
            sample_at += EVERY_S
    feed.stop()
    until = time.monotonic() + SETTLE_S
    while sampler.open_jobs() and time.monotonic() < until:
        fleet.tend()
        time.sleep(0.2)
    fleet.wait()
    return samples, feed.accepted


if __name__ == "__main__":
    main()

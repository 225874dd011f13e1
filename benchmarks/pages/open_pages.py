"""Drain with fifty open pages, and without, alternating: the pages' clients refresh when each answer says so.

The clients run in a separate process, whose CPU time is subtracted: a machine of two cores has that much less.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from benchmarks.pages.site import MODULE, QUEUE
from benchmarks.peers.progress import say
from benchmarks.scheduling.databases import enqueued, migrated
from benchmarks.scheduling.reached import Reached
from dataloader import NewJob
from dataloader.store.embedded.postgres import EmbeddedPostgres

OPEN: Final = 50
PATHS: Final = ("/ui", "/ui/jobs", "/ui/jobs?status=failed", "/ui/queues", "/ui/schedules")


def measure(server: EmbeddedPostgres, folder: Path, *, quick: bool) -> list[Reached]:
    """Measure the drain's rate with the pages relative to that without, and how often a page was refreshed."""
    number, pairs = (20_000, 1) if quick else (60_000, 3)
    ratios, every, own = [], [], []
    for pair in range(pairs):
        rates = {}
        for pages in (0, OPEN) if pair % 2 else (OPEN, 0):
            say(f"drain {pair + 1} of {pairs}, {pages} open pages")
            name = f"open_{pair}_{pages}"
            dsn = migrated(server, name)
            enqueued(dsn, [NewJob(task="free", queue=QUEUE) for _ in range(number)])
            found = _drained(dsn, number, pages, folder)
            rates[pages] = found["per_s"] / (1 - found["clients_cpu_s"] / found["took_s"] / (os.cpu_count() or 1))
            if pages:
                every.append(found["came_again_s"])
                own.append(found["clients_cpu_s"] / found["took_s"])
        ratios.append(rates[OPEN] / rates[0])
    note = f"{', '.join(f'{ratio:.2f}' for ratio in ratios)}; the clients took {statistics.median(own):.2f} of a core"
    return [
        Reached(f"a drain beside {OPEN} open pages, by alone", statistics.median(ratios), least=0.93, note=note),
        Reached("a page of fifty came again after, s: median", statistics.median(every)),
    ]


def _drained(dsn: str, number: int, pages: int, folder: Path) -> dict[str, float]:
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.pages.drained", dsn, str(number), str(pages), MODULE, QUEUE, *PATHS],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    (folder / f"drained-{time.time():.0f}.log").write_text(run.stderr)
    if run.returncode:
        raise SystemExit(run.stderr[-3000:])
    found: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return found

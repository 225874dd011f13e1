"""Searches in a million processes: each kind, its first page and a later one."""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import Any, Final

import trio

from benchmarks.processes.measured_types import TYPE
from benchmarks.scheduling.reached import Reached
from dataloader import open_client
from dataloader.jobs.failures import group_id
from dataloader.jobs.process_listings import ProcessFilter

LATER: Final = 4
"""Number of pages before the later one."""
PAGE: Final = 50
MOST_MS: Final = 20

WANTED: Final[dict[str, dict[str, Any]]] = {
    "all": {},
    "type": {"type": TYPE},
    "status running": {"status": "running"},
    "status error": {"status": "error"},
    "type and status": {"type": TYPE, "status": "error"},
    "error group": {"error_group": group_id(3, None)},
    "id": {"process_id": "many 777777"},
    "metadata that 20 have": {"metadata": {"customer": "c777"}},
    "metadata that a third has": {"metadata": {"country": "de"}},
    "metadata that the oldest 100 have": {"metadata": {"is_first": True}},
    "metadata, type and status": {"metadata": {"country": "de"}, "type": TYPE, "status": "error"},
    "metadata that nobody has": {"metadata": {"country": "xx"}},
    "status that nobody has": {"status": "init"},
}


def measure(dsn: str, rounds: int) -> list[Reached]:
    """Return the slowest kind's median, with each of them in the note."""
    took = trio.run(partial(_took, dsn, rounds))
    slowest = max(took, key=lambda name: took[name])
    listed = ", ".join(f"{name} {ms:.1f}" for name, ms in took.items())
    return [Reached(f"the slowest search, ms: {slowest}", took[slowest], most=MOST_MS, note=listed)]


async def _took(dsn: str, rounds: int) -> dict[str, float]:
    took: dict[str, list[float]] = {}
    async with open_client(dsn) as client:
        ask = client.processes

        async def look(name: str, wanted: ProcessFilter, after: str | None) -> str | None:
            began = time.perf_counter()
            page = await ask.find(wanted, limit=PAGE, after=after)
            took.setdefault(name, []).append((time.perf_counter() - began) * 1000)
            return page.next

        for _ in range(rounds):
            for name, criteria in WANTED.items():
                wanted = ProcessFilter(**criteria)
                after = await look(name, wanted, None)
                for _ in range(LATER - 1):
                    after = after and (await ask.find(wanted, limit=PAGE, after=after)).next
                if after:
                    await look(f"{name}, page {LATER + 1}", wanted, after)
            began = time.perf_counter()
            await ask.errors()
            took.setdefault("groups of errors", []).append((time.perf_counter() - began) * 1000)
    return {name: statistics.median(times) for name, times in took.items()}

"""Durations of each page with very many ended jobs: p95, and CPU time, which other processes disturb less."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

from benchmarks.pages.site import addresses, connected, fill, get, service
from benchmarks.peers.progress import say
from benchmarks.scheduling.databases import migrated
from benchmarks.scheduling.reached import Reached
from benchmarks.server_cpu import cpu_s
from dataloader.store.embedded.postgres import EmbeddedPostgres

ASKED: Final = 60


def measure(server: EmbeddedPostgres, folder: Path, ended: int) -> list[Reached]:
    """Return a line for each page."""
    dsn = migrated(server, "history")
    say(f"{ended:,} ended jobs")
    fill(dsn, ended)
    lines = []
    with service(server, "history", folder) as fleet:
        fleet.wait()
        connection = connected(str(fleet.services[0].url))

        def used_s() -> float:
            return cpu_s(fleet.services[0].process.pid) + cpu_s(server.pid)

        for name, path in addresses(dsn).items():
            _took_ms(connection, path)
            before = used_s()
            took = sorted(_took_ms(connection, path) for _ in range(ASKED))
            p95 = took[round(ASKED * 0.95) - 1]
            note = f"{(used_s() - before) / ASKED * 1_000:.0f} ms of CPU, of the service and PostgreSQL"
            lines.append(Reached(f"{name} with {ended:,} ended jobs: p95, ms", p95, most=25, note=note))
    return lines


def _took_ms(connection: object, path: str) -> float:
    began = time.perf_counter()
    status, body, _ = get(connection, path)  # type: ignore[arg-type]
    if status != 200:
        raise SystemExit(f"{path} was answered {status}:\n{body.decode()[:2000]}")
    return (time.perf_counter() - began) * 1_000

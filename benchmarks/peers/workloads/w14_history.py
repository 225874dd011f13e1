"""W14: a table full of finished rows changes nothing: drain, latency, and every list of the API.

The rows are added by SQL: enqueueing and running ten million jobs would take an hour.
"""

from __future__ import annotations

import contextlib
import http.client
import math
import statistics
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final
from urllib.parse import urlsplit

import psycopg

from benchmarks.peers.arena import Arena, Load
from benchmarks.peers.contenders import Contender
from benchmarks.peers.drain import drain
from benchmarks.peers.latency import one_at_a_time
from benchmarks.peers.workload import Bar, Figures, Sizes, Workload

FEW = 10_000
ASKED = 40

_FINISHED = """
INSERT INTO dl_jobs (job_id, queue, task, args, lock_key, status, attempt, created_at, started_at, finished_at)
SELECT gen_random_uuid(), 'old-' || n %% 10, 'task-' || n %% 100, '{}', 'key-' || n,
       CASE WHEN n %% 100 = 0 THEN 'failed' ELSE 'succeeded' END::dl_status, 1, at, at, at
FROM generate_series(1, %s) AS n
CROSS JOIN LATERAL (SELECT now() - make_interval(secs => 86400 + n / 100.0) AS at) AS instant
"""
LISTS: Final = ("by queue", "by status", "by task", "by lock key", "by time", "all", "/status", "/metrics")


def _addresses(finished: int) -> dict[str, str]:
    """Return every list; the requested rows are behind others, the one with the key behind half of them."""
    yesterday = datetime.now(UTC) - timedelta(seconds=86_450)
    paths = (
        "/api/v1/jobs?queue=old-3",
        "/api/v1/jobs?status=failed",
        "/api/v1/jobs?task=task-42",
        f"/api/v1/jobs?lock_key=key-{finished // 2}",
        f"/api/v1/jobs?created_to={yesterday:%Y-%m-%dT%H:%M:%SZ}",
        "/api/v1/jobs",
        "/status",
        "/metrics",
    )
    return dict(zip(LISTS, paths, strict=True))


def measure(arena: Arena, contender: Contender, sizes: Sizes) -> Figures:
    # Each measurement with few rows and immediately afterwards with many: the machine's speed changes within minutes.
    tables = {"few": FEW, "many": sizes.finished}
    rows = {name: partial(_fresh, arena, contender, count, name) for name, count in tables.items()}
    for fresh in rows.values():
        fresh()
    took = {
        name: statistics.median(one_at_a_time(arena, contender, fresh(), samples=sizes.samples))
        for name, fresh in rows.items()
    }
    rates = {name: _drained(arena, contender, fresh(), sizes) for name, fresh in rows.items()}
    lists = _lists(arena, contender, {name: (rows[name](), count) for name, count in tables.items()})
    figures = {f"{name} {address}": value for name, found in lists.items() for address, value in found.items()}
    figures |= {f"{name} p50_ms": value for name, value in took.items()}
    figures |= {f"{name} rate": value for name, value in rates.items()}
    return figures | {
        "rate_ratio": rates["many"] / rates["few"],
        "p50_ratio": took["many"] / took["few"],
        "list_ratio": max(lists["many"][address] / lists["few"][address] for address in LISTS),
    }


def _fresh(arena: Arena, contender: Contender, finished: int, name: str) -> str:
    """Return a database with `finished` finished rows; there is one of each name at a time."""

    def fill(connection: psycopg.Connection[Any]) -> None:
        connection.execute(_FINISHED, (finished,))

    return arena.fresh(contender, change=fill, label=f"_f{finished}", name=name)


def _drained(arena: Arena, contender: Contender, database: str, sizes: Sizes) -> float:
    arena.call(contender, database, "load", *Load(sizes.drain).arguments)
    # The finished rows of the template are complete before the start, so they are excluded.
    counted = Contender(peer=contender.peer, done=f"{contender.done} AND queue NOT LIKE 'old-%'", rows=contender.rows)
    return drain(arena, counted, database, jobs=sizes.drain, cap_s=sizes.cap_s).rate


def _lists(arena: Arena, contender: Contender, databases: Mapping[str, tuple[str, int]]) -> dict[str, dict[str, float]]:
    """Return the milliseconds of each address, the median of some requests; infinite if one was refused as too slow.

    The databases alternate; each comes with its number of finished rows.
    """
    took: dict[str, dict[str, list[float]]] = {name: {address: [] for address in LISTS} for name in databases}
    with contextlib.ExitStack() as stack:
        connections = {}
        for name, (database, _) in databases.items():
            service = stack.enter_context(arena.program(contender, database, "worker", "--no-queues"))
            connections[name] = http.client.HTTPConnection(urlsplit(service.wait("ready")["url"]).netloc, timeout=60)
        for _ in range(ASKED):
            for name, (_, finished) in databases.items():
                for address, path in _addresses(finished).items():
                    took[name][address].append(_took_ms(connections[name], path))
    return {
        name: {address: statistics.median(times) for address, times in found.items()} for name, found in took.items()
    }


def _took_ms(connection: http.client.HTTPConnection, path: str) -> float:
    began = time.perf_counter()
    connection.request("GET", path)
    answer = connection.getresponse()
    answer.read()
    return (time.perf_counter() - began) * 1000 if answer.status == http.client.OK else math.inf


WORKLOAD = Workload(
    name="w14",
    title="finished rows in the table",
    measure=measure,
    figures={
        "few rate": "few: drain, jobs/s",
        "many rate": "many: drain, jobs/s",
        "few p50_ms": "few: trigger to start, p50, ms",
        "many p50_ms": "many: trigger to start, p50, ms",
        **{f"{rows} {name}": f"{rows}: {name}, ms" for name in LISTS for rows in ("few", "many")},
    },
    bars=(
        Bar(text="drain ≥ 0.9 × that with few", figure="rate_ratio", least=0.9),
        Bar(text="latency ≤ 1.1 × that with few", figure="p50_ratio", most=1.1),
        Bar(text="the worst list ≤ 1.1 × that with few", figure="list_ratio", most=1.1),
    ),
    solo=True,
)

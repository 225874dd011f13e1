"""W14: a table full of finished rows changes nothing: drain, latency, and every list of the API.

The rows are put there by SQL: enqueueing and running ten million jobs would take an hour.
"""

from __future__ import annotations

import http.client
import math
import statistics
import time
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from urllib.parse import urlsplit

import psycopg

from benchmarks.peers.arena import Arena, Load
from benchmarks.peers.contenders import Contender
from benchmarks.peers.drain import drain
from benchmarks.peers.latency import one_at_a_time
from benchmarks.peers.workload import Bar, Figures, Sizes, Workload

FEW = 10_000
ASKED = 20

_FINISHED = """
INSERT INTO dl_jobs (job_id, queue, task, args, lock_key, status, attempt, created_at, started_at, finished_at)
SELECT gen_random_uuid(), 'old-' || n %% 10, 'task-' || n %% 100, '{}', 'key-' || n,
       CASE WHEN n %% 1000 = 0 THEN 'failed' ELSE 'succeeded' END::dl_status, 1, at, at, at
FROM generate_series(1, %s) AS n
CROSS JOIN LATERAL (SELECT now() - make_interval(secs => 86400 + n / 100.0) AS at) AS instant
"""
LISTS: Final = ("by queue", "by status", "by task", "by lock key", "by time", "all", "/status", "/metrics")


def _addresses(finished: int) -> dict[str, str]:
    """Every list; the rows asked for lie behind others, the one with the key behind half of them."""
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
    few, many = (_with(arena, contender, count, sizes) for count in (FEW, sizes.finished))
    figures = {f"few {name}": value for name, value in few.items()} | many
    slower = [many[address] / few[address] for address in LISTS]
    return figures | {
        "rate_ratio": many["rate"] / few["rate"],
        "p50_ratio": many["p50_ms"] / few["p50_ms"],
        "list_ratio": max(slower),
    }


def _with(arena: Arena, contender: Contender, finished: int, sizes: Sizes) -> dict[str, float]:
    """The figures with so many finished rows in the table."""

    def fill(connection: psycopg.Connection[Any]) -> None:
        connection.execute(_FINISHED, (finished,))

    label = f"_f{finished}"
    database = arena.fresh(contender, change=fill, label=label)
    took = one_at_a_time(arena, contender, database, samples=sizes.samples)
    lists = _lists(arena, contender, database, finished)
    database = arena.fresh(contender, change=fill, label=label)
    arena.call(contender, database, "load", *Load(sizes.drain).arguments)
    # The finished rows of the template are complete before the start, so they are counted out.
    counted = Contender(peer=contender.peer, done=f"{contender.done} AND queue NOT LIKE 'old-%'", rows=contender.rows)
    drained = drain(arena, counted, database, jobs=sizes.drain, cap_s=sizes.cap_s)
    return lists | {"rate": drained.rate, "p50_ms": statistics.median(took)}


def _lists(arena: Arena, contender: Contender, database: str, finished: int) -> dict[str, float]:
    """Milliseconds of each address, the median of some requests; infinite if one was refused, as too slow ones are."""
    with arena.program(contender, database, "worker", "--no-queues") as service:
        connection = http.client.HTTPConnection(urlsplit(service.wait("ready")["url"]).netloc, timeout=60)
        return {name: statistics.median(_took(connection, path)) for name, path in _addresses(finished).items()}


def _took(connection: http.client.HTTPConnection, path: str) -> list[float]:
    took = []
    for _ in range(ASKED):
        began = time.perf_counter()
        connection.request("GET", path)
        answer = connection.getresponse()
        answer.read()
        if answer.status != http.client.OK:
            return [math.inf]
        took.append((time.perf_counter() - began) * 1000)
    return took


WORKLOAD = Workload(
    name="w14",
    title="finished rows in the table",
    measure=measure,
    figures={
        "few rate": f"{FEW:,} finished, jobs/s",
        "rate": "many finished, jobs/s",
        "p50_ms": "many: trigger to start, p50, ms",
        **{name: f"many: {name}, ms" for name in LISTS},
    },
    bars=(
        Bar(text="drain ≥ 0.9 × that with few", figure="rate_ratio", least=0.9),
        Bar(text="latency ≤ 1.1 × that with few", figure="p50_ratio", most=1.1),
        Bar(text="the worst list ≤ 1.1 × that with few", figure="list_ratio", most=1.1),
    ),
    solo=True,
)

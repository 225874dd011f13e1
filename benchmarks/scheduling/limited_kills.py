"""Rate limits over four killed processes: no span exceeds them, by the records of handlers and source."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final
from urllib.parse import parse_qsl, urlsplit

import psycopg

from benchmarks.peers.progress import say
from benchmarks.scheduling.databases import enqueued, migrated
from benchmarks.scheduling.killed_fleet import KilledFleet
from benchmarks.scheduling.limited_tasks import COSTS, PARTNER, QUEUE
from benchmarks.scheduling.reached import Reached
from benchmarks.scheduling.spans import allowed_per_s, most_within, share_used
from dataloader import NewJob
from dataloader.store.embedded.postgres import EmbeddedPostgres

PROCESSES: Final = 4
SLOTS: Final = 20
ANSWER_S: Final = 0.03
TRIES: Final = 1_000
LEASE_S: Final = 5


class ItemSource(BaseHTTPRequestHandler):
    """Answers with a record for a day, and notes the time of the request."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    asked: list[float] = []  # noqa: RUF012 - a class attribute: each request has its own handler

    def do_GET(self) -> None:
        self.asked.append(time.monotonic())
        time.sleep(ANSWER_S)
        day = dict(parse_qsl(urlsplit(self.path).query))["day"]
        answer = json.dumps({"items": [{"day": day, "note": "as asked"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_args: object) -> None:
        """Do nothing."""


def measure(server: EmbeddedPostgres, folder: Path, seconds: float, seed: int | None) -> list[Reached]:
    """Run for `seconds`; without a seed no process is killed."""
    how = "undisturbed" if seed is None else "killed"
    dsn = migrated(server, f"limited_{how}")
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE fetched (day date PRIMARY KEY, note text)")
    each = round(allowed_per_s(PARTNER) * (seconds + 60) / sum(COSTS.values()) * 2)
    jobs = [
        NewJob(task=task, queue=QUEUE, max_attempts=TRIES, lease_ttl_sec=LEASE_S) for _ in range(each) for task in COSTS
    ]
    load = NewJob(
        task="fetch",
        queue=QUEUE,
        max_attempts=TRIES,
        lease_ttl_sec=LEASE_S,
        args={"from": "1900-01-01", "to": "1950-01-01"},
    )
    enqueued(dsn, [load, *jobs])
    ItemSource.asked = []
    source = ThreadingHTTPServer(("127.0.0.1", 0), ItemSource)
    threading.Thread(target=source.serve_forever, daemon=True).start()
    os.environ["SOURCE_URL"] = f"http://127.0.0.1:{source.server_address[1]}"
    notes = folder / f"limited-{how}"
    notes.mkdir()
    try:
        with KilledFleet(
            dsn, "benchmarks.scheduling.limited_tasks:tasks", PROCESSES, {QUEUE: SLOTS}, folder=notes
        ) as fleet:
            fleet.wait()
            fleet.run(seconds, None if seed is None else random.Random(seed))
            until = time.monotonic()
    finally:
        source.shutdown()
        source.server_close()
    return _judged(how, fleet.kills, _began(notes), list(ItemSource.asked), until)


def _began(notes: Path) -> list[tuple[float, str]]:
    lines = [line.split() for file in notes.glob("began-*") for line in file.read_text().splitlines()]
    return [(float(at), task) for at, task in lines]


def _judged(how: str, kills: int, began: list[tuple[float, str]], asked: list[float], until: float) -> list[Reached]:
    calls = [(at, COSTS[task]) for at, task in began] + [(at, 1) for at in asked]
    runs = Counter(task for _, task in began)
    say(f"{how}: {kills} kills, runs {dict(runs)}, {len(asked)} requests of the load")
    lines = [
        Reached(
            f"{how}: the most units in any {rate_limit.per_s:g} s",
            most_within(calls, rate_limit.per_s),
            most=rate_limit.requests,
            promise=True,
            note=f"{sum(runs.values()):,} starts, {len(asked):,} requests of the load, {kills} kills",
        )
        for rate_limit in PARTNER.rate_limits
    ]
    least = 0.9 if how == "undisturbed" else 0.7
    return [
        *lines,
        Reached(f"{how}: share of the lengthened rate limit", share_used(calls, PARTNER, until), least=least),
    ]

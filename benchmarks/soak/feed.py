"""Triggers jobs at a fixed rate by HTTP, in small batches, in any service that answers.

Each job has an idempotency key, and a batch is sent until it was accepted. So accepted jobs are numbered without gaps,
and only their number has to be kept.
"""

from __future__ import annotations

import http.client
import itertools
import json
import random
import threading
import time
from typing import Final
from urllib.parse import urlsplit

from benchmarks.soak.fleet import Fleet

EVERY_S: Final = 0.1
TIMEOUT_S: Final = 10
KEYS: Final = 500


class Feed(threading.Thread):
    """Thread that runs until `stop`; `accepted` is the number of accepted jobs so far."""

    def __init__(self, fleet: Fleet, per_s: int) -> None:
        super().__init__(daemon=True)
        self.accepted = 0
        self._fleet = fleet
        self._bulk = max(round(per_s * EVERY_S), 1)
        self._over = threading.Event()
        self._connections: dict[str, http.client.HTTPConnection] = {}

    def run(self) -> None:
        began = time.monotonic()
        for number in itertools.count():
            if self._over.wait(max(began + number * EVERY_S - time.monotonic(), 0)):
                return
            self._send()

    def stop(self) -> None:
        """Stop after the acceptance of the current batch."""
        self._over.set()
        self.join()

    def _send(self) -> None:
        sent = time.time()
        numbers = range(self.accepted, self.accepted + self._bulk)
        body = json.dumps({"jobs": [self._job(number, sent) for number in numbers]}).encode()
        while not any(self._accepts(url, body) for url in self._in_any_order()):
            time.sleep(0.05)
        self.accepted += self._bulk

    def _in_any_order(self) -> list[str]:
        urls = self._fleet.urls()
        return random.sample(urls, len(urls))

    @staticmethod
    def _job(number: int, sent: float) -> dict[str, object]:
        key = f"key-{number % KEYS}"
        args = {"sent": sent}
        return {"queue": "soak", "task": "work", "lock_key": key, "args": args, "idempotency_key": f"job-{number}"}

    def _accepts(self, url: str, body: bytes) -> bool:
        connection = self._connections.get(url)
        if connection is None:
            connection = self._connections[url] = http.client.HTTPConnection(urlsplit(url).netloc, timeout=TIMEOUT_S)
        try:
            connection.request("POST", "/api/v1/jobs/trigger/batch", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
        except (OSError, http.client.HTTPException):
            self._connections.pop(url).close()
            return False
        if answer.status not in {200, 201, 503}:
            raise RuntimeError(f"a bulk was answered with {answer.status}: {text[:500]!r}")
        return answer.status != 503

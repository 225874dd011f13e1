"""Requests /health of a worker during its measurement, and keeps the duration of each answer."""

from __future__ import annotations

import http.client
import statistics
import threading
import time
from typing import Self
from urllib.parse import urlsplit

EVERY_S = 0.05


class HealthProbe:
    """Thread with one connection. Leaving the block ends it."""

    def __init__(self, url: str) -> None:
        self.took_ms: list[float] = []
        self._address = urlsplit(url).netloc
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(5)

    def _ask(self) -> None:
        connection = http.client.HTTPConnection(self._address, timeout=5)
        while not self._over.wait(EVERY_S):
            began = time.perf_counter()
            try:
                connection.request("GET", "/health")
                connection.getresponse().read()
            except (OSError, http.client.HTTPException):
                if self._over.is_set():
                    return
                connection.close()
            self.took_ms.append((time.perf_counter() - began) * 1000)

    @property
    def p99_ms(self) -> float | None:
        """99th percentile of the answers; the slowest of fewer than 100. None before there are two."""
        if len(self.took_ms) < 2:
            return None
        if len(self.took_ms) < 100:
            return max(self.took_ms)
        return statistics.quantiles(self.took_ms, n=100)[98]

"""Counts what the server refuses, by kind, for `/metrics`, and says so in the log: one line a minute at the most.

Whoever sends too much can't make us write as much: a line for each refused connection would be the next attack.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

import trio
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from dataloader.jobs.logger import get_logger

log = get_logger(__name__)

QUIET_S: Final = 60.0
"""The least time between two lines."""


class Refusal(enum.StrEnum):
    """What was refused, or ended before its end."""

    GAVE_WAY = "connection_gave_way"
    NO_FILE = "no_file_for_connection"
    LATE_HEADER = "late_header"
    BAD_FRAMING = "bad_framing"
    BUSY = "too_many_requests"
    LONG_BODY = "long_body"
    LATE_BODY = "late_body"
    CUT_BODY = "cut_body"
    BODIES = "too_many_bytes_received"
    VALUES = "too_many_values"
    ANSWERS = "too_many_bytes_sent"
    SLOW_READER = "slow_reader"
    WAITS = "too_many_waits"


class Refusals(Collector):
    """The counts of one server. Used from its Trio thread."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register with `registry`, where `/metrics` finds it."""
        self.counts: Counter[Refusal] = Counter()
        self._untold: Counter[Refusal] = Counter()
        self._told_at = float("-inf")
        registry.register(self)

    def count(self, refusal: Refusal) -> None:
        """Something was refused. Never raises, waits or logs more than a line a minute."""
        self.counts[refusal] += 1
        self._untold[refusal] += 1
        now = trio.current_time()
        if now >= self._told_at + QUIET_S:
            self._told_at = now
            log.warning(
                "the HTTP server is at a limit: clients were refused",
                **{str(kind): number for kind, number in self._untold.items()},
            )
            self._untold.clear()

    def collect(self) -> Iterator[Metric]:
        """The family, for a scrape."""
        family = CounterMetricFamily(
            "dataloader_http_refused", "What the HTTP server refused or ended early, by kind.", labels=("kind",)
        )
        for refusal in Refusal:
            family.add_metric((refusal,), self.counts[refusal])
        yield family

    def describe(self) -> Iterable[Metric]:
        """The same family; the registry reads its name from it."""
        return self.collect()

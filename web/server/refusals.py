"""Counts of refusals by kind, for `/metrics`, which are logged in at most one line a minute.

A line for each refused connection would let an attacker fill the log.
"""

from __future__ import annotations

import collections
import enum
from typing import Final

import trio

from dataloader.jobs.logger import get_logger
from dataloader.jobs.measures import Counter

log = get_logger(__name__)

QUIET_S: Final = 60.0
"""Minimum time between two log lines, in seconds."""


class Refusal(enum.StrEnum):
    """Kind of a request or connection that was refused or cut off early."""

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
    WRONG_TOKENS = "too_many_wrong_tokens"


class Refusals:
    """Counts of one server. Used from its Trio thread."""

    def __init__(self) -> None:
        """Create counts without refusals."""
        self.counts: collections.Counter[Refusal] = collections.Counter()
        self._untold: collections.Counter[Refusal] = collections.Counter()
        self._told_at = float("-inf")

    def count(self, refusal: Refusal) -> None:
        """Count a refusal. Never raises or waits; logs at most one line a minute."""
        self.counts[refusal] += 1
        self._untold[refusal] += 1
        now = trio.current_time()
        if now >= self._told_at + QUIET_S:
            self._told_at = now
            log.warning(
                "the HTTP server reached a limit and refused clients",
                **{str(kind): number for kind, number in self._untold.items()},
            )
            self._untold.clear()

    def measure(self) -> Counter:
        """Return the counts by kind, for a scrape."""
        refused = Counter(
            "dataloader_http_refused",
            "Requests and connections that the HTTP server refused or closed early, by kind.",
            ("kind",),
        )
        for refusal in Refusal:
            refused.add(refusal, number=self.counts[refusal])
        return refused
